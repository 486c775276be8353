"""Pages of docs/ whose words are written by hand, and whose tables are made by commands.

The rule: a table stands between `<!-- NAME -->` and `<!-- end -->`, and only it is replaced. That it has a place is known
before minutes or hours of work are done for it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nolocod.disk import written_whole
from nolocod.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


class Place:
    """That of the table `name` in `page`. UsageError if there is none, or no such page: `remedy` is for that."""

    def __init__(self, page: Path, name: str, remedy: str) -> None:
        self._page, self._name, self._remedy = page, name, remedy
        self._filled("")

    @property
    def table(self) -> str:
        """What stands there."""
        found = _place(self._name).search(self._page.read_text(encoding="utf-8"))
        return found.group() if found else ""

    def fill(self, table: str) -> None:
        """Write the page anew, as it is by now."""
        text = self._filled(table)
        with written_whole(self._page) as handle:
            handle.write(text.encode())

    def _filled(self, table: str) -> str:
        try:
            text = self._page.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{self._page} cannot be read ({error.strerror}).", remedy=self._remedy) from error
        return filled(text, self._name, table)


def filled(text: str, name: str, table: str) -> str:
    """`text` with `table` at the place `name`; UsageError if it has none."""
    if not _place(name).search(text):
        raise UsageError(f"the page has no place <!-- {name} --> … <!-- end -->.")
    return _place(name).sub(lambda _: table.strip("\n") + "\n", text, count=1)


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
