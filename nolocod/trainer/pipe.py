"""What the network process and the trainer say to each other, and how it is framed.

The rule: typed messages only, as MessagePack with a length before each; no pickle, and no tensors, which
cross in shared memory. One request at a time has one answer with the same id; reports come in between.
"""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 - msgspec reads annotations at run time
from typing import Literal

import msgspec

from nolocod.errors import NolocodError  # noqa: TC001 - as below
from nolocod.observe.events import Evaluated, InnerSteps, MemoryTaken, MicroBatch, SamplesRead, TextSupply  # noqa: TC001 - as below
from nolocod.proto.types import Built, Description, SnapshotParts, Standing

MAX_MESSAGE = 64 << 20
"""A longer message is a bug; the largest real one is `Setup`, with the run's tokenizer in its manifest."""


_NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


class Message(msgspec.Struct, frozen=True, tag=True):
    """Any message."""


class Setup(Message, frozen=True, kw_only=True):
    """All that a trainer needs to know. `manifest` is the sealed manifest's bytes."""

    manifest: bytes
    peer_id: str
    data: Path | None
    devices: str
    """As its owner names them (devices.py)."""
    threads: int
    """CPU threads; 0 leaves the choice to torch."""
    nice: int = 0
    """Priority among the machine's programs, from 0 to 19 (the lowest); 0 leaves it as it is."""
    checkpoints: Path
    cache: Path
    base: Path | None = None
    """The folder of the model that the run starts from; None where it starts from a seed."""
    base_bits: int = 16
    """In which the base beside an adapter lies: 16, 8 or 4."""
    spare_memory: bool = False
    """Whether layers are computed twice, so that less is kept of them."""
    compile: bool = False
    """Whether torch compiles the model's layers (compiled.py)."""
    tf32: bool = False
    """Whether a GPU may multiply float32 in TF32."""
    clip_change: float | None = None
    """The longest |theta - phi| that one outer step takes along; None for any."""
    amendments: bytes = b""
    """What the run's owners changed (run/amendments.py); empty for nothing."""
    number: int = 0
    """The round in which the trainer begins, as far as the node knows: the run's data may be others then."""


class Download(Message, frozen=True):
    """Have a file of a commit on the hub in the cache of its library. Answered with its path; BaseModelError."""

    source: str
    commit: str
    name: str
    size: int


class Adopt(Message, frozen=True):
    """Take a donor's slow weights from a file, and its standing with them. RejectedTensorError if they do not fit."""

    weights: Path
    standing: Standing


class Place(Message, frozen=True):
    """Take this standing, the weights being a donor's: rounds went by since it gave them."""

    standing: Standing


class Compare(Message, frozen=True):
    """Tell why the slow weights are too far from those of other donors, of which these are samples; "" if they are not."""

    samples: tuple[SnapshotParts, ...]


class Train(Message, frozen=True):
    """Start or resume inner steps."""


class Pause(Message, frozen=True):
    """Stop after the inner step under way."""


class Ease(Message, frozen=True):
    """Compute in this share of the time, above 0 and at most 1."""

    share: float


class Enlarge(Message, frozen=True):
    """Take inner steps of so many times the run's tokens."""

    times: int


class Capture(Message, frozen=True):
    """Write our message about `subject` into the outbox, as theta is at the end of an inner step, once `after` were taken
    since the last outer step. Answered with its Description."""

    subject: int
    after: int = 0


class Inspect(Message, frozen=True):
    """Check the inbox against our capture. Answered with an Inspection; RejectedTensorError."""

    probation: bool


class Apply(Message, frozen=True):
    """Take the paired outer step. Answered with Applied."""

    run_round: int
    skipped: bytes
    """Blocks of our message that the partner could not decode (proto.types.Inspection)."""


class Solo(Message, frozen=True):
    """Take the outer step alone, about `subject`, `after` so many inner steps. Answered with Applied."""

    run_round: int
    subject: int
    after: int = 0


class Discard(Message, frozen=True):
    """Drop the capture; nothing is applied."""


