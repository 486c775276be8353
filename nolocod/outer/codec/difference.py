"""delta4: four bits per value of the change, with error feedback; the slow weights beside it now and then.

The rule: what rounding leaves out of the change is kept (the residual, bfloat16) and added to the next one that
is sent, so that nothing is lost, only late. The slow weights travel as bfloat16 and only when the subject is
dense; then delta moves by gamma (phi^_j - phi^_i) / 2, which is opposite for the two: their mean is not touched by
that rounding. Without them the term is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.base import SCRATCH, Coder, Shared, padded
from nolocod.outer.codec.plain import put

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.outer.codec.blocks import Block

GROUP = 128
"""Values that share a scale."""
_LEVELS = 7
_LEAST = 1e-30
"""A group whose scale is below this is told as zeros: 1 / scale must be finite."""


class Delta4(Coder):
    """33/64 byte per parameter and 2 more when dense; |Delta^ - Delta - residual| <= max|.| / 14 in each group,
    the largest over its 128 values, times 1.01."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._dense = shared.dense
        self._residual = shared.residual
        self._work = torch.zeros(SCRATCH)
        self._slow = torch.zeros(SCRATCH)
        self._short = torch.empty(SCRATCH, dtype=torch.bfloat16)
        self._nibbles = torch.empty(SCRATCH, dtype=torch.uint8)

    @staticmethod
    def largest(elements: int) -> int:
        return _scales(elements) + _codes(elements) + padded(2 * elements)

    def encode(self, block: Block, phi: Tensor, change: Tensor, out: Tensor) -> int:
        levels, scale = self._quantise(block, change)
        groups = scale.numel()
        codes = self._nibbles[: groups * GROUP].view(groups, GROUP)
        codes.copy_(levels.add_(_LEVELS + 1))
        first = put(scale, out, torch.bfloat16)
        second = first + _codes(block.size)
        packed = out[first : first + groups * GROUP // 2].view(groups, GROUP // 2)
        torch.mul(codes[:, GROUP // 2 :], 16, out=packed)
        packed.add_(codes[:, : GROUP // 2])
        return second + put(self._rounded(block, phi), out[second:], torch.bfloat16) if self._dense else second

    def own(self, block: Block, phi: Tensor, change: Tensor) -> Tensor:
        s = self._applied(block, change)
        return s.mul_(self.settings.beta).add_(phi, alpha=self.settings.gamma)

    def length(self, block: Block, rest: Tensor) -> int:
        return _scales(block.size) + _codes(block.size) + (padded(2 * block.size) if self._dense else 0)

    def other(self, block: Block, phi: Tensor, change: Tensor, record: Tensor, *, check: bool) -> Tensor | None:
        groups = -(-block.size // GROUP)
        scale = self._slow[:groups].copy_(record[: 2 * groups].view(torch.bfloat16))
        first = _scales(block.size)
        packed = record[first : first + groups * GROUP // 2].view(groups, GROUP // 2)
        levels = self._other[: groups * GROUP].view(groups, GROUP)
        codes = self._nibbles[: groups * GROUP // 2].view(groups, GROUP // 2)
        levels[:, : GROUP // 2].copy_(torch.bitwise_and(packed, 15, out=codes))
        levels[:, GROUP // 2 :].copy_(torch.bitwise_right_shift(packed, 4, out=codes))
        levels.sub_(_LEVELS + 1).mul_(scale.unsqueeze(1)).mul_(self.settings.beta)
        s = self._other[: block.size].add_(phi, alpha=self.settings.gamma)
        if self._dense:
            second = first + _codes(block.size)
            theirs = self._slow[: block.size].copy_(record[second : second + 2 * block.size].view(torch.bfloat16))
            s.add_(theirs.sub_(self._rounded(block, phi)), alpha=self.settings.gamma)
        return s

    def settle(self, block: Block, change: Tensor) -> None:
        residual = self._residual[block.within]
        applied = self._applied(block, change)
        residual.copy_(self._work[: block.size].copy_(residual).add_(change).sub_(applied))

    def _quantise(self, block: Block, change: Tensor) -> tuple[Tensor, Tensor]:
        """The levels (groups x GROUP) of change + residual, in the scratch of `own`, and each group's scale."""
        groups = -(-block.size // GROUP)
        values = self._own[: groups * GROUP]
        values[: block.size].copy_(self._residual[block.within]).add_(change)
        values[block.size :].zero_()
        levels = values.view(groups, GROUP)
        scale = torch.amax(torch.abs(levels), dim=1).div_(_LEVELS)
        bits = scale.view(torch.int32)
        bits.add_(0xFFFF).bitwise_and_(-0x10000)  # up to the next bfloat16: the largest value keeps its place
        scale.mul_(scale > _LEAST)
        inverse = torch.where(scale > 0, 1 / scale, scale)
        return levels.mul_(inverse.unsqueeze(1)).round_(), scale

    def _applied(self, block: Block, change: Tensor) -> Tensor:
        """What our message tells of change + residual."""
        levels, scale = self._quantise(block, change)
        levels.mul_(scale.unsqueeze(1))
        return self._own[: block.size]

    def _rounded(self, block: Block, phi: Tensor) -> Tensor:
        """Our slow weights as they travel: to the nearest, so that equal ones stay equal."""
        return self._work[: block.size].copy_(self._short[: block.size].copy_(phi))


def _scales(elements: int) -> int:
    return padded(2 * -(-elements // GROUP))


def _codes(elements: int) -> int:
    return padded(-(-elements // GROUP) * GROUP // 2)
