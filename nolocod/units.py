"""Addresses, rates, sizes, spans of time and releases, read from what a user types or a member tells.

The rule: a unit is never guessed, and an error names the flag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nolocod.errors import UsageError


@dataclass(frozen=True)
class Address:
    """A TCP address to bind: port 0 takes any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Address:
        """Read "HOST:PORT" (IPv6 hosts in brackets); UsageError names the flag."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
            raise UsageError(f"{flag} {text!r} is not HOST:PORT.")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


SLOWEST_RATE = 32_000
"""Bytes per second: a chunk of 2 MiB then takes a third of the three minutes that a partner gives it."""

_NAME_ENDS, _NAME_SIGNS = r"[\w.+@()'-]", r"[\w .+@()'-]"
NAME = re.compile(rf"{_NAME_ENDS}(?:{_NAME_SIGNS}{{0,30}}{_NAME_ENDS})?")
"""What a node may be called: up to 32 letters, digits and signs that mean nothing to a terminal or to HTML."""

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", re.ASCII)
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_rate(text: str, flag: str) -> int:
    """Read "20Mbit" or "2.5MB" (per second; "/s" may follow) as bytes per second; UsageError names the flag."""
    rate = _amount(text.strip().removesuffix("/s"), flag, bits=True)
    if rate < SLOWEST_RATE:
        least = f"{SLOWEST_RATE * 8 // 1000}kbit"
        raise UsageError(f"{flag} {text!r} is too slow.", remedy=f"Give at least {least}, or partners give up.")
    return rate


def parse_line(text: str, flag: str) -> tuple[int, int]:
    """Read "100/20Mbit" (down and up, as lines are sold) or "20Mbit" (both) as bytes per second; UsageError names the flag."""
    down, slash, up = text.strip().removesuffix("/s").partition("/")
    if not slash:
        return (rate := parse_rate(text, flag)), rate
    unit = up.lstrip("0123456789. ")
    return parse_rate(down if down[-1:].isalpha() else down + unit, flag), parse_rate(up, flag)


def parse_size(text: str, flag: str) -> int:
    """Read "200GB" or "1.5TiB" as bytes; UsageError names the flag."""
    size = _amount(text.strip(), flag, bits=False)
    if size < 1:
        raise UsageError(f"{flag} {text!r} is zero.", remedy="Leave it out for no limit.")
    return size


def _amount(text: str, flag: str, *, bits: bool) -> int:
    """Bytes. The unit is never guessed: "Mb" means one thing to a network and another to a disk."""
    units = "20Mbit or 2.5MB (bits and bytes per second)" if bits else "200GB or 1.5TB"
    if (found := _AMOUNT.fullmatch(text)) is None:
        raise UsageError(f"{flag} {text!r} is not a number and a unit.", remedy=f"Write it like {units}.")
    number, unit = found.groups()
    for ending, per_byte in (("bit", 8), ("bps", 8), ("B", 1)):
        factor = _PREFIXES.get(unit.removesuffix(ending).lower())
        if unit.endswith(ending) and factor is not None and (bits or per_byte == 1):
            return round(float(number) * factor / per_byte)
    raise UsageError(f"{flag} {text!r} has an unknown unit.", remedy=f"Write it like {units}.")


def parse_span(text: str, flag: str) -> float:
    """Read "12h", "30d" or "2w" as seconds; UsageError names the flag."""
    found = re.fullmatch(r"(\d{1,5})([mhdw])", text.strip(), re.ASCII)
    if found is None or not int(found.group(1)):
        raise UsageError(f"{flag} {text!r} is not a span of time.", remedy="Write it like 12h, 30d or 2w.")
    return float(int(found.group(1)) * _UNITS[found.group(2)])


@dataclass(frozen=True)
class Hours:
    """A span of each day, in minutes since midnight, local time; over midnight where it ends before it begins."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Hours:
        """Read "22:00-07:00"; UsageError names the flag."""
        found = re.fullmatch(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", text.strip(), re.ASCII)
        if found is None:
            raise UsageError(f"{flag} {text!r} is not HH:MM-HH:MM.")
        hours, minutes, end_hours, end_minutes = map(int, found.groups())
        begin, end = hours * 60 + minutes, end_hours * 60 + end_minutes
        if max(minutes, end_minutes) > 59 or begin >= 1440 or end > 1440:
            raise UsageError(f"{flag} {text!r}: there is no such time of day.")
        if begin == end:
            raise UsageError(f"{flag} {text!r} is empty.", remedy=f"Leave {flag} out to train at all hours.")
        return cls(begin, end)

    def contains(self, minute: int) -> bool:
        """Whether `minute` of the day lies in it; the end does not."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return f"{self.begin // 60:02}:{self.begin % 60:02}-{self.end // 60:02}:{self.end % 60:02}"


def parse_name(text: str, flag: str) -> str:
    """What a node is called; UsageError for what is not safe to show."""
    if text and not NAME.fullmatch(text):
        raise UsageError(
            f"{flag} {text!r} is no name.", remedy="Take up to 32 letters, digits, spaces and .+@()'- without HTML."
        )
    return text


def release_numbers(text: str) -> tuple[int, ...]:
    """Of a release like "0.12.dev3": (0, 12, 0, 0). Empty for what is none."""
    found = re.match(r"\d{1,6}(\.\d{1,6}){0,3}(?!\d)", text)
    return tuple([*map(int, found[0].split(".")), 0, 0, 0][:4]) if found else ()
