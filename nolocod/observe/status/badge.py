"""A badge (SVG) that says what a node gave: for its owner's pages elsewhere.

The rule: it holds nothing but text, and whatever a peer or an owner wrote is escaped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from nolocod.observe.words import duration, plain, scaled

if TYPE_CHECKING:
    from nolocod.observe.events import Contribution

_CHARACTER = 6.6
"""Pixels of a character, about; the text is fitted to its room."""
_PADDING = 8


def svg(run_name: str, given: Contribution | None) -> bytes:
    """The badge of who gave `given` to the run of this name."""
    left, right = plain(run_name[:40]), told(given)
    head, whole = _width(left), _width(left) + _width(right)
    title = f"{left}: {right}"

    def text(words: str, begin: float, width: float) -> str:
        room = f'textLength="{width - 2 * _PADDING:.0f}" lengthAdjust="spacingAndGlyphs"'
        return f'<text x="{begin + width / 2:.0f}" y="14" text-anchor="middle" {room}>{escape(words)}</text>'

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole:.0f}" height="20" role="img" aria-label="{_quoted(title)}">'
        f'<title>{escape(title)}</title><rect width="{whole:.0f}" height="20" rx="3" fill="#1f2937"/>'
        f'<path d="M{head:.0f} 0h{whole - head - 3:.0f}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{head:.0f}z" fill="#1d4ed8"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{text(left, 0, head)}{text(right, head, whole - head)}</g></svg>"
    ).encode()


def told(given: Contribution | None) -> str:
    """What was given, in a line."""
    if given is None:
        return "no exchange yet"
    tokens = scaled(given.tokens, " tokens", " k tokens", " M tokens", " G tokens", " T tokens")
    return f"{tokens} in {duration(given.seconds)}"


def _width(words: str) -> float:
    return len(words) * _CHARACTER + 2 * _PADDING


def _quoted(words: str) -> str:
    return escape(words, {'"': "&quot;"})
