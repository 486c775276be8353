"""A coder at work on a capture, where messages are made: what it takes there, and what it brings back.

The rule: what lies in main memory changes at the very end, so that another desk may begin again where memory ran out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from nolocod.outer import step
from nolocod.outer.codec.blocks import stretches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nolocod.outer.codec.base import Coder, Records
    from nolocod.outer.codec.blocks import Rows
    from nolocod.trainer.made_on import MadeOn


class Seen(NamedTuple):
    """Of a block: the norms of s_i - s_j and of our change, and what the coder learns of the first."""

    distance: float
    change: float
    apart: float


class Desk:
    """`phi` and `delta` are the replica's, `kept` the capture's (capture.py); all in main memory."""

    def __init__(self, made_on: MadeOn, coder: Coder, phi: Tensor, delta: Tensor, kept: Tensor) -> None:
        self.coder = coder
        self._made_on = made_on
        self._phi, self._delta, self._kept = phi, delta, kept
        self._scratch, self._total = made_on.scratch(), made_on.scratch()

    def encode(self, rows: Rows, out: Tensor) -> int:
        """Write our records at the start of `out`; returns their bytes."""
        phi, change = self.take(rows)
        return self.coder.encode(rows, phi, change, out)

    def compare(self, rows: Rows, records: Records) -> list[Seen | None]:
        """Compare the partner's records with ours; None for those that cannot be what it meant."""
        phi, change = self.take(rows)
        s = self.coder.exact(phi, change)
        own, (other, right) = self.coder.own(rows, s), self.coder.other(rows, s, records, check=True)
        difference = torch.sub(own, other, out=self._total.of(rows.shape))
        seen = map(Seen, _norms(difference), _norms(change), self.coder.apart(difference))
        return [one if is_right else None for one, is_right in zip(seen, right, strict=True)]

    def step(self, rows: Rows, records: Records, paired: Sequence[bool], weight: float) -> None:
        """Take the outer step on phi and delta, alone in blocks that are not `paired`; the partner's difference counts for
        `weight`. `kept` becomes what theta is still to get."""
        phi, change = self.take(rows)
        delta = self._made_on.take(self._delta[rows.span], rows.shape)
        s = self.coder.exact(phi, change)
        own, (other, _) = self.coder.own(rows, s), self.coder.other(rows, s, records, check=False)
        for part, both in stretches(paired):
            total, n = (self._sum(own[part], other[part], weight), 2) if both else (s[part], 1)
            step.late_part(total, n, s[part], out=change[part])
            step.step(phi[part], delta[part], total, n, self.coder.settings)
        late = change.to(self._kept.dtype)
        self._made_on.put(phi, self._phi[rows.span])
        self._made_on.put(delta, self._delta[rows.span])
        self._kept[rows.within].view(rows.shape).copy_(late)

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Phi and theta - phi at the capture (scratch), both float32."""
        change = self._made_on.take(self._kept[rows.within], rows.shape)
        return self._made_on.take(self._phi[rows.span], rows.shape), self._scratch.of(rows.shape).copy_(change)

    def _sum(self, own: Tensor, other: Tensor, weight: float) -> Tensor:
        """s_i + s_j (scratch), where the partner's difference from us counts for `weight`."""
        total = self._total.of(own.shape)
        if weight == 1:
            return torch.add(own, other, out=total)
        return torch.mul(own, 2 - weight, out=total).add_(other, alpha=weight)


def _norms(rows: Tensor) -> list[float]:
    """Of each row."""
    found: list[float] = torch.linalg.vector_norm(rows, dim=1).tolist()
    return found
