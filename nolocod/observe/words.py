"""Figures and peers' texts as people read them: sizes, spans of time, reachability."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nolocod.observe.events import NatClass

REACHABLE: dict[NatClass | None, str] = {
    "public": "directly",
    "cone": "by hole punching",
    "symmetric": "through relays",
    "client": "by nobody",
    None: "not known yet",
}
"""How others reach a node."""


def plain(text: str) -> str:
    """`text` on one line and without control characters: it may come from a peer."""
    return "".join(char if char.isprintable() else " " for char in text)


def amount(size: float) -> str:
    """Bytes in powers of 1000: 3_350_000 is "3.35 MB"."""
    return scaled(size, " B", " kB", " MB", " GB", " TB")


def scaled(number: float, *units: str) -> str:
    """Three digits and the unit; each unit is a thousand times the one before it."""
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"


def duration(seconds: float) -> str:
    """Seconds as "12 s", "3 min", "2.5 h" or "4.0 d"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"
