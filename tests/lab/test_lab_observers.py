"""What makes the scenario of an observer fail."""

from __future__ import annotations

from dataclasses import replace

from tests.lab.observers import MEMORY, Seen, _Followed

GOOD = Seen({"public": (4, 4), "cone": (5, 5)}, 30.0, 60.0, 10.0, shown=95, committed=100, memory=MEMORY)


def test_a_node_or_exchanges_that_are_missing_and_memory_fail_it() -> None:
    assert GOOD.wrong == ""
    assert "a node" in replace(GOOD, members=None).wrong
    assert "a node" in replace(GOOD, nodes={"public": (4, 4), "cone": (5, 4)}).wrong
    assert "94 of 100" in replace(GOOD, shown=94).wrong
    assert "0 of 0" in replace(GOOD, shown=0, committed=0).wrong
    assert "MB" in replace(GOOD, memory=MEMORY + 0.1).wrong


def test_an_exchange_is_shown_when_its_pair_is_with_its_time() -> None:
    seen = _Followed(1000.0)
    seen.first = {("a", "b"): [(1010.0, 1030.0), (1100.0, 1107.0)]}
    assert seen.shown("a", "b", 1010.5) == 19.5
    assert seen.shown("a", "b", 1100.0) == 7.0
    assert seen.shown("a", "b", 1050.0) is None, "another one of the pair"
    assert seen.shown("b", "a", 1010.5) is None, "who offers is known too"