class Checkpoint(Message, frozen=True):
    """Write a checkpoint, beside training. Answered at once, and by Written with Checkpointed; DiskFullError."""

    number: int
    """Of this file among those that the parent asked for."""
    last: bool = False
    """Nothing follows but Stop: the device's memory is given back before the file is on the disk."""


class Dump(Message, frozen=True):
    """Write the slow weights for newcomers, beside training. Answered at once, and by Written with Dumped."""

    number: int
    path: Path


class Evaluate(Message, frozen=True):
    """Answered with the mean held-out loss, and with an EvaluatedReport if it is to be `told`."""

    told: bool


class Stop(Message, frozen=True):
    """End the process."""


Command = (
    (Setup | Download | Adopt | Place | Compare | Train | Ease | Enlarge | Pause)
    | (Capture | Inspect | Apply | Solo | Discard)
    | (Checkpoint | Dump | Evaluate | Stop)
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


class Loaded(msgspec.Struct, frozen=True):
    """What Setup is answered with: the model stands ready. `box_size` is the bytes of the largest message of the run."""

    standing: Standing
    parameters: int
    snapshot_size: int
    """Bytes of the slow weights as `Dump` writes them; rounds of more digits may change them by a few."""
    box_size: int
    source: Literal["seed", "checkpoint"]
    outbox_offset: int
    """Where the outbox begins in the shared memory; the inbox lies at its beginning. They may overlap (boxes.py)."""
    phase: int
    """Inner steps between outer steps."""
    devices: tuple[str, ...]
    """That train, as torch names them."""
    made_on: str
    """The device on which messages are made."""
    trouble: tuple[str, ...]
    """What went wrong and was got round, for example a damaged checkpoint, by name."""
    built: Built = Built()


class Dumped(msgspec.Struct, frozen=True):
    """A file of slow weights was written whole."""

    standing: Standing
    description: Description


class Failed(msgspec.Struct, frozen=True):
    """A command (or, with id 0, training itself) failed with one of our error codes."""

    code: str
    cause: str
    remedy: str


class Answer(Message, frozen=True):
    id: int
    result: msgspec.Raw
    """What the command is answered with, in MessagePack; nothing where it failed."""
    failure: Failed | None
    progress: Progress | None


def answer(number: int, result: object, progress: Progress | None) -> Answer:
    """Of request `number`: its result, or what it failed of."""
    if isinstance(result, Failed):
        return Answer(number, _NOTHING, result, progress)
    return Answer(number, msgspec.Raw(msgspec.msgpack.encode(result)), None, progress)


class Trained(Message, frozen=True):
    event: InnerSteps | None
    """What was not told yet, from time to time."""
    progress: Progress


class EvaluatedReport(Message, frozen=True):
    event: Evaluated


class Supplied(Message, frozen=True):
    event: TextSupply


class Read(Message, frozen=True):
    event: SamplesRead


class Fitted(Message, frozen=True):
    event: MicroBatch


class Taken(Message, frozen=True):
    event: MemoryTaken


class Written(Message, frozen=True):
    """What became of file `number`, as in Answer."""

    number: int
    result: msgspec.Raw
    failure: Failed | None


def written(number: int, result: object) -> Written:
    """Of file `number`: its result, or what it failed of."""
    told = answer(0, result, None)
    return Written(number, told.result, told.failure)


def failed(error: NolocodError) -> Failed:
    return Failed(error.code, error.cause, error.remedy)


Reply = Answer | Trained | EvaluatedReport | Supplied | Read | Fitted | Taken | Written


def encode(message: Request | Reply) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=os.fspath)


def frame(message: Request | Reply) -> bytes:
    """Encode `message` with its length (4 bytes, big-endian) before it."""
    body = encode(message)
    return len(body).to_bytes(4, "big") + body


REQUESTS = msgspec.msgpack.Decoder(Request, dec_hook=lambda path, told: path(told))
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class Unframer:
    """Cuts a byte stream into encoded messages; feeds of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes")
            if len(self._buffer) < 4 + length:
                break
            messages.append(bytes(self._buffer[4 : 4 + length]))
            del self._buffer[: 4 + length]
        return messages
