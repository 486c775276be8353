"""The wheel: built as an installer builds it, it has every file of the package that git has, and no other."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from tests.wheel import ROOT, build, tracked

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    pytest.importorskip("setuptools")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    path = build(tmp_path_factory.mktemp("wheel"))
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


def test_its_dependencies_are_those_that_are_tested_or_newer(wheel: zipfile.ZipFile) -> None:
    """Of each the constraints name a version, which the wheel allows."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    needs = [Requirement(text) for text in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", [])]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
    own = [need for need in needs if need.marker is None]
    assert len(own) > 15
    assert [str(need) for need in own if not need.specifier.contains(tested.get(need.name, "0"))] == []
