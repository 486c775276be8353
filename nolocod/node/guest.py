"""A node as a good guest on its owner's machine: what the sensors say, set against the limits that the owner gave.

The rule: what a sensor does not tell pauses nobody, and that is told once. Heat and power are kept by computing less of the
time; only if that does not do, the node pauses. Readings, and time, can be anybody's: tests bring their own.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import trio

from nolocod.errors import LocalError, PowerUnknownError, SensorError
from nolocod.node.sensors import Readings, read_machine
from nolocod.node.settings import shown
from nolocod.observe.events import Allowed, Eased, Paused, Troubled
from nolocod.observe.words import amount, duration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from nolocod.node.schedule import Check
    from nolocod.node.settings import LiveSettings, Settings
    from nolocod.observe.events import Emit
    from nolocod.p2p.settings import Allowance
    from nolocod.trainer.process import TrainerProcess

_LOOK_SECONDS = 2.0
_STEP_SECONDS = 5.0
"""Between two changes of the share: so long a card takes to grow warmer or cooler."""
_LESS, _MORE = 0.8, 1.1
"""What the share is multiplied by where it is too hot, and where there is room."""
_LEAST = 0.1
"""The smallest that it can come to; if even that is too much for a minute, the node pauses."""
_MINUTE = 60.0
"""So long a pause for heat, power or others on the GPU lasts at least, after they were there last."""
_ALARM = 10.0
"""°C above the limit at which nothing is tried before the pause."""
_SENSORS = {
    "pause_on_battery": ("plugged", "battery"),
    "pause_on_metered": ("metered", "metered network"),
    "pause_when_used": ("idle", "input"),
    "pause_when_gpu_used": ("gpu_taken", "memory of a GPU"),
    "max_temperature": ("temperature", "temperature"),
    "max_power": ("power", "power of a GPU"),
}
"""What each limit needs to know, and how that is called."""


async def _read(limits: Settings) -> Readings:
    # in a thread: a desktop that does not answer must not hold up the node, nor its end
    return await trio.to_thread.run_sync(read_machine, limits, abandon_on_cancel=True)  # type: ignore[call-arg]  # stubs of an older trio


class Guest:
    """`share` of the time the trainer may compute; `checks` are for the pause policy. `run` keeps both up to date."""

    def __init__(
        self, limits: LiveSettings, allowance: Allowance, emit: Emit, read: Callable[[Settings], Awaitable[Readings]] = _read
    ) -> None:
        """`allowance` is told with the limits, and is no matter of this class."""
        self._limits = limits
        self._allowance = allowance
        self._emit = emit
        self._read = read
        self._readings = Readings()
        self._told: set[str] = set()
        self._eased = Eased(1.0)
        self._watts: float | None = None  # a mean of the last ten seconds or so: one reading may fall between two steps
        self._throttle, self._moved = 1.0, -_STEP_SECONDS  # the part of the owner's share, and when it was last changed ...
        self._least_since: float | None = None  # ... since when it is the smallest, and too much ...
        self._why = ""  # ... and what for
        self._hot: tuple[Literal["heat", "power"], float] | None = None  # a pause for it, and since when
        self._crowded = -math.inf  # when others were last on the GPU
        self.checks: list[Check] = [
            self._not_wanted, self._on_battery, self._on_metered, self._in_use, self._gpu_in_use, self._too_hot,
        ]  # fmt: skip

    @property
    def share(self) -> float:
        return self._eased.share

    def tell(self) -> None:
        """Tell what the owner gives."""
        given, now = self._allowance, self._limits.now
        hours = tuple(map(str, now.hours))
        self._emit(Allowed(given.up, given.down, given.monthly, hours, not now.pause_on_battery, shown(now)))

    def change(self, told: Mapping[str, str]) -> dict[str, str]:
        """Set what the owner tells, by key; returns what counts then. Raises SettingError, DiskFullError or DataDirError."""
        self._limits.change(told)
        self.tell()
        return shown(self._limits.now)

    async def run(self, trainer: Callable[[], TrainerProcess | None]) -> None:
        """Look again and again, and have the trainer that is up compute in as much of the time as it may."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_share, trainer)
            while True:
                await self.look()
                await trio.sleep(_LOOK_SECONDS)

    async def _keep_share(self, trainer: Callable[[], TrainerProcess | None]) -> None:
        while True:
            await trio.sleep(1)
            up = trainer()
            if up is not None and up.can_end and up.share != self.share:
                with suppress(LocalError):  # of one that has ended: whoever drives it is told too
                    await up.ease(self.share)

    async def look(self) -> None:
        """Ask the sensors that the limits need."""
        limits = self._limits.now
        wanted = [name for name in _SENSORS if getattr(limits, name) not in (None, False)]
        found = await self._read(limits) if wanted else Readings()
        for name in wanted:
            sensor, called = _SENSORS[name]
            if name not in self._told and getattr(found, sensor) is None:
                code = PowerUnknownError.entry.code if sensor == "plugged" else SensorError.entry.code
                cause = f"--{name.replace('_', '-')} has no effect: this system tells of no {called}."
                self._emit(Troubled(code, cause))
            self._told.add(name)
        self._take(found, limits, trio.current_time())

    def _take(self, found: Readings, limits: Settings, now: float) -> None:
        if found.idle is None and self._readings.idle is not None:  # a desktop that did not answer for once
            found = replace(found, idle=self._readings.idle + _LOOK_SECONDS)
        if found.power is not None:
            known = found.power if self._watts is None else self._watts
            found = replace(found, power=known + (found.power - known) * _LOOK_SECONDS / 10)
        self._readings, self._watts = found, found.power
        if limits.pause_when_gpu_used is not None and (found.gpu_taken or 0) > limits.pause_when_gpu_used:
            self._crowded = now
        self._ease(limits, now)

    def _ease(self, limits: Settings, now: float) -> None:
        """Choose the share of the time, and tell what changed."""
        found = self._readings
        beyond = _beyond(limits, found)
        if self._hot is not None and now - self._hot[1] >= _MINUTE and _beyond(limits, found, 5.0, 0.9) is None:
            self._hot = None
        elif self._hot is None and beyond is not None:
            since = self._least_since
            if (since is not None and now - since >= _MINUTE) or _beyond(limits, found, -_ALARM, math.inf) is not None:
                self._hot, self._throttle = (beyond, now), _LEAST
        if now - self._moved >= _STEP_SECONDS:
            if beyond is not None:
                self._throttle, self._moved = max(_LEAST, self._throttle * _LESS), now
            elif _beyond(limits, found, 3.0, 0.95) is None:
                self._throttle, self._moved = min(1.0, self._throttle * _MORE), now
        if beyond is None or self._throttle > _LEAST:
            self._least_since = None
        elif self._least_since is None:
            self._least_since = now
        if beyond is not None:
            self._why = {"heat": "--max-temperature", "power": "--max-power"}[beyond] + " asks for it"
        why = self._why if self._throttle < 1 else ""
        eased = Eased(limits.duty * self._throttle, why, _whole(found.temperature), _whole(found.power))
        if eased != self._eased:
            self._eased = eased
            self._emit(eased)

    # --- reasons to pause

    def _not_wanted(self) -> Paused | None:
        why = "its owner wants it so: `nolocod set pause=no` lets it go on"
        return Paused("owner", why, None) if self._limits.now.pause else None

    def _on_battery(self) -> Paused | None:
        known = self._limits.now.pause_on_battery and self._readings.plugged is False
        return Paused("battery", "the machine runs on battery: plug it in", None) if known else None

    def _on_metered(self) -> Paused | None:
        known = self._limits.now.pause_on_metered and self._readings.metered
        return Paused("metered", "the network is metered: use another one", None) if known else None

    def _in_use(self) -> Paused | None:
        wanted, idle = self._limits.now.pause_when_used, self._readings.idle
        if wanted is None or idle is None or idle >= wanted:
            return None
        return Paused("used", f"somebody uses the machine; it goes on {duration(wanted)} after that", wanted - idle)

    def _gpu_in_use(self) -> Paused | None:
        most, taken = self._limits.now.pause_when_gpu_used, self._readings.gpu_taken
        left = self._crowded + _MINUTE - trio.current_time()
        if most is None or taken is None or left <= 0:
            return None
        crowded = taken > most
        why = f"other programs hold {amount(taken)} of the GPU's memory" if crowded else "other programs have just used the GPU"
        return Paused("gpu", why, None if crowded else left)

    def _too_hot(self) -> Paused | None:
        if self._hot is None:
            return None
        limits, found, (reason, _) = self._limits.now, self._readings, self._hot
        if reason == "heat" and limits.max_temperature is not None:
            why = f"{found.temperature or 0:.0f} °C, and --max-temperature is {limits.max_temperature:g}: look to its fans"
            return Paused("heat", why, None)
        if reason == "power" and limits.max_power is not None:
            return Paused("power", f"{found.power or 0:.0f} W, and --max-power is {limits.max_power:g}", None)
        return None


def _beyond(limits: Settings, found: Readings, below: float = 0.0, part: float = 1.0) -> Literal["heat", "power"] | None:
    """Which limit is passed, if each were so many °C, and to such a part in watts, `below` what it is."""
    hottest, most = limits.max_temperature, limits.max_power
    if hottest is not None and found.temperature is not None and found.temperature > hottest - below:
        return "heat"
    if most is not None and found.power is not None and found.power > part * most:
        return "power"
    return None


def _whole(reading: float | None) -> float | None:
    return None if reading is None else float(round(reading))
