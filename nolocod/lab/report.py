"""`nolocod lab report`: brings the tables and figures of docs/evidence.md up to what is in the book of trials.

The rule: only tables and figures are made anew (pages.py). Trials that are missing are done first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod import pages
from nolocod.disk import written_whole
from nolocod.lab import figures
from nolocod.lab.compare import compare
from nolocod.lab.scaling import scaling
from nolocod.lab.spread import spread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.lab.compare import Size
    from nolocod.lab.trials import Book


@dataclass(frozen=True)
class Sources:
    """Where the figures come from."""

    size: Size
    book: Book
    workers: int
    seed: int


def report(sources: Sources, into: Path, tell: Callable[[str], None]) -> None:
    """Write `into`/evidence.md anew, and its figures. UsageError if there is no such page, or a place is missing in it."""
    page = into / "evidence.md"
    text = pages.read(page, "Name the folder of the page with --into.")
    compared = compare(sources.size, sources.book, sources.workers, tell)
    spreads = spread(sources.size, sources.book, sources.workers, tell)
    times = scaling(sources.seed)
    for name, result in (("compare", compared), ("spread", spreads), ("scaling", times)):
        text = pages.filled(text, name, result.to_text())
    figures.draw_comparison(compared, into / "evidence-compare.svg")
    figures.draw_spread(spreads, into / "evidence-spread.svg")
    figures.draw_scaling(times, into / "evidence-scaling.svg")
    with written_whole(page) as handle:
        handle.write(text.encode())
