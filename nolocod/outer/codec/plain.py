"""float32 and bfloat16: s itself, in as many bytes as its type has.

The rule: float32 is exact. bfloat16 rounds stochastically: random low 16 bits are added and cut off, so that
the expectation of the rounded value is the value itself. Little-endian. Values that are not finite would not
survive the rounding, and a capture refuses them before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.base import CPU, Coder, padded
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

    def encode(self, rows: Rows, phi: Tensor, change: Tensor, out: Tensor) -> int:
        count, size = rows.shape
        records = out[: count * padded(4 * size)].view(count, -1)
        values = records[:, : 4 * size].view(torch.float32)
        if self.device == CPU:  # as `exact` does, without a pass through scratch
            message_of_change(change, phi, self.settings, values)
        else:
            values.copy_(self.exact(phi, change))
        records[:, 4 * size :].zero_()
        return records.numel()

    def own(self, rows: Rows, s: Tensor) -> Tensor:
        return s

    def length(self, block: Block, rest: Tensor) -> int:
        return self.largest(block.size)

    def other(self, rows: Rows, s: Tensor, records: Records, *, check: bool) -> tuple[Tensor, list[bool]]:
        values = records.at(ALL)[:, : 4 * s.shape[1]].view(torch.float32)
        return values.to(self.device), [True] * len(s)


class BFloat16(Coder):
    """2 bytes per parameter; |s^ - s| < 2^-7 |s|, without bias."""

    @staticmethod
    def largest(elements: int) -> int:
        return padded(2 * elements)

    def encode(self, rows: Rows, phi: Tensor, change: Tensor, out: Tensor) -> int:
        return put(self.own(rows, self.exact(phi, change)), out)

    def own(self, rows: Rows, s: Tensor) -> Tensor:
        return self.noise.round_rows(self._own.of(s.shape).copy_(s), rows.blocks, ROUNDING)

    def length(self, block: Block, rest: Tensor) -> int:
        return self.largest(block.size)

    def other(self, rows: Rows, s: Tensor, records: Records, *, check: bool) -> tuple[Tensor, list[bool]]:
        values = records.at(ALL)[:, : 2 * s.shape[1]].view(torch.bfloat16)
        return self._other.of(s.shape).copy_(values), [True] * len(s)


def put(values: Tensor, out: Tensor) -> int:
    """Write rows of `values`, which bfloat16 represents exactly, at the start of `out`; returns the padded bytes."""
    count, size = values.shape
    records = out[: count * padded(2 * size)].view(count, -1)
    records[:, : 2 * size].view(torch.bfloat16).copy_(values)
    records[:, 2 * size :].zero_()
    return records.numel()
