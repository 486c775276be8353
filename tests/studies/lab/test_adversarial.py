"""Hostile replicas against the product's own judgement: attacks, and the study's tables."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import RejectedTensorError
from nolocod.run.manifest import Trust
from nolocod.studies.lab import attacks
from nolocod.studies.lab.adversarial import AdversarialReplicas
from nolocod.studies.lab.results import Results

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.studies.lab.adversarial import Attack


# --- attacks


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenised text, made once: it takes longer than all the rest."""
    return tmp_path_factory.mktemp("cache")


def attacked(cache: Path, attack: Attack, trust: Trust) -> tuple[AdversarialReplicas, float]:
    trial = attacks.AttackTrial(attack, trust, hidden=16, phase=4, head_start=4, rounds=8)
    replicas = AdversarialReplicas(trial.manifest(), 3, 1, [attack], cache)
    replicas.begin_at(trial.head_start)
    return replicas, replicas.train().mean


@pytest.mark.parametrize(("attack", "errors"), [("not finite", {RejectedTensorError}), ("drift", set())])
def test_attackers_meet_the_product_s_own_judgement(cache: Path, attack: Attack, errors: set[type[Exception]]) -> None:
    replicas, mean = attacked(cache, attack, Trust())
    assert mean < 6
    assert {type(found) for _, found in replicas.refused} == errors


def test_who_is_refused_again_and_again_is_banned(cache: Path) -> None:
    with_bans, without = (attacked(cache, "not finite", trust)[0].met["hostile"] for trust in (Trust(), attacks.OFF))
    assert with_bans < without


def test_a_huge_message_is_scaled_to_the_radius_and_ruins_the_undefended(cache: Path) -> None:
    _, undefended = attacked(cache, "huge", attacks.OFF)
    replicas, defended = attacked(cache, "huge", Trust())
    assert replicas.met["hostile"] > len(replicas.refused), "nobody is refused for being far away"
    assert defended < undefended - 0.1, "which is no better than guessing"
    assert statistics.mean(replicas.weights) > 0.5, "honest partners keep their weight"


# --- the study


def test_results_are_told_in_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like = attacks.AttackTrial(attacks.NONE, honest=4, hostile=0, hidden=16, phase=2, head_start=1, rounds=2)
    study = attacks.Study(like, (1,))
    told: list[str] = []
    log = attacks.log(tmp_path / "kept.jsonl")
    attacks.perform_all([like], log, 1, told.append)
    assert told == [f"1 of 1: attack none, defence none, seed 1: {log[like].mean:.4f}"]
    calm = log[like]
    assert calm.mean is not None

    def found(_: object, trial: attacks.AttackTrial) -> attacks.AttackOutcome:
        assert trial in study.trials(), "what is told was done"
        worse = {attacks.OFF: 1.0, Trust(): 1.01}.get(trial.trust, 1.02)
        return replace(calm, mean=None if trial.attack == "huge" and trial.trust == attacks.OFF else calm.mean * worse)

    monkeypatch.setattr(Results, "__getitem__", found)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in study.to_text(log).splitlines() if row.startswith("| ")]
    percents = {row[0]: [cell for cell in row if cell.endswith(" %") or cell == "broken"] for row in rows}
    assert percents["huge"] == ["broken", "+1.00 %"]
    assert percents["all mixed"] == ["+0.00 %", "+1.00 %"]
    assert percents["as by default"] == ["+1.00 %"]
    assert percents["none"] == ["+0.00 %"]
