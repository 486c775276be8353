"""Tables that commands put into pages which are written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nolocod.errors import UsageError
from nolocod.studies.pages import Place, filled

if TYPE_CHECKING:
    from pathlib import Path


def test_a_study_fills_its_place(tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    page.write_text("words\n<!-- compare -->\nold\n<!-- end -->\n")
    Place(page, "compare", "Name it.").fill("\n| a | b |\n")
    assert page.read_text() == "words\n<!-- compare -->\n| a | b |\n<!-- end -->\n"
    with pytest.raises(UsageError, match="no place <!-- choices -->"):
        Place(page, "choices", "Name it.")
    with pytest.raises(UsageError, match="cannot be read"):
        Place(tmp_path / "elsewhere" / "evidence.md", "compare", "Name it.")


def test_only_the_tables_of_the_page_are_replaced() -> None:
    page = "words\n<!-- compare -->\nold\nrows\n<!-- end -->\nmore\n<!-- choices -->\n<!-- end -->\n"
    assert filled(page, "compare", "\nnew\\1\n") == page.replace("old\nrows", "new\\1")
    assert filled(page, "choices", "first") == page.replace("<!-- choices -->\n", "<!-- choices -->\nfirst\n")
    with pytest.raises(UsageError, match="no place <!-- attacks -->"):
        filled(page, "attacks", "new")
