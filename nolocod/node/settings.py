"""What a node may use of its owner's machine, and when: flags of `start` and `join`, which `nolocod set` changes while it runs.

The rule: one table says how each setting is read and shown, to flags, to `nolocod set`, to the page and to the file. What was
set holds over restarts and goes before the flag, until it is set to nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from nolocod.disk import write_whole
from nolocod.errors import SettingError, UsageError
from nolocod.observe.words import amount, duration
from nolocod.trainer.devices import read_devices
from nolocod.units import Hours, parse_size, parse_span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any


@dataclass(frozen=True)
class Settings:
    hours: tuple[Hours, ...] = ()
    """When it may train, local time; empty for always."""
    pause: bool = False
    """Not now, by its owner's word."""
    pause_on_battery: bool = False
    pause_on_metered: bool = False
    pause_when_used: float | None = None
    """Seconds for which nobody may have touched the machine before it trains."""
    pause_when_gpu_used: int | None = None
    """Bytes of the GPU's memory that other programs may hold."""
    max_temperature: float | None = None
    """Of the hottest device that trains, in °C."""
    max_power: float | None = None
    """Of the GPU that takes most, in watts."""
    duty: float = 1.0
    """Share of the time in which the trainer computes."""
    devices: str = "auto"
    """That train, as their owner names them (trainer/devices.py)."""
    threads: int = 0
    """CPU threads of the trainer; 0 leaves the choice to torch."""
    nice: int = 0
    """Priority of the trainer: from 0, as the daemon itself, to 19, which lets all others on the machine go first."""

    @property
    def of_trainer(self) -> tuple[str, int, int]:
        """What a trainer is told once, when it starts."""
        return self.devices, self.threads, self.nice


AS_IT_IS = Settings()


def _hours(text: str, name: str) -> tuple[Hours, ...]:
    return tuple(Hours.parse(span, name) for span in text.split(","))


def _switch(text: str, name: str) -> bool:
    if text not in ("yes", "no"):
        raise UsageError(f"{name} {text!r} is neither yes nor no.")
    return text == "yes"


def _number(units: str, least: float, most: float) -> Callable[[str, str], float]:
    """Reads a number with one of the `units` (an expression)."""

    def read(text: str, name: str) -> float:
        found = re.fullmatch(rf"(\d{{1,5}}(?:\.\d+)?)\s*{units}", text.strip())
        if found is None or not least <= float(found[1]) <= most:
            raise UsageError(f"{name} cannot be {text}. It is a number from {least:g} to {most:g}.")
        return float(found[1])

    return read


def _whole(most: int) -> Callable[[str, str], int]:
    def read(text: str, name: str) -> int:
        if not re.fullmatch(r"\d{1,6}", text) or int(text) > most:
            raise UsageError(f"{name} cannot be {text}. It is a number from 0 to {most}.")
        return int(text)

    return read


def _share(text: str, name: str) -> float:
    if not text.strip().endswith("%"):
        raise UsageError(f"{name} {text!r} is no share of the time.", remedy="Write it like 50%.")
    return _number("%", 1, 100)(text, name) / 100


_SWITCH: tuple[Callable[[str, str], Any], Callable[[Any], str]] = _switch, lambda on: "yes" if on else "no"
_KEYS: dict[str, tuple[Callable[[str, str], Any], Callable[[Any], str]]] = {
    "hours": (_hours, lambda spans: ", ".join(map(str, spans))),
    "pause": _SWITCH,
    "pause_on_battery": _SWITCH,
    "pause_on_metered": _SWITCH,
    "pause_when_used": (parse_span, duration),
    "pause_when_gpu_used": (parse_size, amount),
    "max_temperature": (_number("(?:°?C)?", 20, 150), lambda degrees: f"{degrees:g} °C"),
    "max_power": (_number("W?", 1, 99_999), lambda watts: f"{watts:g} W"),
    "duty": (_share, lambda share: f"{100 * share:g}%"),
    "devices": (read_devices, str),
    "threads": (_whole(4096), str),
    "nice": (_whole(19), str),
}
"""How each setting is read, by its name for errors, and how it is shown."""
KEYS = tuple(key.replace("_", "-") for key in _KEYS)
"""As the owner writes them."""


def read_settings(told: Mapping[str, str], given: Settings = AS_IT_IS, flag: str = "--") -> Settings:
    """`given` with what is `told` by key (as in KEYS); UsageError names the key with `flag` before it."""
    read = {}
    for key, text in told.items():
        if key not in KEYS:
            raise UsageError(f"there is no setting {key[:64]!r}.", remedy=f"There are {', '.join(KEYS)}.")
        name = key.replace("-", "_")
        read[name] = _KEYS[name][0](text, f"{flag}{key}")
    return replace(given, **read)


def shown(limits: Settings) -> dict[str, str]:
    """Those that differ from what they are without a word of the owner, by key."""
    values = {key: getattr(limits, key) for key in _KEYS}
    return {key.replace("_", "-"): _KEYS[key][1](value) for key, value in values.items() if value != getattr(AS_IT_IS, key)}


class LiveSettings:
    """`now` is what counts: what was set, else what was `given` by flags."""

    def __init__(self, given: Settings, path: Path) -> None:
        """`path`: the file of what was set. Raises SettingError if it cannot be read: it may say when not to train."""
        self._given, self._path = given, path
        self._set: dict[str, str] = {}
        try:
            if path.exists():
                self._set = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
            self.now = read_settings(self._set, given, "")
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, UsageError) as error:
            cause = error.cause if isinstance(error, UsageError) else f"{error}."
            raise SettingError(f"{path}: {cause}", remedy="Correct the file, or remove it: flags then count alone.") from error

    def change(self, told: Mapping[str, str]) -> None:
        """Set what is `told`, by key; nothing ("") brings the flag back. SettingError, DiskFullError, DataDirError: nothing is
        changed then."""
        kept = {key: text for key, text in {**self._set, **told}.items() if text or key not in KEYS}
        try:
            now = read_settings(kept, self._given, "")
        except UsageError as error:
            other = error.remedy != UsageError.entry.remedy
            raise SettingError(error.cause, remedy=error.remedy if other else None) from error
        write_whole(self._path, msgspec.json.encode(kept))
        self._set, self.now = kept, now
