"""What all codecs share: the header, the scratch memory, the seeded noise, the shape of a coder.

The rule: a coder lives for one capture. Its state that outlives the exchange (distances) belongs to the replica and
changes only when the exchange is applied.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from nolocod.errors import RejectedTensorError
from nolocod.outer.codec.blocks import BLOCK, Fragment, bytes_of, stretches
from nolocod.outer.step import late_part, message_of_change, step
from nolocod.run.manifest import wire_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nolocod.outer.codec.blocks import Block, Rows
    from nolocod.run.manifest import Codec, Outer

CPU = torch.device("cpu")
HEADER = 64
"""Bytes before the first record: a cache line."""
ALIGN = 16
"""Records and their parts begin at multiples of this many bytes, so that every view of them is aligned."""

_HEAD = struct.Struct("<8s16sQQHB")
_MAGIC = b"nolocod\1"
_WHOLE = 1
"""What the header ends with; release 0.1 had a codec of differences, whose messages had a 0 here."""


def padded(size: int) -> int:
    """`size` bytes, filled up to a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Head:
    """The header of a message: what it is about and how long it is (`size` bytes, all in all)."""

    codec: str
    elements: int
    size: int
    fragment: int

    @classmethod
    def of(cls, codec: Codec, fragment: Fragment, subject: int, size: int) -> Head:
        return cls(wire_name(codec), fragment.size, size, subject)


def write_head(head: Head, out: Tensor) -> None:
    """Write `head` into the first HEADER bytes of `out`."""
    packed = _HEAD.pack(_MAGIC, head.codec.encode(), head.elements, head.size, head.fragment, _WHOLE)
    bytes_of(out)[:HEADER] = packed.ljust(HEADER, b"\0")


def read_head(box: Tensor) -> Head:
    """Read the header of the message in `box`; RejectedTensorError if there is none."""
    magic, codec, elements, size, fragment, _ = _HEAD.unpack(bytes_of(box[:HEADER])[: _HEAD.size])
    if magic != _MAGIC:
        raise RejectedTensorError("it does not begin like a message of weights.")
    return Head(codec.rstrip(b"\0").decode("ascii", "replace"), elements, size, fragment)


