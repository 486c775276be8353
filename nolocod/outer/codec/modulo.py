"""modulo8 and modulo4: eight or four bits per value, against the weights that the receiver has itself (Moniqua, arXiv
2002.11787).

The rule: the integer q = round(s / step) travels without its high part; the receiver takes the number congruent
to it that lies nearest to its own message. That is q itself as long as the two messages are less than the bound
B = 128 step (8 step) apart, and a digest of the high parts proves on arrival that it is. A block of which no distance
is known, whose bound failed last time, that is small, or that bfloat16 tells better, travels as bfloat16.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import blake3
import torch

from nolocod.errors import RejectedTensorError
from nolocod.outer.codec.base import ALIGN, CPU, Coder, Scratch, Shared, laid_out, padded
from nolocod.outer.codec.blocks import bytes_of, stretches
from nolocod.outer.codec.plain import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from nolocod.outer.codec.base import Records
    from nolocod.outer.codec.blocks import Block, Rows

MEMORY = 0.75
"""What remains of a known distance at the next exchange, unless the new one is larger: partners differ."""
FINER = 16.0
"""Where the steps of bfloat16 are finer than those of eight bits by more than this, on average, its two bytes are worth it: the
partner is far beyond all others then. Replicas that train fast are so far apart that by a quarter of this most of a run's first
half took two bytes, and learnt nothing better (docs/evidence.md). Four bits take two bytes for the same partners."""
SMALLEST = 1024
"""Blocks of fewer elements travel as bfloat16: their largest distance tells little about the next one."""

RECORD = struct.Struct("<If8s")
"""What a record begins with: its mode, the bound, and a digest of the high parts."""
_BFLOAT16, MODULO = 1, 2
SMALLEST_BOUND = 1e-20
EXACT = 1 << 21
"""Integers up to this size, and their products with a step, are exact enough in float32."""


class Modulo(Coder):
    """|s^ - s| is half a step at most where the bound holds, and never applied where it does not."""

    BITS: ClassVar[int]
    """Of a value that travel."""
    MARGIN: ClassVar[float]
    OWN: ClassVar[float]
    """The bound covers the distance known of the block times MARGIN, and the largest |beta change| of it now times OWN."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._steps = 1 << self.BITS - 1  # in a bound
        self._distance = shared.distance
        self._bounds = shared.bounds  # 0: this block of ours travels as bfloat16
        self._low = Scratch(shared.at_once, self.device)
        self._whole = Scratch(shared.at_once, self.device, torch.int32)
        self._high = Scratch(shared.at_once, CPU, torch.int16, pinned=self.device.type == "cuda")

    @staticmethod
    def largest(elements: int) -> int:
        return ALIGN + padded(2 * elements)

    @abstractmethod
    def _width(self, elements: int) -> int:
        """Bytes of so many values."""

    @abstractmethod
    def _pack(self, whole: Tensor, out: Tensor) -> None:
        """Put the last bits of integers into bytes, row for row."""

    @abstractmethod
    def _unpack(self, received: Tensor, out: Tensor) -> None:
        """Put them into `out`, as float32."""

    def encode(self, rows: Rows, phi: Tensor, kept: Tensor, out: Tensor) -> int:
        change = self.change(kept)
        s, offset = self.exact(phi, change), 0
        bounds = self._bounds[rows.indices] = self._choose(rows, s, change)
        for part, in_a_byte in stretches([bound > 0 for bound in bounds]):
            if in_a_byte:
                offset += self._put_low(s[part], bounds[part], out[offset:])
            else:
                offset += self._put_whole(s[part], rows.blocks[part], out[offset:])
        return offset

    def _put_whole(self, s: Tensor, blocks: Sequence[Block], out: Tensor) -> int:
        """As bfloat16; `s` is rounded in place."""
        records, values = laid_out(out, s.shape, torch.bfloat16, ALIGN)
        values.copy_(self.as_kind(self.noise.round_rows(s, blocks, ROUNDING), torch.bfloat16))
        for record in records:
            bytes_of(record[:ALIGN])[:] = RECORD.pack(_BFLOAT16, 0.0, bytes(8))
        return records.numel()

    def _put_low(self, s: Tensor, bounds: Sequence[float], out: Tensor) -> int:
        """Some bits for each; `s` is used up."""
        records, low = laid_out(out, (len(s), self._width(s.shape[1])), torch.uint8, ALIGN)
        whole = self._whole.of(s.shape).copy_(s.mul_(self._column(self._steps / bound for bound in bounds)).round_())
        self._pack(whole, low)
        for record, bound, high in zip(records, bounds, self._digests(whole.bitwise_right_shift_(self.BITS)), strict=True):
            bytes_of(record[:ALIGN])[:] = RECORD.pack(MODULO, bound, high)
        return records.numel()

    def own(self, rows: Rows, s: Tensor) -> Tensor:
        bounds, own = self._bounds[rows.indices], self._own.of(s.shape)
        for part, in_a_byte in stretches([bound > 0 for bound in bounds]):
            if in_a_byte:
                whole = torch.mul(s[part], self._column(self._steps / bound for bound in bounds[part]), out=own[part]).round_()
                whole.mul_(self._column(bound / self._steps for bound in bounds[part]))
            else:
                self.noise.round_rows(own[part].copy_(s[part]), rows.blocks[part], ROUNDING)
        return own

    def length(self, block: Block, rest: Tensor) -> int:
        mode, bound, _ = read_record(rest)
        if mode == _BFLOAT16:
            return ALIGN + padded(2 * block.size)
        if mode != MODULO or not 1e-30 < bound < 1e30:
            raise RejectedTensorError(f"block {block.index} has the mode {mode} with a bound of {bound:g}.")
        return ALIGN + padded(self._width(block.size))

    def other(self, rows: Rows, s: Tensor, records: Records, *, check: bool) -> tuple[Tensor, list[bool]]:
        decoded, size = self._other.of(s.shape), s.shape[1]
        heads = [read_record(records.box[one]) for one in records.where]
        right = [True] * len(heads)
        for part, in_a_byte in stretches([mode == MODULO for mode, _, _ in heads]):
            if not in_a_byte:
                decoded[part].copy_(records.at(part, size, torch.bfloat16, ALIGN).to(self.device))
                continue
            # For 8 bits: q / 256 = high + low / 256, high = round(s_own / (256 step) - low / 256), and 256 steps are 2 B
            low, share = self._low.of(s[part].shape), 0.5 / self._steps
            self._unpack(records.at(part, self._width(size), torch.uint8, ALIGN).to(self.device), low)
            bounds = [bound for _, bound, _ in heads[part]]
            high = torch.mul(s[part], self._column(0.5 / bound for bound in bounds), out=decoded[part])
            high.sub_(low, alpha=share).round_()
            if check:
                right[part] = [one == told for one, (_, _, told) in zip(self._digests(high), heads[part], strict=True)]
            high.add_(low, alpha=share).mul_(self._column(2 * bound for bound in bounds))
        return decoded, right

    def apart(self, difference: Tensor) -> list[float]:
        return _largest(difference).tolist()

    def learn(self, block: Block, apart: float | None) -> None:
        known = self._distance[block.index].item()
        remembered = MEMORY * known if known > 0 else 0.0
        self._distance[block.index] = math.nan if apart is None else max(apart, remembered)

    def _choose(self, rows: Rows, s: Tensor, change: Tensor) -> list[float]:
        """The bounds of our records, 0 for bfloat16."""
        known, size = self._distance[rows.indices].tolist(), rows.shape[1]
        if size < SMALLEST or not any(distance >= 0 for distance in known):
            return [0.0] * len(known)
        typical = torch.linalg.vector_norm(s, dim=1).div_(math.sqrt(size))
        found = torch.stack([_largest(change), _largest(s), typical], dim=1).tolist()
        return [self._bound(distance, *row) for distance, row in zip(known, found, strict=True)]

    def _bound(self, known: float, change: float, largest: float, typical: float) -> float:
        """Of a block with these largest values of its change and of s, and this root mean square of s."""
        least = largest * self._steps / EXACT
        bound = max(self.MARGIN * known + self.OWN * self.settings.beta * change, least, SMALLEST_BOUND)
        # With a bound of the root mean square, a step of eight bits (1/128 of it) errs as much as the rounding of bfloat16.
        if not known >= 0 or bound > FINER * typical:
            return 0.0
        return float(struct.unpack("<f", struct.pack("<f", bound))[0])

    def _column(self, values: Iterable[float]) -> Tensor:
        """A value for each row."""
        return torch.tensor([[value] for value in values], device=self.device)

    def _digests(self, parts: Tensor) -> list[bytes]:
        """Of each row's high parts: what the bits leave out that travel."""
        high = self._high.of(parts.shape).copy_(self.as_kind(self.as_kind(parts, torch.int32), torch.int16))
        return [digest(bytes_of(row)) for row in high]


