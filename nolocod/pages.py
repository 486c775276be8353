"""Pages of docs/ whose words are written by hand, and whose tables are made by commands.

The rule: a table stands between `<!-- NAME -->` and `<!-- end -->`, and only it is replaced.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nolocod.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def read(page: Path, remedy: str) -> str:
    """The text of `page`; UsageError if it cannot be read, best before minutes of work are done for it."""
    try:
        return page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{page} cannot be read ({error.strerror}).", remedy=remedy) from error


def filled(text: str, name: str, table: str) -> str:
    """`text` with `table` at the place `name`; UsageError if it has none."""
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    if not place.search(text):
        raise UsageError(f"the page has no place <!-- {name} --> … <!-- end -->.")
    return place.sub(lambda _: table.strip("\n") + "\n", text, count=1)
