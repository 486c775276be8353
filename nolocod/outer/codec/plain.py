"""float32 and bfloat16: s itself, in as many bytes as its type has.

The rule: float32 is exact. bfloat16 rounds stochastically: random low 16 bits are added and cut off, so that
the expectation of the rounded value is the value itself. Little-endian. Values that are not finite would not
survive the rounding, and a capture refuses them before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.base import Coder, padded
from nolocod.outer.step import message_of_change

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.outer.codec.blocks import Block

ROUNDING = 1
"""The noise stream of messages; stream 0 is that of the kept change."""


class Float32(Coder):
    """4 bytes per parameter, exact."""

    @staticmethod
    def largest(elements: int) -> int:
        return padded(4 * elements)

    def encode(self, block: Block, phi: Tensor, change: Tensor, out: Tensor) -> int:
        size = self.largest(block.size)
        # as `exact` does, without a pass through scratch
        message_of_change(change, phi, self.settings, out[: 4 * block.size].view(torch.float32))
        out[4 * block.size : size].zero_()
        return size

    def own(self, block: Block, s: Tensor) -> Tensor:
        return s

    def length(self, block: Block, rest: Tensor) -> int:
        return self.largest(block.size)

    def other(self, block: Block, s: Tensor, record: Tensor, *, check: bool) -> Tensor | None:
        return record[: 4 * block.size].view(torch.float32)


class BFloat16(Coder):
    """2 bytes per parameter; |s^ - s| < 2^-7 |s|, without bias."""

    @staticmethod
    def largest(elements: int) -> int:
        return padded(2 * elements)

    def encode(self, block: Block, phi: Tensor, change: Tensor, out: Tensor) -> int:
        return put(self.own(block, self.exact(phi, change)), out, torch.bfloat16)

    def own(self, block: Block, s: Tensor) -> Tensor:
        return self.noise.round(self._own[: block.size].copy_(s), block, ROUNDING)

    def length(self, block: Block, rest: Tensor) -> int:
        return self.largest(block.size)

    def other(self, block: Block, s: Tensor, record: Tensor, *, check: bool) -> Tensor | None:
        return self._other[: block.size].copy_(record[: 2 * block.size].view(torch.bfloat16))


def put(values: Tensor, out: Tensor, kind: torch.dtype) -> int:
    """Write `values`, which `kind` represents exactly, at the start of `out`; returns the padded bytes."""
    size = values.numel() * kind.itemsize
    out[:size].view(kind).copy_(values)
    out[size : padded(size)].zero_()
    return padded(size)
