"""Virtual time, and a scheduler that does the same again.

The rule: nothing in a simulation asks the machine for the time, for chance, or for a thread. trio runs ready tasks in
a random order on purpose; here that order comes from the seed as well.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import trio
import trio.testing
from trio._core import _run as scheduler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run `main` on a clock that jumps to whatever is due next."""
    with _scheduled_by(random.Random(seed)):
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@contextmanager
def _scheduled_by(rng: random.Random) -> Iterator[None]:
    # These two are how trio's own tests, and those of Hypothesis for trio, make it repeat itself.
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = True, rng  # type: ignore[misc]  # final for everybody else
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before  # type: ignore[misc]  # as above


async def at_once(work: Callable[..., T], *arguments: object) -> T:
    """wire.Aside without a thread: the virtual clock does not wait for one."""
    await trio.lowlevel.checkpoint()
    return work(*arguments)
