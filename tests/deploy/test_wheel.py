"""The wheel: built as an installer builds it, it has every file of the package that git has, and no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def tracked() -> list[str]:
    """What git has, of this tree."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    pytest.importorskip("setuptools")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for name in tracked():
        if name.startswith("nolocod/") or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, capture_output=True, timeout=300, check=True)
    (path,) = out.glob("nolocod-*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_it_has_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {name for name in tracked() if name.startswith("nolocod/")}


def test_it_says_what_it_is_and_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    told = Parser().parsestr(wheel.read(name).decode())
    assert (told["Name"], told["License-Expression"], told["Requires-Python"]) == ("nolocod", "Apache-2.0", ">=3.11")
    assert told["Description-Content-Type"] == "text/markdown"
    assert "torch>=2.4" in told.get_all("Requires-Dist", [])
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "nolocod = nolocod.cli:main" in wheel.read(entry).decode()
    assert sum(one.file_size for one in wheel.infolist()) < 5 << 20
