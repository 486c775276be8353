"""When this node may train and exchange, and when it rests: hours of the day, battery, the month's bytes.

The rule: a node that rests stays in the mesh and says so; it goes on by itself when nothing speaks against
it any more. Times of day are local, and looked at again every few seconds, so that a clock that is set, a
summer time that begins, and a laptop that was asleep all put themselves right.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import psutil
import trio

from nolocod.errors import PowerUnknownError
from nolocod.observe.events import Paused, Resumed, Troubled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nolocod.observe.events import Emit
    from nolocod.units import Hours

    Check = Callable[[], Paused | None]
    """Why not now; None if nothing speaks against it."""

_LOOK_SECONDS = 1.0
"""Between two looks: a fast line moves a hundred megabytes meanwhile."""
_BATTERY_SECONDS = 10.0
_DRIFT = 60.0
"""By how much the time to go on must have changed to be told again."""


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


def outside_hours(hours: Sequence[Hours], wall: Callable[[], float] = time.time) -> Check:
    """A check of the time of day; `wall` gives seconds since 1970."""
    shown = ", ".join(map(str, hours))

    def check() -> Paused | None:
        now = wall()
        if open_at(hours, now):
            return None
        return Paused("hours", f"outside of --hours {shown}", opens_in(hours, now))

    return check


def on_battery(emit: Emit, plugged: Callable[[], bool | None] | None = None) -> Check:
    """A check of the power supply; `plugged` says None where the system does not tell, which is told once."""
    read = plugged or plugged_in
    looked = float("-inf")
    found: Paused | None = None
    warned = False

    def check() -> Paused | None:
        nonlocal looked, found, warned
        now = trio.current_time()
        if now - looked < _BATTERY_SECONDS:
            return found
        looked, known = now, read()
        if known is None and not warned:
            warned = True
            emit(Troubled(PowerUnknownError.entry.code, "--pause-on-battery has no effect: this system tells of no battery."))
        found = Paused("battery", "the machine runs on battery: plug it in", None) if known is False else None
        return found

    return check


def plugged_in() -> bool | None:
    """Whether the machine has mains power; None where there is no battery, or the system does not tell."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, ValueError):  # not on this platform, or a power supply that tells nonsense
        return None
    return None if battery is None else battery.power_plugged


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
        ends = trio.current_time() + (self.pause.seconds or 0.0) if self.pause else 0.0
        same = self.pause is not None and before is not None and self.pause.reason == before.reason
        if same and abs(ends - self._ends) < _DRIFT:
            return
        self._ends = ends
        if self.pause is not None:
            self._emit(self.pause)
        elif before is not None:
            self._emit(Resumed())
        if (self.pause is None) != (before is None):
            self._changed.set()
            self._changed = trio.Event()

    async def wait_paused(self) -> None:
        while self.pause is None:
            await self._changed.wait()

    async def wait_resumed(self) -> None:
        while self.pause is not None:
            await self._changed.wait()
