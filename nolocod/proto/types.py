"""What crosses the floors: small frozen facts about members, tensors and exchanges.

The rule: imported by everybody and importing next to nobody, so that outer, p2p and trainer need not know each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path  # noqa: TC003 - msgspec reads the annotation at run time
from typing import TYPE_CHECKING, Literal, Protocol

import blake3
import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import NatClass, Reach

Clock = Callable[[], float]
"""The time of day, in seconds."""
CHUNK_SIZE = 2 << 20
"""Bytes per chunk of a tensor or a snapshot, the last one excepted."""
AHEAD_CHUNKS = 8
"""By how many chunks one side of an exchange may be ahead of the other. An exchange takes as long as its slower
half, so nothing is lost; and what a chunk that comes tells of those that arrived lets it lie where ours lay."""


@dataclass(frozen=True)
class Standing:
    """How far a replica is: `round` outer steps, `tokens` trained by it and those it took over, last loss."""

    round: int
    tokens: int
    loss: float
    step_seconds: float = field(default=0.0, compare=False)
    """The longest thing that its trainer lately did at a time, an inner step mostly: so long it may take to turn to
    something else. 0 while that is not known, and from who does not tell."""


@dataclass(frozen=True)
class Built:
    """What a node's libraries made of the run's model. Empty while that is not known, and from who does not tell it."""

    layout: bytes = b""
    """Digest of the trained tensors' names, shapes and types, in the order of the flat tensor."""
    weights: bytes = b""
    """Digest of the values that the seed, or the run's base, gives them here."""
    libraries: str = ""
    """Which they are, with their versions."""

    def fits(self, other: Built) -> bool:
        """Whether bytes mean the same to both, as far as they tell."""
        return not (self.layout and other.layout) or self.layout == other.layout

    def starts_as(self, other: Built) -> bool:
        """Whether both start from the same values, as far as they tell."""
        return not (self.weights and other.weights) or self.weights == other.weights


class Member(msgspec.Struct, frozen=True, gc=False):  # made by the hundred for each choice of a partner
    """A live node of our run, as membership knows it. `age` is seconds since its last heartbeat."""

    peer_id: PeerId
    standing: Standing
    state: str
    """"joining", "training", "finished", "paused" or what a later release says.
    Only training members are partners, only training and finished ones are donors."""
    addresses: tuple[str, ...]
    version: str
    age: float
    reach: Reach | None
    """How we are connected to it now, if we are."""
    lead: int = 0
    """Its round minus ours, both at the time of its last heartbeat: rounds may go by until the next one."""
    nat: NatClass | None = None
    """How others reach it, by its own word."""
    relays: bool = False
    """It gives reservations."""
    group: str = ""
    """The address group in which it was verified (dialled and authenticated, or partner of a committed exchange), its own
    where it has none; empty for one that is only heard of."""
    verified: bool = False
    """It is, and within its group's share: what it tells may decide something, after others' words and our own measure."""
    phase: float = 0.0
    """Seconds that a phase's inner steps take it, by its own word; 0: not told."""
    name: str = ""
    """What its owner calls it; empty for none, or one that is not safe to show."""
    built: Built = Built()
    """What its libraries made of the run's model, by its own word."""


@dataclass(frozen=True)
class Description:
    """A byte string in chunks: each hash is the BLAKE3 digest (32 bytes) of one chunk."""

    size: int
    chunk_size: int
    hashes: tuple[bytes, ...]

    @cached_property
    def root(self) -> bytes:
        """One digest that stands for the whole (32 bytes). Of 250 GB it takes 4 ms, once: who asks a peer has it made in a
        thread."""
        head = self.size.to_bytes(8, "big") + self.chunk_size.to_bytes(8, "big")
        return blake3.blake3(head + b"".join(self.hashes)).digest()

    def span(self, index: int) -> tuple[int, int]:
        """The (start, length) in bytes of chunk `index`."""
        start = index * self.chunk_size
        return start, min(self.chunk_size, self.size - start)


def describe(content: memoryview, chunk_size: int = CHUNK_SIZE) -> Description:
    """Hash `content` (bytes) chunk by chunk."""
    whole = Describing(chunk_size)
    whole.update(content)
    return whole.description()


class Describing:
    """Describes a byte string that comes in pieces of any size."""

    def __init__(self, chunk_size: int = CHUNK_SIZE) -> None:
        self._chunk_size = self._left = chunk_size
        self._digest = blake3.blake3()
        self._hashes: list[bytes] = []
        self._size = 0

    def update(self, piece: bytes | memoryview) -> None:
        """The next bytes."""
        rest = memoryview(piece).cast("B")
        while len(rest):
            part, rest = rest[: self._left], rest[self._left :]
            self._digest.update(part)
            self._size += len(part)
            self._left -= len(part)
            if not self._left:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._hashes.append(self._digest.digest())
        self._digest, self._left = blake3.blake3(), self._chunk_size

    def description(self) -> Description:
        """What came: nothing may come after it."""
        if self._left < self._chunk_size:
            self._end_chunk()
        return Description(self._size, self._chunk_size, tuple(self._hashes))


