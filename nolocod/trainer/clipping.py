"""How far a partner may move us: the clip radius and the direction check (manifest.Trust), as arithmetic on norms.

The rule: with pairs there is no majority to ask, so what a partner can do is bounded by what partners did before
(ClippedGossip, arXiv 2202.01545). v = s_j - s_i, the partner's message less ours, counts with the weight
min(1, tau / |v|), tau = clip times the median of the last 16 accepted |v|, half of that for a partner on probation.
Nobody is refused for being far away: two halves of a swarm that were parted must find together again.

Distances follow the learning rate (arXiv 2506.10911, section 5), so they are remembered in units of it: else the
radius would be several times too wide when a schedule ends. Until four are known, our own change stands in for them.

Directions say something only where partners learn the same: their steps' cosines with our change are remembered, of those
who were refused too, and nobody is judged by his while their median is not as far above 0 as the bound is below it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.errors import MisdirectedTensorError

if TYPE_CHECKING:
    from nolocod.run.manifest import Trust

REMEMBERED = 16
"""Accepted distances of which the median is taken, for each fragment; and cosines, of all fragments."""
ENOUGH = 4
"""Fewer say too little: one hostile partner among three could be their median."""
WIDEST = 2.0
"""A distance is remembered at no more than this times the median, so that nobody can widen it by being far away."""
OWN = 2.0
"""Replicas that train are about one to two |beta Delta| apart after warm-up; this many stand in at first."""
ON_PROBATION = 0.5


@dataclass(frozen=True)
class Measured:
    """One look at the partner's message about a fragment; norms in the units of messages, over all that was decoded."""

    distance: float
    """|s_j - s_i|"""
    change: float
    """|beta Delta_i|, ours"""
    cosine: float
    """Between the partner's step as we see it, s_j - gamma phi_i, and Delta_i."""


@dataclass(frozen=True)
class Known:
    """An envelope as it is kept."""

    distances: tuple[tuple[float, ...], ...] = ()
    """Of each fragment's last accepted partners, over the learning rate."""
    leads: tuple[int, ...] = ()
    """By how many rounds the last partners said they were ahead."""
    cosines: tuple[float, ...] = ()
    """Of the last partners' steps with our change, whether they were accepted or not."""


class Envelope:
    """What one replica knows of its partners: their distances, fragment by fragment, and their rounds."""

    def __init__(self, settings: Trust, fragments: int) -> None:
        self._settings = settings
        self._accepted: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(fragments)]
        self._leads: deque[int] = deque(maxlen=REMEMBERED)
        self._cosines: deque[float] = deque(maxlen=REMEMBERED)

    def weigh(self, fragment: int, seen: Measured, rate: float, *, probation: bool) -> float:
        """What the partner's difference counts for, in (0, 1]; `rate`: the learning rate of our snapshot.

        MisdirectedTensorError if the partner goes against us by more than the run allows.
        """
        against = self._settings.direction
        agreeing = len(self._cosines) >= ENOUGH and statistics.median(self._cosines) >= against
        self._cosines.append(seen.cosine)
        if against and agreeing and seen.cosine < -against:
            raise MisdirectedTensorError(f"it has a cosine of {seen.cosine:.2f} with our own change, under {-against:g}.")
        if not self._settings.clip:
            return 1.0
        radius = self._settings.clip * self.usual(fragment, seen.change, rate)
        if probation:
            radius *= ON_PROBATION
        return radius / seen.distance if seen.distance > radius else 1.0

    def accept(self, fragment: int, seen: Measured, rate: float) -> None:
        """The exchange was applied: remember how far the partner was. A distance of nothing tells nothing."""
        distance = min(seen.distance, WIDEST * self.usual(fragment, seen.change, rate))
        if distance > 0:
            self._accepted[fragment].append(distance / rate)

    def usual(self, fragment: int, change: float, rate: float) -> float:
        """How far partners are from us as a rule, given our own |beta Delta|."""
        known = self._accepted[fragment]
        return statistics.median(known) * rate if len(known) >= ENOUGH else OWN * change

    def believe(self, own: int, told: int) -> int:
        """Our round after a paired outer step at `own` with a partner that says it is at `told`.

        Rounds are the run's clock, so one who is ahead takes us along; but no further than partners are ahead as a
        rule, or a few who lie would run down everybody's schedule.
        """
        bounded = self._settings.clip > 0 and len(self._leads) >= ENOUGH
        most = math.ceil(statistics.median(self._leads)) if bounded else told - own
        self._leads.append(told - own)
        return own + max(1, min(told - own, most))

    @property
    def state(self) -> Known:
        """What a checkpoint must hold."""
        return Known(tuple(tuple(known) for known in self._accepted), tuple(self._leads), tuple(self._cosines))

    def restore(self, state: Known) -> None:
        """Go on with `state`; distances of another number of fragments (an older checkpoint has none) are left aside."""
        if len(state.distances) == len(self._accepted):
            self._accepted = [deque(known, maxlen=REMEMBERED) for known in state.distances]
        self._leads = deque(state.leads, maxlen=REMEMBERED)
        self._cosines = deque(state.cosines, maxlen=REMEMBERED)