class Noise:
    """Uniform 16-bit noise for stochastic rounding on `device`, drawn once per capture and turned for every block.

    Whatever the turn, each element's noise is uniform over the draw of the seed: its rounding has no bias.
    """

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 1 << 16, (BLOCK,), dtype=torch.int32, generator=generator).to(device)
        self._ring = torch.cat([drawn, drawn])

    def round(self, values: Tensor, block: Block, stream: int) -> Tensor:
        """Round float32 `values` of a block to bfloat16 in place, up or down such that the mean is kept."""
        return rounded_with(self.of(block, stream)[: values.numel()], values)

    def of(self, block: Block, stream: int) -> Tensor:
        """That of a block's values; int32, below 1 << 16."""
        turn = 16 * ((block.index * 0x9E3779B1 + stream * 0x85EBCA6B >> 8) % (BLOCK // 16))
        return self._ring[turn : turn + block.size]

    def round_rows(self, values: Tensor, blocks: Sequence[Block], stream: int) -> Tensor:
        """The same for several blocks, a row each."""
        for row, block in zip(values, blocks, strict=True):
            self.round(row, block, stream)
        return values


def rounded_with(noise: Tensor, values: Tensor) -> Tensor:
    """Round float32 `values` to bfloat16 in place, up or down; `noise`: of each, uniform below 1 << 16 (int32)."""
    values.view(torch.int32).add_(noise).bitwise_and_(-0x10000)
    return values


class Scratch:
    """Memory for a value of each of so many blocks, used again and again."""

    def __init__(self, blocks: int, device: torch.device, kind: torch.dtype = torch.float32, *, pinned: bool = False) -> None:
        self._flat = torch.empty(blocks * BLOCK, dtype=kind, device=device, pin_memory=pinned)
        self._view = self._flat[:0]

    def of(self, shape: tuple[int, ...]) -> Tensor:
        """Its beginning, in that shape: mostly that of the last call."""
        if shape != self._view.shape:
            self._view = self._flat[: math.prod(shape)].view(shape)
        return self._view


@dataclass(frozen=True)
class Shared:
    """What a coder is made with. `distance` (per block) is the replica's own, for the fragment; `bounds` (per block) are the
    capture's, whichever coder chose them. `device` is where it works, on so many blocks at one go."""

    settings: Outer
    fragment: Fragment
    noise: Noise
    distance: Tensor
    bounds: list[float]
    device: torch.device
    at_once: int
    compiled: bool = False
    """Whether loops of our own do what they can (fused.py)."""


class Seen(NamedTuple):
    """Of a block: the norms of s_i - s_j and of our change, and what the coder learns of the first."""

    distance: float
    change: float
    apart: float


class Coder(ABC):
    """One codec at work on one capture: `phi` are slow weights, `kept` is theta - phi as the capture has it, `change` the same
    in float32, as phi and delta are. All are on the coder's device, a row for each of some blocks; messages lie in main memory.
    Tensors that are returned are scratch: valid until the next call of the same method."""

    def __init__(self, shared: Shared) -> None:
        self.settings = shared.settings
        self.fragment = shared.fragment
        self.noise = shared.noise
        self.device = shared.device
        self._exact, self._own, self._other, self._total, self._change = (
            Scratch(shared.at_once, self.device) for _ in range(5)
        )

    @staticmethod
    @abstractmethod
    def largest(elements: int) -> int:
        """Bytes of the largest record of a block of so many elements."""

    @abstractmethod
    def encode(self, rows: Rows, phi: Tensor, kept: Tensor, out: Tensor) -> int:
        """Write our records of `rows` at the start of `out` (uint8); returns their bytes, each a multiple of ALIGN."""

    @abstractmethod
    def own(self, rows: Rows, s: Tensor) -> Tensor:
        """Our message, whose `exact` is `s`, as both partners decode it."""

    @abstractmethod
    def length(self, block: Block, rest: Tensor) -> int:
        """Bytes of the partner's record at the start of `rest`; RejectedTensorError if it is none."""

    @abstractmethod
    def other(self, rows: Rows, s: Tensor, records: Records, *, check: bool) -> tuple[Tensor, list[bool]]:
        """The partner's message, decoded by a receiver whose own is `s`; values that are not finite stay so.

        And whether each row, looked at with `check`, can be what the partner meant.
        """

    def compare(self, rows: Rows, phi: Tensor, kept: Tensor, records: Records) -> list[Seen | None]:
        """Compare the partner's records with ours; None for those that cannot be what it meant."""
        change = self.change(kept)
        s = self.exact(phi, change)
        own, (other, right) = self.own(rows, s), self.other(rows, s, records, check=True)
        difference = torch.sub(own, other, out=self._total.of(s.shape))
        seen = map(Seen, _norms(difference), _norms(change), self.apart(difference))
        return [one if is_right else None for one, is_right in zip(seen, right, strict=True)]

    def step(
        self, rows: Rows, phi: Tensor, delta: Tensor, kept: Tensor, records: Records, paired: Sequence[bool], weight: float
    ) -> None:
        """Take the outer step on `phi` and `delta`, alone in rows that are not `paired`; the partner's difference counts for
        `weight`. `kept` becomes what theta is still to get."""
        change = self.change(kept)
        s = self.exact(phi, change)
        own, (other, _) = self.own(rows, s), self.other(rows, s, records, check=False)
        for part, both in stretches(paired):
            total, n = (self._sum(own[part], other[part], weight), 2) if both else (s[part], 1)
            late_part(total, n, s[part], out=change[part])
            step(phi[part], delta[part], total, n, self.settings)
        kept.copy_(change)

    def change(self, kept: Tensor) -> Tensor:
        """What was kept, float32."""
        return self._change.of(kept.shape).copy_(kept)

    def _sum(self, own: Tensor, other: Tensor, weight: float) -> Tensor:
        """s_i + s_j, where the partner's difference from us counts for `weight`."""
        total = self._total.of(own.shape)
        if weight == 1:
            return torch.add(own, other, out=total)
        return torch.mul(own, 2 - weight, out=total).add_(other, alpha=weight)

    def as_kind(self, values: Tensor, kind: torch.dtype) -> Tensor:
        """What is to leave a card, of that kind there already: torch would bring all of its bytes, and convert them here."""
        return values if self.device == CPU else values.to(kind)

    def apart(self, difference: Tensor) -> list[float]:
        """Of each row what `learn` is to be told of s_i - s_j; 0 where nobody wants to know."""
        return [0.0] * len(difference)

    def learn(self, block: Block, apart: float | None) -> None:  # noqa: B027 - most codecs learn nothing
        """The exchange is applied: `apart` is the largest |s_i - s_j| in `block`; None if it was skipped."""

    def exact(self, phi: Tensor, change: Tensor) -> Tensor:
        """s = beta change + gamma phi before any rounding to the wire."""
        return message_of_change(change, phi, self.settings, self._exact.of(change.shape))


@dataclass(frozen=True)
class Records:
    """The partner's records of some rows, in order: where they lie in the message `box`."""

    box: Tensor
    where: Sequence[slice]

    def at(self, part: slice, size: int, kind: torch.dtype, head: int = 0) -> Tensor:
        """What those of some rows hold, which are of one length: `size` values of a `kind` in each, behind its head."""
        where = self.where[part]
        return _values(self.box[where[0].start : where[-1].stop].view(len(where), -1), size, kind, head)


def laid_out(out: Tensor, shape: Sequence[int], kind: torch.dtype, head: int = 0) -> tuple[Tensor, Tensor]:
    """Records at the start of `out`, a row of bytes each, and where their values of a `kind` go; the padding is written."""
    count, size = shape
    end = head + size * kind.itemsize
    records = out[: count * padded(end)].view(count, -1)
    records[:, end:].zero_()
    return records, _values(records, size, kind, head)


def _norms(rows: Tensor) -> list[float]:
    """Of each row."""
    found: list[float] = torch.linalg.vector_norm(rows, dim=1).tolist()
    return found


def _values(records: Tensor, size: int, kind: torch.dtype, head: int) -> Tensor:
    return records[:, head : head + size * kind.itemsize].view(kind)