class Modulo8(Modulo):
    """A byte per parameter. Measured over replicas that train: one block in some hundred fails with a bound half as large, and
    a failure costs more than the finer step gains."""

    BITS, MARGIN, OWN = 8, 2.5, 1.0

    def _width(self, elements: int) -> int:
        return elements

    def _pack(self, whole: Tensor, out: Tensor) -> None:
        out.copy_(self.as_kind(whole, torch.uint8))  # to eight bits: the rest of the integer falls off

    def _unpack(self, received: Tensor, out: Tensor) -> None:
        out.copy_(received)


class Modulo4(Modulo):
    """Half a byte per parameter: of two that follow each other the first has the lower bits. Here the finer step is worth a
    failure."""

    BITS, MARGIN, OWN = 4, 1.25, 0.5

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._both = Scratch(shared.at_once, self.device, torch.int32)

    def _width(self, elements: int) -> int:
        return (elements + 1) // 2

    def _pack(self, whole: Tensor, out: Tensor) -> None:
        second = whole[:, 1::2]
        both = self._both.of((len(out), out.shape[1])).copy_(whole[:, ::2]).bitwise_and_(15)
        both[:, : second.shape[1]].add_(second, alpha=16)
        out.copy_(self.as_kind(both, torch.uint8))

    def _unpack(self, received: Tensor, out: Tensor) -> None:
        second = out[:, 1::2]
        out[:, ::2].copy_(received.bitwise_and(15))
        second.copy_(received[:, : second.shape[1]].bitwise_right_shift(4))


def _largest(values: Tensor) -> Tensor:
    """Each row's largest absolute value. The norm of that name is thirty times slower, and aminmax fifteen."""
    return torch.maximum(values.amax(1), values.amin(1).neg_())


def digest(high: memoryview) -> bytes:
    """What a record tells of its values' high parts, int16."""
    return blake3.blake3(high).digest(8)


def read_record(record: Tensor) -> tuple[int, float, bytes]:
    """Of the partner: RejectedTensorError if it is too short."""
    if record.numel() < ALIGN:
        raise RejectedTensorError("it ends within a record.")
    mode, bound, told = RECORD.unpack(bytes_of(record[:ALIGN]))
    return mode, bound, told
