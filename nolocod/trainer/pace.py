"""How fast a device computes: of each inner step it gets the share with which all are done soonest (ranks.py).

The rule: nobody waits to learn it. A GPU's times are told by its own clock, in a later step.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_RECENT = 8
"""Steps of which the middle one counts, and after which it is told again."""
_SAVES = 0.95
"""Of a step's time: where other shares take less, they are taken. Times are never quite the same."""


class Pace:
    """Of a device; `begin` and `end` are called around what it computes of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._untold = 0
        self._began = 0.0
        self._events: list[torch.cuda.Event] = []  # where what is timed begins and ends
        self._windows = 0

    def begin(self) -> None:
        if not self._on_gpu:
            self._began = perf_counter()
        elif not self._events:
            self._mark()

    def end(self, windows: int) -> None:
        """So many windows were computed since `begin`, or a GPU was asked to."""
        if not self._on_gpu:
            self._note((perf_counter() - self._began) / windows)
            return
        if len(self._events) == 1:
            self._mark()
            self._windows = windows
        elif self._events[1].query():  # type: ignore[no-untyped-call]
            self._note(self._events[0].elapsed_time(self._events[1]) / 1000 / self._windows)
            self._events = []

    def _mark(self) -> None:
        with torch.cuda.device(self._device):  # an event is recorded on the stream of the one that is chosen
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[-1].record()

    def _note(self, seconds: float) -> None:
        self._took.append(seconds)
        self._untold += 1

    @property
    def seconds(self) -> float:
        """For a window, of late; 0 while that is not known."""
        return median(self._took) if len(self._took) == _RECENT else 0.0

    def news(self) -> float | None:
        """`seconds`, once they are of other steps than when they were told last."""
        if self._untold < _RECENT:
            return None
        self._untold = 0
        return self.seconds


def shares(paces: Sequence[float], now: Sequence[int]) -> list[int]:
    """How many windows each device gets of as many as they have `now`: those with which the last ends soonest, if that is
    much sooner than `now`. `paces`: seconds of each for a window. Each has one at least, so that its pace stays known."""
    best = [1] * len(paces)
    for _ in range(sum(now) - len(paces)):
        soonest = min(range(len(paces)), key=lambda one: (best[one] + 1) * paces[one])
        best[soonest] += 1

    def last(parts: Sequence[int]) -> float:
        return max(part * pace for part, pace in zip(parts, paces, strict=True))

    return best if last(best) < _SAVES * last(now) else list(now)