@dataclass(frozen=True)
class SnapshotParts:
    """Parts of a donor's snapshot: the file at `path` holds these (start, length) in bytes of it, and else nothing."""

    path: Path
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Inspection:
    """What the trainer found in the partner's message."""

    spread: float
    """||theta_i - theta_j|| at the captures, over the fragment. A message holds beta Delta + gamma phi, so where beta
    is not gamma, what each learned since its last outer step counts beta / gamma times."""
    skipped: bytes = b""
    """Bit map of the blocks whose distance bound did not hold (outer.codec); empty for none. Neither side
    merges those: they take a solo step."""
    weight: float = 1.0
    """What the partner's difference from us will count for: less than 1 where it reaches beyond the clip radius."""


def parts_in(subject: int, parts: int) -> range:
    """Which of the model's `parts` an exchange about `subject` is about: one, or some that follow each other."""
    return range(subject % parts, subject % parts + subject // parts + 1)


def whose_turn(ages: Sequence[int], count: int) -> int:
    """The subject of an outer step about `count` parts: of those that follow each other the ones that have waited longest, all
    together.

    `ages`: of each part, the inner steps since its last outer step.
    """
    parts = len(ages)
    first = max(range(parts - count + 1), key=lambda one: sum(ages[one : one + count]))
    return first + parts * (count - 1)


@dataclass(frozen=True)
class Offer:
    """A peer asks for an exchange with us."""

    partner: PeerId
    session: bytes
    standing: Standing
    subject: int = 0
    """Which of the run's parts of the model the exchange is about (`parts_in`)."""


@dataclass(frozen=True)
class Accept:
    """Yes; `standing` is the answerer's own, and goes into the receipt."""

    standing: Standing


@dataclass(frozen=True)
class Busy:
    """Not now: ask again in `retry_after` seconds."""

    retry_after: float
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Not at all: `code` is one of our error codes."""

    code: str
    reason: str


Answer = Accept | Busy | Refuse


@dataclass(frozen=True)
class Ended:
    """How one exchange ended, on either side.

    "committed": both sides hold verified bytes and both will apply; nothing else allows an apply.
    "in_doubt": we confirmed, and could not learn whether the partner committed; we do not apply.
    """

    outcome: Literal["committed", "aborted", "in_doubt", "busy", "refused", "unreachable"]
    partner: PeerId
    session: bytes
    sent: int = 0
    received: int = 0
    partner_standing: Standing | None = None
    error: str = ""
    reason: str = ""
    retry_after: float = 0.0
    skipped: bytes = b""
    """Blocks of our message that the partner could not decode (Inspection.skipped, its own)."""


class Box(Protocol):
    """Memory shared with the trainer; the network process maps only the pages that it works on."""

    @property
    def size(self) -> int: ...

    def view(self, start: int, length: int) -> memoryview:
        """Bytes [start, start + length), without a copy."""
        ...

    def place(self, start: int, length: int) -> memoryview:
        """The same, to be written all over: quicker to come by."""
        ...

    def release(self, start: int, length: int) -> None:
        """Tell that these bytes are not needed in this process for now."""
        ...


class LocalSide(Protocol):
    """What an exchange asks of its own node while it runs (outer.loop)."""

    phase: float
    """Seconds of its inner phase: half of that is what a partner's trainer may take (Limits.paced)."""
    wary: bool
    """Too much time was lost with partners already: this one has less of it."""
    credit: float
    """Phases for which a partner is waited for because it says that its steps are long."""

    @property
    def outbox(self) -> Box: ...

    @property
    def inbox(self) -> Box: ...

    async def capture(self, subject: int) -> Description:
        """Have the trainer write our message about `subject` into the outbox."""
        ...

    async def inspect(self) -> bytes:
        """Have the trainer check the inbox; returns Inspection.skipped. RejectedTensorError if it may not be applied."""
        ...


@dataclass(frozen=True)
class Applied:
    """What an outer step did. `spread` is ||theta_i - theta_j|| at the capture (paired only)."""

    round: int
    inner_steps: int
    spread: float | None
    seconds: float
    weight: float = 1.0
    """What the partner's difference counted for (Inspection.weight)."""


class Answerer(Protocol):
    """How a node answers exchanges that others begin (outer.loop)."""

    def decide(self, offer: Offer) -> Answer:
        """Answer at once. After Accept this node is engaged until `ended` is called."""
        ...

    @property
    def local_side(self) -> LocalSide: ...

    async def ended(self, ended: Ended) -> None:
        """Called exactly once per accepted offer."""
        ...
