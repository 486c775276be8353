"""float32 and bfloat16: s itself, in as many bytes as its type has.

The rule: float32 is exact. bfloat16 rounds stochastically: random low 16 bits are added and cut off, so that
the expectation of the rounded value is the value itself. Little-endian. Values that are not finite would not
survive the rounding, and a capture refuses them before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.base import CPU, Coder, laid_out, padded
from nolocod.outer.step import message_of_change

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.outer.codec.base import Records
    from nolocod.outer.codec.blocks import Block, Rows

ALL = slice(None)
ROUNDING = 1
"""The noise stream of messages; stream 0 is that of the kept change."""


class Float32(Coder):
    """4 bytes per parameter, exact."""

    @staticmethod
    def largest(elements: int) -> int:
        return padded(4 * elements)

    def encode(self, rows: Rows, phi: Tensor, kept: Tensor, out: Tensor) -> int:
        records, values = laid_out(out, rows.shape, torch.float32)
        if self.device == CPU:  # as `exact` does, without a pass through scratch
            message_of_change(kept, phi, self.settings, values)
        else:
            values.copy_(self.exact(phi, kept))
        return records.numel()

    def own(self, rows: Rows, s: Tensor) -> Tensor:
        return s

    def change(self, kept: Tensor) -> Tensor:
        return kept

    def length(self, block: Block, rest: Tensor) -> int:
        return self.largest(block.size)

    def other(self, rows: Rows, s: Tensor, records: Records, *, check: bool) -> tuple[Tensor, list[bool]]:
        values = records.at(ALL, s.shape[1], torch.float32)
        return values.to(self.device), [True] * len(s)


class BFloat16(Coder):
    """2 bytes per parameter; |s^ - s| < 2^-7 |s|, without bias."""

    @staticmethod
    def largest(elements: int) -> int:
        return padded(2 * elements)

    def encode(self, rows: Rows, phi: Tensor, kept: Tensor, out: Tensor) -> int:
        records, values = laid_out(out, rows.shape, torch.bfloat16)
        values.copy_(self.as_kind(self.own(rows, self.exact(phi, self.change(kept))), torch.bfloat16))
        return records.numel()

    def own(self, rows: Rows, s: Tensor) -> Tensor:
        return self.noise.round_rows(self._own.of(s.shape).copy_(s), rows.blocks, ROUNDING)

    def length(self, block: Block, rest: Tensor) -> int:
        return self.largest(block.size)

    def other(self, rows: Rows, s: Tensor, records: Records, *, check: bool) -> tuple[Tensor, list[bool]]:
        values = records.at(ALL, s.shape[1], torch.bfloat16)
        return self._other.of(s.shape).copy_(values.to(self.device)), [True] * len(s)
