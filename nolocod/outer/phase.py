"""How many inner steps this node takes between two outer steps, and how large they are.

The rule: a phase lasts as long as the median machine's, in time. So machines of unlike speeds take their outer steps together,
and each trains as much in between as it can: up to twice as many inner steps, and from there on larger ones. Many steps in a
row would part a fast node's weights from the others' by more than a partner's clip radius lets through. Nothing here waits,
and nothing is counted twice: the trainer tells how long an inner step takes, membership what it takes others
(p2p/membership/run_clock.py).
"""

from __future__ import annotations

import math

PARTS = 8
"""A phase is so many parts of the run's `inner.steps`, one at least. A machine that is slower than that beside the median one
gives up rounds."""
_IN_A_ROW, _MOST = 2, 64
"""Times `inner.steps` that are taken as such at most; what is more makes steps larger, up to the work of so many times."""
_MOST_OWN = 8
"""In a loop that is its caller's own, steps are never larger: so many times `inner.steps`, all as such."""
_WAITS = 8
"""Phases of the run."""
_QUARTER, _SHORT = 4, 2.0
"""What an exchange may be of the model, and of its phase; and seconds that are short whatever a phase is."""
_ROUNDING = 1e-9
"""Of turns: thirds that add up to whole ones fall short of them by less."""
_ALIKE = 4 / 3
"""A machine that is faster by less than that takes the run's `inner.steps`: members who tell endless phases move the median by
a few hundredths, and would have everybody's last longer."""


class Phase:
    """The phases of one node in a run of `parts` that have turns of `inner_steps`; the one under way has `steps`, each of
    `times` as many tokens as the run's. `enlarges`: whether they may have more."""

    def __init__(self, inner_steps: int, parts: int = 1, *, enlarges: bool = True) -> None:
        self._inner_steps = inner_steps
        self._parts = parts
        self._most_parts = PARTS * (_IN_A_ROW if enlarges else _MOST_OWN)
        self._most_work = PARTS * (_MOST if enlarges else _MOST_OWN)
        self._runs = 0.0
        self._step_seconds = 0.0  # of a step with the run's tokens; not known yet
        self._work = PARTS  # in parts, as if no step were larger
        self._owed = 0.0  # turns that had gone by at the last outer step, less the parts of all of them

    @property
    def times(self) -> int:
        return math.ceil(self._work / self._most_parts)

    @property
    def turn(self) -> float:
        """As `steps`, but not of whole steps: of a slow node several of the run's turns go by in one."""
        return self._eighths * self._inner_steps / PARTS

    @property
    def steps(self) -> int:
        """After which the next outer step is due: later where an offer brought the last one early, or all rounds would be
        shorter than the run says."""
        return self._of(1)

    @property
    def half(self) -> int:
        """The fewest steps after which another's offer is taken."""
        return self._of(0.5)

    @property
    def _eighths(self) -> int:
        """Of `inner_steps`, in one turn."""
        return round(self._work / self.times)

    def _of(self, turns: float) -> int:
        """Inner steps of so many turns, and of what came early; whole eighths, as `is_part` knows them."""
        eighths = math.ceil(turns * self._eighths) + round(max(0.0, -self._owed) * self._eighths)
        return math.ceil(eighths * self._inner_steps / PARTS)

    @property
    def own(self) -> float:
        """Seconds that the run's `inner.steps` take us; 0 while they are not known."""
        return self._inner_steps * self._step_seconds

    @property
    def seconds(self) -> float:
        return self.after(math.ceil(self.turn))

    @property
    def wait_ahead(self) -> float:
        """Seconds for which who is far before the others waits for them."""
        return _WAITS * max(self._runs, self.own)

    def after(self, steps: int) -> float:
        """Seconds that `steps` inner steps take."""
        return steps * self.times * (self._step_seconds or 1.0)

    def follow(self, steps: float, seconds: float) -> None:
        """Learn from so many steps' tokens that took `seconds` how long one takes, over the last phase or so."""
        new = min(1.0, steps / self._inner_steps) if self._step_seconds else 1.0
        self._step_seconds += new * (seconds / steps - self._step_seconds)

    def due(self, steps: int) -> int:
        """Of how many of the model's parts the turn has come, if `steps` are done and the next outer step is taken when it is
        due, or after the step under way."""
        return max(1, int(self._owed + max(steps + 1, self.steps) / self.turn + _ROUNDING))

    def took(self, steps: int, parts: int) -> None:
        """An outer step about so many parts came after so many inner steps."""
        self._owed = min(max(self._owed + steps / self.turn - parts, -0.5), self._parts)

    def fit(self, runs: float, lead: int) -> None:
        """Begin one that lasts `runs` seconds, and longer by an eighth for each round but one that we are before the others, by
        `lead`, all the same; but twice or half as long as the last one at most."""
        ratio, self._runs = runs / self.own if self.own else 1.0, runs
        parts = PARTS if 1 <= ratio < _ALIKE else round(PARTS * ratio)
        longer = round(parts * (1 + max(lead - 1, 0) / PARTS))
        self._work = min(max(longer, self._work // 2, 1), 2 * self._work, self._most_work)


def at_once(parts: int, seconds: float, whole: float) -> int:
    """About how many of the model's `parts`, which take `seconds` each, an exchange may be: a quarter, or as many as take two
    seconds, or a quarter of the `whole` seconds in which all have their turn. What it brings is as late as it is long."""
    quick = int(min(parts, max(_SHORT, whole / _QUARTER) / seconds)) if seconds else parts
    return max(-(-parts // _QUARTER), quick)


def is_part(done: int, inner_steps: int) -> bool:
    """Whether a phase may end after `done` inner steps."""
    return PARTS * done % inner_steps < min(PARTS, inner_steps)
