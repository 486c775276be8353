"""Every method of the lab on something tiny: replicas stay together as the method says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nolocod.run.manifest import Manifest
from nolocod.run.run_file import from_table
from nolocod.studies.lab.methods import BEFORE, BEFORE_BUSY, BUSY, BY_NAME, FIVE, OFTEN, OURS
from nolocod.studies.lab.trials import Trial
from tools import choices, compare
from tools.trials import book, perform

if TYPE_CHECKING:
    from pathlib import Path

TINY = Trial("none", 2, 1, 1e-3, model="tiny", steps=24, phase=12, batch=1, sequence=16, held_out=1, points=2)
TOGETHER = {"all", "gradients"}
"""Schemes that leave all replicas with the same weights."""


@pytest.mark.parametrize("name", BY_NAME)
def test_each_method_trains_and_its_replicas_are_as_far_apart_as_it_says(name: str) -> None:
    last = perform(replace(TINY, method=name, steps=40, phase=20))[-1]
    assert 0 < last.averaged < 10
    assert last.mean <= last.worst
    if BY_NAME[name].scheme in TOGETHER:
        assert last.spread == 0
        assert last.mean == last.worst
    elif BY_NAME[name].scheme == "none":
        assert last.spread > 0


def test_the_same_trial_comes_out_the_same_and_another_seed_does_not() -> None:
    one, again, other = (perform(trial) for trial in (TINY, TINY, replace(TINY, seed=2)))
    assert one == again != other


def test_ours_is_what_a_run_file_says_that_says_nothing() -> None:
    default = Manifest(name="any", model={"model_type": "llama"})
    outer = default.outer
    assert (outer.alpha, outer.beta, outer.gamma) == (OURS.alpha, OURS.beta, OURS.gamma)
    assert default.codec == OURS.codec
    assert default.trust.clip == OURS.clip
    assert (default.inner.optimizer, default.inner.schedule) == (OURS.optimizer, OURS.schedule)
    compared = replace(compare.FULL.like, method=OURS.name, replicas=4).manifest()
    read = from_table({"name": "any", "model": {"model_type": "llama"}})
    assert (read.inner.steps, read.outer.turns) == (compared.inner.steps, compared.outer.turns) == (24, 8)


def test_on_a_busy_line_each_part_is_merged_when_the_next_is_sent() -> None:
    lateness = {name: replace(compare.FULL.like, method=name).lateness for name in (OURS.name, BUSY.name, BEFORE_BUSY.name)}
    assert lateness == {OURS.name: 0, BUSY.name: 3, BEFORE_BUSY.name: 25}


@pytest.mark.parametrize("table", [*choices.full(), *choices.reduced()], ids=lambda table: table.rows)
def test_what_a_table_compares_saw_as_many_tokens(table: choices.Table) -> None:
    for group in {key[not table.by_row] for key in table.cells}:
        trials = [trial for key, trial in table.cells.items() if key[not table.by_row] == group]
        manifests = [trial.manifest() for trial in trials]
        tokens = [one.outer.rounds * one.inner.steps * one.inner.tokens_per_step for one in manifests]
        assert min(tokens) > 0.99 * max(tokens)
        assert {trial.seed for trial in trials} in ({100}, {101}, {102}), "one, and none of those that are compared"


def test_the_best_of_a_column_and_of_a_row_is_told(tmp_path: Path) -> None:
    cells = {(f"{phase}", f"{rate:g}"): replace(TINY, method=OURS.name, phase=phase, learning_rate=rate)
             for phase in (8, 24) for rate in (1e-3, 1e-2)}  # fmt: skip
    asked = choices.Table("How often", "inner steps", cells)
    kept = book(tmp_path / "kept.jsonl")
    text = choices.choices((asked, replace(asked, by_row=True)), kept, 1, lambda _: None)
    losses = {key: kept[trial][-1].mean for key, trial in cells.items()}
    columns, rows = text.strip().split("\n\nHow often:\n\n")
    assert columns.startswith("How often:\n\n| inner steps | 0.001 | 0.01 |\n|---|---|---|\n| 8 | ")
    for table, axis in ((columns, 1), (rows, 0)):
        assert table.count("**") == 4
        for group in {key[axis] for key in losses}:
            assert f"**{min(loss for key, loss in losses.items() if key[axis] == group):.4f}**" in table


def test_bytes_are_those_of_the_messages() -> None:
    assert BY_NAME["NoLoCo, the paper's"].sent(16, 50) == 4
    assert FIVE.sent(16, 50) == 2, "a byte twice as often"
    assert BY_NAME["DiLoCo"].sent(4, 50) == 6, "a ring of 4 sends its sums on 3 times, and then the results"
    assert BY_NAME["data parallel"].sent(4, 50) == 300
    assert BY_NAME["none"].sent(4, 50) == 0


def test_claims_are_about_methods_that_there_are() -> None:
    assert {name for one, other, _ in compare.PAIRS for name in (one, other)} <= set(BY_NAME)


def test_a_comparison_claims_what_was_trained_on_both_sides_and_no_more(tmp_path: Path) -> None:
    few = (OFTEN.name, compare.PAPER, OURS.name, compare.NONE)
    smaller = compare.Size((2,), (1,), (1e-3,), False, replace(TINY, model="micro"), few)
    size = replace(smaller, replicas=(2, 4), like=TINY, methods=(*few, "pair averaging"), beside=smaller)
    told: list[str] = []
    found = compare.compare(size, book(tmp_path / "kept.jsonl"), 1, told.append)
    assert sum("4 replicas" in line for line in told) == 2, "none of those that are told once"
    assert found.beside is not None
    text = found.to_text()
    assert text.count("| ours | 2.08 | 0.001 | ") == 3, "2 and 4 replicas, and the other model's 2"
    assert text.count("pair averaging") == 1 + 1, "a row, and a claim"
    assert "The same with another model (micro), seeds 1:" in text
    alike = replace(found, beside=replace(found.beside, size=replace(smaller, like=TINY)))
    assert "The same with other numbers of replicas, seeds 1:" in alike.to_text()
    mine, theirs = (found.ends[name, 2][0].mean for name in (OURS.name, "pair averaging"))
    claim = next(one for one in found.claims() if one.text == "ours is below pair averaging")
    assert claim.holds == (mine < theirs)
    assert claim.seen.startswith(f"{100 * (mine / theirs - 1):+.2f} to"), "of 2 replicas alone"
    assert found.beside.rates == dict.fromkeys(few, 1e-3)


def test_what_was_not_trained_yet_is_told_and_the_rate_is_the_best_of_one_replica_alone(tmp_path: Path) -> None:
    like = replace(TINY, model="micro")
    part = compare.Size((2,), (1,), (1e-3, 1e-2), False, like, (compare.NONE,), alone=like.steps)
    whole, kept = replace(part, methods=(compare.NONE, OURS.name, BEFORE.name)), book(tmp_path / "kept.jsonl")
    told: list[str] = []
    done = compare.compare(part, kept, 1, told.append)
    assert sum("1 replicas, seed 100" in line for line in told) == 2
    alone = {trial.learning_rate: points[-1].mean for trial, points in kept.items() if trial.replicas == 1}
    assert done.rates == {compare.NONE: min(alone, key=lambda rate: alone[rate])}
    told.clear()
    text = compare.compare(whole, kept, 1, told.append, trains=False).to_text()
    assert not told, "nothing is trained"
    assert f"Not trained yet: {OURS.name} at 2 replicas, {BEFORE.name} at 2 replicas." in text
    assert "| none | 0 | " in text
    assert "| ours |" not in text
