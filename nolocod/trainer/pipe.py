"""What the network process and the trainer say to each other, and how it is framed.

The rule: typed messages only, as MessagePack with a length before each; no pickle, and no tensors, which
cross in shared memory. One request at a time has one answer with the same id; reports come in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from nolocod.proto.types import Applied, Description, Inspection, Sampled, Standing, Subject  # noqa: TC001 - msgspec reads these annotations at run time

MAX_MESSAGE = 64 << 20
"""A longer message is a bug; the largest real one is `Setup`, with the run's tokenizer in its manifest."""


T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, tag=True):
    """Any message."""


class Setup(Message, frozen=True, kw_only=True):
    """All that a trainer needs to know. `manifest` is the sealed manifest's bytes."""

    manifest: bytes
    peer_id: str
    data: Path | None
    device: str
    threads: int
    """CPU threads; 0 leaves the choice to torch."""
    checkpoints: Path
    cache: Path


class Adopt(Message, frozen=True):
    """Take a donor's slow weights from a file, and its standing with them."""

    weights: Path
    standing: Standing


class Compare(Message, frozen=True):
    """Tell whether the slow weights lie near those of other donors."""

    samples: tuple[Sampled, ...]


class Train(Message, frozen=True):
    pass


class Pause(Message, frozen=True):
    pass


class Capture(Message, frozen=True):
    subject: Subject


class Inspect(Message, frozen=True):
    probation: bool


class Apply(Message, frozen=True):
    partner_round: int
    skipped: bytes
    """Blocks of our message that the partner could not decode (proto.types.Inspection)."""


class Solo(Message, frozen=True):
    pass


class Discard(Message, frozen=True):
    pass


class Checkpoint(Message, frozen=True):
    pass


class Dump(Message, frozen=True):
    path: Path


class Evaluate(Message, frozen=True):
    told: bool


class Stop(Message, frozen=True):
    pass


Command = (
    Setup | Adopt | Compare | Train | Pause | Capture | Inspect | Apply | Solo | Discard | Checkpoint | Dump | Evaluate | Stop
)


class Request(msgspec.Struct, frozen=True):
    id: int
    command: Command


class Progress(msgspec.Struct, frozen=True):
    """Where the replica is; goes with every answer and report."""

    standing: Standing
    inner_steps: int
    ages: tuple[int, ...]
    """For each fragment, the inner steps since its last outer step."""
    dense_due: tuple[bool, ...]
    """For each fragment, whether the slow weights must travel at its next paired outer step."""

    @property
    def steps_since_outer(self) -> int:
        """Inner steps since the last outer step, whatever its fragment."""
        return min(self.ages)


class Loaded(Message, frozen=True):
    """The model stands ready. `box_size` is the bytes of the largest message of the run."""

    standing: Standing
    parameters: int
    box_size: int
    source: Literal["seed", "checkpoint"]
    outbox_offset: int
    """Where the outbox begins in the shared memory; the inbox lies at its beginning. They may overlap (boxes.py)."""
    phase: int
    """Inner steps between outer steps."""
    trouble: tuple[str, ...]
    """What went wrong and was got round, for example a damaged checkpoint, by name."""


class Dumped(Message, frozen=True):
    """A file of slow weights was written whole."""

    standing: Standing
    description: Description


class Done(Message, frozen=True):
    pass


class Described(Message, frozen=True):
    description: Description


class Inspected(Message, frozen=True):
    inspection: Inspection


class Stepped(Message, frozen=True):
    applied: Applied


class Saved(Message, frozen=True):
    round: int
    size: int
    seconds: float


class Loss(Message, frozen=True):
    loss: float


class Compared(Message, frozen=True):
    objection: str
    """Why the weights are too far off; "" if they are not."""


class Failed(Message, frozen=True):
    """A command (or, with id 0, training itself) failed with one of our error codes."""

    code: str
    cause: str
    remedy: str


Result = Loaded | Dumped | Done | Described | Inspected | Stepped | Saved | Loss | Compared | Failed


class Answer(Message, frozen=True):
    id: int
    result: Result
    progress: Progress | None


class Trained(Message, frozen=True):
    """Inner steps since the last report."""

    steps: int
    tokens: int
    loss: float
    learning_rate: float
    seconds: float
    progress: Progress


class EvaluatedReport(Message, frozen=True):
    round: int
    loss: float
    seconds: float


Reply = Answer | Trained | EvaluatedReport


def _encode_path(value: Any) -> str:  # noqa: ANN401 - msgspec hands over whatever it does not know
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} does not cross the pipe")


def _decode_path(kind: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's own signature
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind} does not cross the pipe")


def frame(message: Request | Reply) -> bytes:
    """Encode `message` with its length (4 bytes, big-endian) before it."""
    body = msgspec.msgpack.encode(message, enc_hook=_encode_path)
    return len(body).to_bytes(4, "big") + body


class Unframer(Generic[T]):
    """Cuts a byte stream into messages; feeds of any size."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401 - a union is not a type to mypy
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_path)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that `data` completes."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes")
            if len(self._buffer) < 4 + length:
                break
            messages.append(self._decoder.decode(self._buffer[4 : 4 + length]))
            del self._buffer[: 4 + length]
        return messages
