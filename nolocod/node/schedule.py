"""When this node may train and exchange, and when it rests: hours of the day, the month's bytes, and what guest.py adds.

The rule: a node that rests stays in the mesh and says so; it goes on by itself when nothing speaks against it any more. Where
somebody wants the machine now, nobody waits for the exchange under way. Times of day are local, and looked at again every few
seconds, so that a clock that is set, a summer time that begins, and a laptop that was asleep all put themselves right.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import trio

from nolocod.observe.events import Paused, Resumed, StateChanged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nolocod.observe.events import Emit
    from nolocod.units import Hours

    Check = Callable[[], Paused | None]
    """Why not now; None if nothing speaks against it."""

_LOOK_SECONDS = 1.0
"""Between two looks: a fast line moves a hundred megabytes meanwhile."""
_DRIFT = 60.0
"""By how much the time to go on must have changed to be told again."""
_AT_ONCE = frozenset({"owner", "used", "gpu", "heat", "power"})
"""Reasons of who wants the machine now; the others let the exchange under way come to its end."""


def open_at(hours: Sequence[Hours], moment: float) -> bool:
    """Whether `moment` (seconds since 1970) lies in one of the spans, by local time."""
    local = datetime.fromtimestamp(moment)
    return any(span.contains(local.hour * 60 + local.minute) for span in hours)


def opens_in(hours: Sequence[Hours], moment: float) -> float:
    """Seconds from `moment` until the next span begins; local times are put right where the clocks change."""
    midnight = datetime.fromtimestamp(moment).replace(hour=0, minute=0, second=0, microsecond=0)
    begins = [
        # of a time that the clocks skip, timestamp() makes the time that they show instead
        (midnight + timedelta(days=day, minutes=span.begin)).timestamp()
        for span in hours
        for day in range(3)
    ]
    return min(begin for begin in begins if begin > moment) - moment


def outside_hours(hours: Callable[[], Sequence[Hours]], wall: Callable[[], float] = time.time) -> Check:
    """A check of the time of day; none of `hours` are all. `wall` gives seconds since 1970."""

    def check() -> Paused | None:
        now, spans = wall(), hours()
        if not spans or open_at(spans, now):
            return None
        return Paused("hours", f"outside of --hours {', '.join(map(str, spans))}", opens_in(spans, now))

    return check


def month_spent(spent: Callable[[], bool], seconds_left: Callable[[], float]) -> Check:
    """A check of the month's bytes."""

    def check() -> Paused | None:
        why = "the month's bytes are used up: raise --monthly-budget, or wait for the next month (UTC)"
        return Paused("budget", why, seconds_left()) if spent() else None

    return check


class PausePolicy:
    """`pause` says what speaks against training now, None if nothing does. `run` keeps it up to date."""

    def __init__(self, checks: Sequence[Check], emit: Emit) -> None:
        self._checks = checks
        self._emit = emit
        self._changed = trio.Event()
        self._ends = 0.0
        self.pause: Paused | None = None

    async def run(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await trio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Ask the checks, and tell what changed."""
        before = self.pause
        found = [check() for check in self._checks]  # all of them: one may have something to tell
        self.pause = next((pause for pause in found if pause is not None), None)
        seconds = self.pause.seconds if self.pause else None
        ends = 0.0 if seconds is None else trio.current_time() + seconds
        same = self.pause is not None and before is not None and self.pause.reason == before.reason
        if same and abs(ends - self._ends) < _DRIFT:
            return
        self._ends = ends
        if self.pause is not None:
            self._emit(self.pause)
        elif before is not None:
            self._emit(Resumed())
        if (self.pause and self.pause.reason) != (before and before.reason):
            self._changed.set()
            self._changed = trio.Event()

    async def wait_paused(self) -> None:
        while self.pause is None:
            await self._changed.wait()

    async def wait_urgent(self) -> None:
        """Until it pauses for somebody who wants the machine now."""
        while self.pause is None or self.pause.reason not in _AT_ONCE:
            await self._changed.wait()

    async def wait_resumed(self) -> None:
        while self.pause is not None:
            await self._changed.wait()

    async def rest(self, stop: trio.Event) -> bool:
        """Wait until nothing speaks against training; False if told to stop before."""
        if self.pause is not None and not stop.is_set():
            self._emit(StateChanged("paused"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_after, stop.wait, nursery.cancel_scope)
                await self.wait_resumed()
                nursery.cancel_scope.cancel()
        return not stop.is_set()


async def cancel_after(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()
