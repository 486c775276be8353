"""What the pages name is there: files, links, anchors, and the commands' subcommands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_PATH = re.compile(r"`((?:nolocod|tests|tools|deploy|docs)/[\w./-]*\w)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)|(?:src|srcset)=\"([^\"]+)\"")
_MODULE = re.compile(r"python -m ((?:tests|tools)(?:\.\w+)+)")


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as they are made on the web."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text, missing = page.read_text(encoding="utf-8"), []
    missing += [name for name in _PATH.findall(text) if not (ROOT / name).exists()]
    for target, anchor, picture in _LINK.findall(text):
        path = page.parent / (target or picture or page.name)
        if not path.exists() or (anchor and path.suffix == ".md" and anchor[1:] not in anchors(path)):
            missing.append(f"{target or picture}{anchor}")
    for module in _MODULE.findall(text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            missing.append(module)
    assert not missing


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md" and page.name not in index
    ] == []


def test_the_readmes_map_has_every_room() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rooms = [path.parent.relative_to(ROOT / "nolocod") for path in (ROOT / "nolocod").rglob("__init__.py")]
    inner = ("studies", "observe", "outer")  # named by their outer room
    named = [room.as_posix() for room in rooms if room.parts and not (room.parts[0] in inner and len(room.parts) > 1)]
    assert [room for room in named if room != "p2p" and f"{room}/" not in text] == []
