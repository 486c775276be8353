"""docs/security.md and docs/limits.md: what they say is defended or bounded has the test that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["security.md", "limits.md"])
def test_every_test_that_the_page_names_is_there(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in sources for name in re.findall(r"def (test_\w+)", text)}
    assert len(named) > 15
    assert named <= there, f"the page names tests that are not there: {sorted(named - there)}"
