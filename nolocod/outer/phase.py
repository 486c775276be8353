"""How many inner steps this node takes between two outer steps.

The rule: a phase lasts as long as the median machine's, in time. So machines of unlike speeds take their outer steps together,
and each trains as much in between as it can. Nothing here waits, and nothing is counted twice: the trainer tells how long an
inner step takes, membership what it takes others (p2p/membership/run_clock.py).
"""

from __future__ import annotations

import math

PARTS, _MOST = 8, 8
"""A phase is so many parts of the run's `inner.steps`, one at least; and at most so many times `inner.steps`. A machine that is
faster or slower than that beside the median one is before the others, or gives up rounds."""
_ALIKE = 4 / 3
"""A machine that is faster by less than that takes the run's `inner.steps`: members who tell endless phases move the median by
a few hundredths, and would have everybody's last longer."""


class Phase:
    """The phases of one node in a run of `inner_steps`; the one under way has `steps`."""

    def __init__(self, inner_steps: int) -> None:
        self._inner_steps = inner_steps
        self._step_seconds = 0.0  # not known yet
        self._parts = PARTS

    @property
    def turn(self) -> float:
        """As `steps`, but not of whole steps: of a slow node several of the run's turns go by in one."""
        return self._parts * self._inner_steps / PARTS

    @property
    def steps(self) -> int:
        return math.ceil(self.turn)

    @property
    def own(self) -> float:
        """Seconds that the run's `inner.steps` take us; 0 while they are not known."""
        return self._inner_steps * self._step_seconds

    @property
    def seconds(self) -> float:
        return self.after(self.steps)

    @property
    def longest(self) -> float:
        """Seconds that none takes more than."""
        return _MOST * self.own

    def after(self, steps: int) -> float:
        """Seconds that `steps` inner steps take."""
        return steps * (self._step_seconds or 1.0)

    def follow(self, steps: int, seconds: float) -> None:
        """Learn from `steps` that took `seconds` how long one takes, over the last phase or so."""
        new = min(1.0, steps / self._inner_steps) if self._step_seconds else 1.0
        self._step_seconds += new * (seconds / steps - self._step_seconds)

    def fit(self, runs: float, lead: int) -> None:
        """Begin one that lasts `runs` seconds, and longer while we are `lead` rounds before the others all the same; but twice
        or half as long as the last one at most."""
        ratio = runs / self.own if self.own else 1.0
        parts = PARTS if 1 <= ratio < _ALIKE else round(PARTS * ratio)
        self._parts = min(max(parts + max(lead - 1, 0), self._parts // 2, 1), 2 * self._parts, PARTS * _MOST)


def is_part(done: int, inner_steps: int) -> bool:
    """Whether a phase may end after `done` inner steps."""
    return PARTS * done % inner_steps < min(PARTS, inner_steps)
