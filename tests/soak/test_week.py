"""A week in the simulator, in the small."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.soak import week
from tests.soak.week import DAY, HOUR, Look

if TYPE_CHECKING:
    import pytest


def test_what_a_node_remembers_is_counted_and_growth_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(week, "PHASE", 1200.0)
    report, swarm = week.run(0.5, 4, 1)
    assert report.paired
    assert report.checked
    assert sum(swarm.befell.values()) > 2
    node = swarm.live()[0]
    before = week.held_by(node)
    assert 50 < before < 5000
    node.loop.__dict__["all_whom_it_met"] = [[str(number)] for number in range(100)]
    assert week.held_by(node) == before + 202, "strings, and the lists of them, wherever they lie"

    for rise, broken in ((0.0, ()), (0.01, ("objects",))):
        swarm.looks = [Look(hour * HOUR, 500 + rise * 500 * hour / 24, 4.0) for hour in range(1, round(7 * DAY / HOUR) + 1)]
        monkeypatch.setattr(week, "run", lambda *_: (replace(report, violations=()), swarm))
        assert week.main([]) == bool(broken)
        told = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("BROKEN")]
        assert tuple(told) == broken
