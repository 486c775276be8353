"""The clip radius: how far a partner may move us, from how far partners were before (manifest.Trust). And `clip`: how much of
our own change an outer step takes along, where the node's owner bounds it.

The rule: with pairs there is no majority to ask, so what a partner can do is bounded by what partners did before
(ClippedGossip, arXiv 2202.01545). v = s_j - s_i, the partner's message less ours, counts with the weight
min(1, tau / |v|)^2, tau = clip times the median of the last 16 accepted |v|, half of that for a partner on probation. Without
the square (ClippedGossip's own) whoever is further away moves us by all of tau: old weights always, and they fall back.
Nobody is refused for being far away: two halves of a swarm that were parted must find together again. Where many are far away
the median follows them.

Distances follow the learning rate (arXiv 2506.10911, section 5), so they are remembered in units of it: else the
radius would be several times too wide when a schedule ends. Until four are known, our own change stands in for them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nolocod.trainer.bus import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nolocod.outer.codec.blocks import Fragment
    from nolocod.run.manifest import Trust

REMEMBERED = 16
"""Accepted distances of which the median is taken, for each fragment."""
ENOUGH = 4
"""Fewer say too little: one hostile partner among three could be their median."""
WIDEST = 2.0
"""A distance is remembered at no more than this times the median, so that nobody can widen it by being far away."""
OWN = 2.0
"""Replicas that train are about one to two |beta Delta| apart after warm-up; this many stand in at first."""
ON_PROBATION = 0.5


@dataclass(frozen=True)
class Norms:
    """Of one fragment in an exchange, in the units of messages, over all blocks that were decoded."""

    distance: float
    """|s_j - s_i|"""
    change: float
    """|beta Delta_i|, ours"""


@dataclass(frozen=True)
class History:
    """What a checkpoint holds of earlier partners."""

    distances: tuple[tuple[float, ...], ...] = ()
    """Of each fragment's last accepted partners, over the learning rate."""


class Clipping:
    """What one replica remembers of its partners, fragment by fragment, and what that makes of the next one."""

    def __init__(self, settings: Trust, fragments: int) -> None:
        self._settings = settings
        self._accepted: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(fragments)]

    def weigh(self, first: int, seen: Sequence[Norms], rate: float, *, probation: bool) -> float:
        """What the partner's difference counts for, in (0, 1], in the fragments from `first` on; `rate`: the learning rate of
        our capture."""
        if not self._settings.clip:
            return 1.0
        usual = math.hypot(*(self.usual(first + index, norms.change, rate) for index, norms in enumerate(seen)))
        radius, distance = self._settings.clip * usual, math.hypot(*(norms.distance for norms in seen))
        if probation:
            radius *= ON_PROBATION
        return (radius / distance) ** 2 if distance > radius else 1.0

    def accept(self, first: int, seen: Sequence[Norms], rate: float) -> None:
        """The exchange was applied: remember how far the partner was. A distance of nothing tells nothing."""
        for fragment, norms in enumerate(seen, first):
            distance = min(norms.distance, WIDEST * self.usual(fragment, norms.change, rate))
            if distance > 0:
                self._accepted[fragment].append(distance / rate)

    def usual(self, fragment: int, change: float, rate: float) -> float:
        """How far partners are from us as a rule, given our own |beta Delta|."""
        known = self._accepted[fragment]
        return statistics.median(known) * rate if len(known) >= ENOUGH else OWN * change

    @property
    def history(self) -> History:
        return History(tuple(tuple(known) for known in self._accepted))

    def restore(self, history: History) -> None:
        """Go on with `history`; distances of another number of fragments (an older checkpoint has none) are left aside."""
        if len(history.distances) == len(self._accepted):
            self._accepted = [deque(known, maxlen=REMEMBERED) for known in history.distances]


def clip(theta: Tensor, phi: Tensor, fragments: Sequence[Fragment], longest: float) -> None:
    """Bring `theta` nearer to `phi` in these fragments, until |theta - phi| is at most `longest` (arXiv 1710.06963, section 3).

    One exchange thus tells at most so much of what this node's own data changed. What is not finite stays so. A device is asked
    for nothing.
    """
    spans = [span for fragment in fragments for span in fragment.spans(far=theta.device.type != "cpu")]
    if not spans:
        return
    length = torch.stack([(theta[span] - sent(phi[span], theta.device)).norm() for span in spans]).norm()
    excess = torch.where(length > longest, 1 - longest / length, 0)
    for span in spans:
        theta[span].lerp_(sent(phi[span], theta.device), excess)
