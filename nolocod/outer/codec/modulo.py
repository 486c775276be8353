"""modulo8: eight bits per value, against the weights that the receiver has itself (Moniqua, arXiv 2002.11787).

The rule: the integer q = round(s / step) travels without its high part; the receiver takes the number congruent
to it that lies nearest to its own message. That is q itself as long as the two messages are less than the bound
B = 128 step apart, and a digest of the high parts proves on arrival that it is. A block of which no distance is
known, whose bound failed last time, that is small, or that bfloat16 tells better, travels as bfloat16.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import blake3
import torch

from nolocod.errors import RejectedTensorError
from nolocod.outer.codec.base import ALIGN, Coder, Shared, padded
from nolocod.outer.codec.blocks import BLOCK, bytes_of
from nolocod.outer.codec.plain import ROUNDING, put

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.outer.codec.blocks import Block

MARGIN = 2.5
"""The bound covers the distance known of the block times this, ..."""
OWN = 1.0
"""... and the largest |beta change| of the block now times this. Measured over replicas that train: one block in
some hundred fails with a bound half as large, and a failure costs more than the finer step gains."""
MEMORY = 0.75
"""What remains of a known distance at the next exchange, unless the new one is larger: partners differ."""
FINER = 16.0
"""Where the steps of bfloat16 are finer than ours by more than this, on average, its two bytes are worth it: the partner is far
beyond all others then. Replicas that train fast are so far apart that by a quarter of this most of a run's first half took two
bytes, and learnt nothing better (docs/evidence.md)."""
SMALLEST = 1024
"""Blocks of fewer elements travel as bfloat16: their largest distance tells little about the next one."""

_RECORD = struct.Struct("<If8s")  # mode, bound, digest of the high parts
_BFLOAT16, _MODULO = 1, 2
_SMALLEST_BOUND = 1e-20
_EXACT = 1 << 21
"""Integers up to this size, and their products with a step, are exact enough in float32."""


class Modulo8(Coder):
    """1 byte per parameter; |s^ - s| <= B / 256 where the bound holds, never applied where it does not."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._distance = shared.distance
        self._bounds = [0.0] * len(self.fragment.blocks)  # 0: this block of ours travels as bfloat16
        self._low = torch.empty(BLOCK)
        self._whole = torch.empty(BLOCK, dtype=torch.int32)
        self._high = torch.empty(BLOCK, dtype=torch.int16)

    @staticmethod
    def largest(elements: int) -> int:
        return ALIGN + padded(2 * elements)

    def encode(self, block: Block, phi: Tensor, change: Tensor, out: Tensor) -> int:
        s = self.exact(phi, change)
        bound = self._bounds[block.index] = self._choose(block, s, change)
        if not bound:
            bytes_of(out[:ALIGN])[:] = _RECORD.pack(_BFLOAT16, 0.0, bytes(8))
            return ALIGN + put(self.noise.round(s, block, ROUNDING), out[ALIGN:], torch.bfloat16)
        whole = self._whole[: block.size].copy_(s.mul_(128 / bound).round_())
        out[ALIGN : ALIGN + block.size].copy_(whole)  # to eight bits: the rest of the integer falls off
        out[ALIGN + block.size : ALIGN + padded(block.size)].zero_()
        bytes_of(out[:ALIGN])[:] = _RECORD.pack(_MODULO, bound, self._digest(whole.bitwise_right_shift_(8)))
        return ALIGN + padded(block.size)

    def own(self, block: Block, s: Tensor) -> Tensor:
        bound, own = self._bounds[block.index], self._own[: block.size]
        if not bound:
            return self.noise.round(own.copy_(s), block, ROUNDING)
        return torch.mul(s, 128 / bound, out=own).round_().mul_(bound / 128)

    def length(self, block: Block, rest: Tensor) -> int:
        mode, bound, _ = _read(rest)
        if mode == _BFLOAT16:
            return ALIGN + padded(2 * block.size)
        if mode != _MODULO or not 1e-30 < bound < 1e30:
            raise RejectedTensorError(f"block {block.index} has the mode {mode} with a bound of {bound:g}.")
        return ALIGN + padded(block.size)

    def other(self, block: Block, s: Tensor, record: Tensor, *, check: bool) -> Tensor | None:
        mode, bound, digest = _read(record)
        decoded = self._other[: block.size]
        if mode == _BFLOAT16:
            return decoded.copy_(record[ALIGN : ALIGN + 2 * block.size].view(torch.bfloat16))
        # q / 256 = high + low / 256, high = round(s_own / (256 step) - low / 256), and 256 steps are 2 B
        low = self._low[: block.size].copy_(record[ALIGN : ALIGN + block.size])
        high = torch.mul(s, 0.5 / bound, out=decoded).sub_(low, alpha=1 / 256).round_()
        if check and self._digest(high) != digest:
            return None
        return high.add_(low, alpha=1 / 256).mul_(2 * bound)

    def apart(self, difference: Tensor) -> float:
        return _largest(difference)

    def learn(self, block: Block, apart: float | None) -> None:
        known = self._distance[block.index].item()
        remembered = MEMORY * known if known > 0 else 0.0
        self._distance[block.index] = math.nan if apart is None else max(apart, remembered)

    def _choose(self, block: Block, s: Tensor, change: Tensor) -> float:
        """The bound of our record, 0 for bfloat16."""
        known = self._distance[block.index].item()
        if block.size < SMALLEST or not known >= 0:
            return 0.0
        moved = self.settings.beta * _largest(change)
        least = _largest(s) * 128 / _EXACT
        bound = max(MARGIN * known + OWN * moved, least, _SMALLEST_BOUND)
        # With a bound of the root mean square, our step (1/128 of it) errs as much as the rounding of bfloat16.
        most = FINER * torch.linalg.vector_norm(s).item() / math.sqrt(block.size)
        return float(struct.unpack("<f", struct.pack("<f", bound))[0]) if bound <= most else 0.0

    def _digest(self, parts: Tensor) -> bytes:
        """Of the high parts, what eight bits leave out."""
        high = self._high[: parts.numel()].copy_(parts)
        return blake3.blake3(bytes_of(high)).digest(8)


def _largest(values: Tensor) -> float:
    """The largest absolute value. The norm of that name is thirty times slower."""
    least, most = torch.aminmax(values)
    return max(-least.item(), most.item())


def _read(record: Tensor) -> tuple[int, float, bytes]:
    if record.numel() < ALIGN:
        raise RejectedTensorError("it ends within a record.")
    mode, bound, digest = _RECORD.unpack(bytes_of(record[:ALIGN]))
    return mode, bound, digest
