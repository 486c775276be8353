"""The study of attacks: what is run, what is told, and when it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nolocod.run.manifest import Trust
from nolocod.studies.lab import attacks

if TYPE_CHECKING:
    from pathlib import Path

STUDY = attacks.Study(attacks.AttackTrial(attacks.NONE), (1, 2))


@pytest.fixture
def log(tmp_path: Path) -> attacks.Log:
    """Undefended nodes pay 50 % for an attack and huge messages break them, defended ones pay 1 % and the second seed 2 %."""
    found = attacks.log(tmp_path / "kept.jsonl")
    for trial in STUDY.trials():
        cost = 1.0 if trial.attack == attacks.NONE else 1.5 if trial.trust == attacks.OFF else 1 + trial.seed / 100
        loss = None if trial.attack == "huge" and trial.trust == attacks.OFF else 2.0 * cost
        found[trial] = attacks.AttackOutcome(loss, 0.25, 0.05, 3, (0, 0, 0))
    return found


def test_results_are_told_in_a_table(log: attacks.Log) -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in STUDY.to_text(log).splitlines() if row.startswith("| ")]
    told = {row[0]: row[1:] for row in rows}
    assert told["all mixed"] == ["3.0000", "+50.00 %", "0, 0, 0", "2.0300", "+2.00 %", "0, 0, 0", "25.0%", "5.0%", "6"]
    assert told["huge"][:3] == ["no model is left", "", "0, 0, 0"]
    assert told["none"][3:5] == ["2.0000", "+0.00 %"]
    assert len(told) == 1 + 2 + 8


def test_a_study_that_was_broken_off_tells_what_it_has(log: attacks.Log) -> None:
    for trial in STUDY.trials():
        if trial.attack == "huge" or (trial.trust == attacks.OFF and trial.attack == "noise"):
            del log[trial]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in STUDY.to_text(log).splitlines() if row.startswith("| ")]
    told = {row[0]: row[1:] for row in rows}
    assert told["huge"] == ["not run", "", ""] * 2 + [""] * 3
    assert told["noise"][:4] == ["not run", "", "", "2.0300"]
    assert told["stale"][0] == "3.0000"


def test_the_study_fails_for_a_loss_or_any_harm_of_defended_nodes(log: attacks.Log) -> None:
    assert STUDY.failures(log) == []
    stale = replace(STUDY.like, attack="stale", trust=Trust(), seed=2)
    log[stale] = replace(log[stale], loss=2.08)
    assert STUDY.failures(log) == ["stale: +4.00 % of loss, 0 nodes ended, 0 reset, 0 starved"]
    log[stale] = replace(log[stale], loss=2.0, harm=(0, 1, 2))
    assert STUDY.failures(log) == ["stale: +1.00 % of loss, 0 nodes ended, 1 reset, 2 starved"]


def test_trials_of_defended_nodes_come_first_and_without_attackers_nobody_is_hostile() -> None:
    trials = STUDY.trials()
    assert [trial.attack for trial in trials[:4]] == ["none", "none", "all mixed", "all mixed"]
    assert all(trial.trust == Trust() for trial in trials[:20])
    assert (len(trials), trials[0].plan.nodes, trials[2].plan.nodes) == (30, 24, 32)
    assert round(trials[2].scenario.hostile * 32) == 8
