"""`nolocod lab report`: brings the tables and figures of docs/evidence.md up to what is in the book of trials.

The rule: the page's words are written by hand, its tables stand between `<!-- NAME -->` and `<!-- end -->`, and only
those are replaced. Trials that are missing are done first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.disk import written_whole
from nolocod.errors import UsageError
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
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{page} cannot be read ({error.strerror}).", remedy="Name the folder of the page with --into."
        ) from error
    compared = compare(sources.size, sources.book, sources.workers, tell)
    spreads = spread(sources.size, sources.book, sources.workers, tell)
    times = scaling(sources.seed)
    for name, result in (("compare", compared), ("spread", spreads), ("scaling", times)):
        text = filled(text, name, result.to_text())
    figures.draw_comparison(compared, into / "evidence-compare.svg")
    figures.draw_spread(spreads, into / "evidence-spread.svg")
    figures.draw_scaling(times, into / "evidence-scaling.svg")
    with written_whole(page) as handle:
        handle.write(text.encode())


def filled(text: str, name: str, table: str) -> str:
    """`text` with `table` at the place `name`; UsageError if it has none."""
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    if not place.search(text):
        raise UsageError(f"the page has no place <!-- {name} --> … <!-- end -->.")
    return place.sub(lambda _: table.strip("\n") + "\n", text, count=1)
