"""The page of the lab's results: `--into DIR` puts a study's tables into DIR/evidence.md, and its figure beside it.

The rule: only tables and figures are made anew (pages.py), and that they have a place is known before hours of work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod import pages
from nolocod.disk import written_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_REMEDY = "Name the folder of the page with --into."


class Place:
    """That of the study `name` in the page of the folder `into`. UsageError if there is none."""

    def __init__(self, into: Path, name: str) -> None:
        self._page, self._name = into / "evidence.md", name
        pages.filled(pages.read(self._page, _REMEDY), name, "")

    def fill(self, table: str, draw: Callable[[Path], None]) -> None:
        """Write the page anew, as it is by now; `draw` makes the figure."""
        draw(self._page.with_name(f"evidence-{self._name}.svg"))
        text = pages.filled(pages.read(self._page, _REMEDY), self._name, table)
        with written_whole(self._page) as handle:
            handle.write(text.encode())
