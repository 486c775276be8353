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


class _Sleeper:
    """A task that sleeps; None once it is woken or cancelled."""

    __slots__ = ("task",)

    def __init__(self, task: trio.lowlevel.Task | None) -> None:
        self.task = task

    def end(self) -> None:
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
            self.task = None

    def abort(self, _: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


class _Sleepers:
    """All that sleep, and the clock that they go by: it jumps to whatever is due next, theirs or one of trio's deadlines."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, _Sleeper]] = []
        self._numbers = count()

    def jump(self) -> None:
        """Nobody has anything left to do now."""
        waiting = self._waiting
        while waiting and waiting[0][2].task is None:
            heapq.heappop(waiting)
        due = scheduler.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if waiting:
            due = min(due, waiting[0][0])
        if due < math.inf:
            self.now = due
        while waiting and waiting[0][0] <= due:
            heapq.heappop(waiting)[2].end()

    async def take(self, sleeper: _Sleeper, until: float) -> None:
        heapq.heappush(self._waiting, (until, next(self._numbers), sleeper))
        await trio.lowlevel.wait_task_rescheduled(sleeper.abort)


def virtual_clock() -> trio.testing.MockClock:
    """For one run of trio."""
    sleepers, clock = _Sleepers(), trio.testing.MockClock(autojump_threshold=0)
    vars(clock).update(sleepers=sleepers, _autojump=sleepers.jump, current_time=lambda: sleepers.now)  # it may not be derived
    return clock


class Wakeup:
    """Wakes the one task that waits for it."""

    def __init__(self) -> None:
        self._sleeper = _Sleeper(None)

    async def wait(self, until: float) -> None:
        """Until it rings, at most until the time `until`, which is yet to come."""
        self._sleeper = _Sleeper(trio.lowlevel.current_task())
        await vars(trio.lowlevel.current_clock())["sleepers"].take(self._sleeper, until)

    def wake(self) -> None:
        self._sleeper.end()


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


async def at_once(work: Callable[..., T], *arguments: object) -> T:
    """wire.Aside without a thread: the virtual clock does not wait for one."""
    await trio.lowlevel.checkpoint()
    return work(*arguments)
