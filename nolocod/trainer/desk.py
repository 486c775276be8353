"""A coder at work on a capture, where messages are made: what it takes there, and what it brings back.

The rule: what lies in main memory changes at the very end, so that another desk may begin again where memory ran out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nolocod.outer.codec.base import Coder, Records, Seen
    from nolocod.outer.codec.blocks import Rows
    from nolocod.trainer.made_on import MadeOn


class Desk:
    """`phi` and `delta` are the replica's, `kept` the capture's (capture.py); all in main memory."""

    def __init__(self, made_on: MadeOn, coder: Coder, phi: Tensor, delta: Tensor, kept: Tensor) -> None:
        self.coder = coder
        self._made_on = made_on
        self._phi, self._delta, self._kept = phi, delta, kept

    def encode(self, rows: Rows, out: Tensor) -> int:
        """Write our records at the start of `out`; returns their bytes."""
        return self.coder.encode(rows, *self.take(rows), out)

    def compare(self, rows: Rows, records: Records) -> list[Seen | None]:
        """Compare the partner's records with ours (Coder.compare)."""
        return self.coder.compare(rows, *self.take(rows), records)

    def step(self, rows: Rows, records: Records, paired: Sequence[bool], weight: float) -> None:
        """Take the outer step on phi and delta (Coder.step)."""
        phi, kept = self.take(rows)
        delta = self._made_on.take(self._delta[rows.span], rows.shape)
        self.coder.step(rows, phi, delta, kept, records, paired, weight)
        self._made_on.put(phi, self._phi[rows.span])
        self._made_on.put(delta, self._delta[rows.span])
        self._made_on.put(kept, self._kept[rows.within])

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Phi, and theta - phi at the capture."""
        taken = self._made_on.take
        return taken(self._phi[rows.span], rows.shape), taken(self._kept[rows.within], rows.shape)
