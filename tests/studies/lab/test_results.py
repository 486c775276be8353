"""Results of long computations outlive the command: nothing is done twice, and what a kill left is no obstacle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import UsageError
from nolocod.studies.lab.results import Results

if TYPE_CHECKING:
    from pathlib import Path

KINDS = (int, float)


def roots(path: Path, *wanted: int) -> tuple[Results[int, float], list[int]]:
    """The results after square roots of `wanted` were asked for, and which of them had to be drawn."""
    drawn: list[int] = []
    results = Results(path, KINDS)
    results.perform(wanted, math.sqrt, 2, lambda number, count, of, _: drawn.append(of))
    return results, sorted(drawn)


def test_nothing_is_done_twice_not_even_by_the_next_command(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "roots.jsonl"
    assert roots(path, 4, 4, 9)[1] == [4, 9]
    results, drawn = roots(path, 16, 9, 4)
    assert drawn == [16]
    assert [results[of] for of in (4, 9, 16)] == [2, 3, 4]
    assert 25 not in results
    with pytest.raises(KeyError):
        results[25]


def test_a_whole_number_is_the_same_setting_when_it_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "roots.jsonl"
    told: list[float] = []
    for _ in range(2):
        Results(path, (float, float)).perform([4], math.sqrt, 1, lambda number, count, of, _: told.append(of))
    assert told == [4.0]


@dataclass(frozen=True)
class Root:
    of: int
    times: int = 1


def drawn(root: Root) -> float:
    return math.sqrt(root.of) * root.times


def test_a_line_from_before_a_setting_was_there_is_found(tmp_path: Path) -> None:
    path = tmp_path / "roots.jsonl"
    path.write_text('[{"of":4},2.0]\n')
    told: list[Root] = []
    results: Results[Root, float] = Results(path, (Root, float))
    results.perform([Root(4), Root(4, 2)], drawn, 1, lambda number, count, root, _: told.append(root))
    assert told == [Root(4, 2)]
    assert (results[Root(4)], results[Root(4, 2)]) == (2.0, 4.0)


def test_a_line_that_a_kill_cut_off_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "roots.jsonl"
    roots(path, 4, 9)
    path.write_bytes(path.read_bytes()[:-3])
    before = len(path.read_bytes().splitlines()[0])
    results, drawn = roots(path, 4, 9)
    assert len(drawn) == 1
    assert sorted(path.read_text().splitlines()) == ["[4,2.0]", "[9,3.0]"]
    assert before == len("[4,2.0]")
    assert results[drawn[0]] ** 2 == drawn[0]


@pytest.mark.parametrize("line", ["what?", '["four", 2.0]', "[4]", "{}"])
def test_a_file_of_something_else_is_told_and_left_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "roots.jsonl"
    path.write_text(f"[9,3.0]\n{line}\n")
    with pytest.raises(UsageError, match="line 2, is no result of this command"):
        Results(path, KINDS)
    assert path.read_text() == f"[9,3.0]\n{line}\n"


def test_a_folder_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Results(tmp_path, KINDS)
