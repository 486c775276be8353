"""Virtual time, and a scheduler that does the same again.

The rule: nothing in a simulation asks the machine for the time, for chance, or for a thread. trio runs ready tasks in
a random order on purpose; here that order comes from the seed as well. What the simulation itself waits for, as bytes on
their way, goes by `sleep` and `Wakeup`, which cost a third of what trio's own sleep does.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import trio
import trio.testing
from trio._core import _run as scheduler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")


class Wakeup:
    """Wakes the one task that waits for it."""

    __slots__ = ("number", "task")

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = None
        self.number = -1
        """Of the latest wait."""

    async def wait(self, until: float) -> None:
        """Until it rings, at most until the time `until`, which is yet to come."""
        self.task = trio.lowlevel.current_task()
        vars(trio.lowlevel.current_clock())["sleepers"].add(self, until)
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def wake(self) -> None:
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
            self.task = None

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


class _Sleepers:
    """All that sleep, and the clock that they go by: it jumps to whatever is due next, theirs or one of trio's deadlines."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Wakeup]] = []  # those that were woken or cancelled are left for a while
        self._numbers = count()

    def add(self, wakeup: Wakeup, until: float) -> None:
        wakeup.number = next(self._numbers)
        heapq.heappush(self._waiting, (until, wakeup.number, wakeup))

    def jump(self) -> None:
        """Nobody has anything left to do now."""
        waiting = self._waiting
        while waiting and (waiting[0][2].task is None or waiting[0][2].number != waiting[0][1]):
            heapq.heappop(waiting)
        due = scheduler.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if waiting:
            due = min(due, waiting[0][0])
        if due < math.inf:
            self.now = due
        while waiting and waiting[0][0] <= due:
            _, number, wakeup = heapq.heappop(waiting)
            if wakeup.number == number:
                wakeup.wake()


def virtual_clock() -> trio.testing.MockClock:
    """For one run of trio."""
    sleepers, clock = _Sleepers(), trio.testing.MockClock(autojump_threshold=0)
    vars(clock).update(sleepers=sleepers, _autojump=sleepers.jump, current_time=lambda: sleepers.now)  # it may not be derived
    return clock


async def sleep_until(when: float) -> None:
    """As trio's."""
    if when <= trio.current_time():
        await trio.lowlevel.checkpoint()
    else:
        await Wakeup().wait(when)


async def past(when: float) -> None:
    """Wait for `when` where it is yet to come: else there is not even a checkpoint, which is most of the cost."""
    if when > trio.current_time():
        await Wakeup().wait(when)


async def sleep(seconds: float) -> None:
    """As trio's."""
    await sleep_until(trio.current_time() + seconds)


def run(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run `main` on a clock that jumps to whatever is due next."""
    with _scheduled_by(random.Random(seed)), _collecting_rarely():
        return trio.run(main, clock=virtual_clock())


@contextmanager
def _scheduled_by(rng: random.Random) -> Iterator[None]:
    # These two are how trio's own tests, and those of Hypothesis for trio, make it repeat itself.
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = True, rng  # type: ignore[misc]  # final for everybody else
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before  # type: ignore[misc]  # as above


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    # What thousands of nodes hold lives long; looking through it for cycles was a sixth of all the time.
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
