"""Hostile replicas against the product's own judgement: the accept test, attacks, and the study's tables."""

from __future__ import annotations

import random
import statistics
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from nolocod.errors import HarmfulTensorError, MisdirectedTensorError, RejectedTensorError
from nolocod.proto.types import Subject
from nolocod.run.manifest import Inner, Outer, Trust
from nolocod.studies.lab import attacks
from nolocod.studies.lab.adversarial import AdversarialReplicas
from nolocod.studies.lab.results import Results
from nolocod.trainer.accept import BATCHES, FIRST, POOL, AcceptTest, Candidates
from nolocod.trainer.model import bytes_on_device
from nolocod.trainer.windows import Shard
from tests.support.trainer_parts import make_replica, sealed_run

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from nolocod.studies.lab.adversarial import Attack
    from nolocod.trainer.replica import Replica


# --- the accept test


def learned(folder: Path, codec: str = "float32", margin: float = 0.01) -> Replica:
    """A replica that learned something, and tests its partners."""
    trust = Trust(clip=0, direction=0, accept=margin)
    inner = Inner(steps=4, batch=2, sequence=32, learning_rate=3e-3)
    replica = make_replica(sealed_run(codec=codec, inner=inner, trust=trust, outer=Outer(rounds=100, fragments=2)), folder)
    for _ in range(30):
        replica.step()
    replica.phi.copy_(replica.theta)
    for _ in range(4):
        replica.step()
    return replica


@pytest.mark.parametrize("codec", ["float32", "modulo8", "delta4"])
def test_a_message_that_does_harm_is_refused_and_one_that_does_not_is_not(tmp_path: Path, codec: str) -> None:
    replica = learned(tmp_path, codec)
    own, other = (torch.zeros(replica.plan.box_size, dtype=torch.uint8) for _ in range(2))
    theta = replica.theta.clone()
    before = replica.phi.clone()
    for harm in (False, True):
        if harm:
            noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(1))
            replica.theta.add_(noise, alpha=0.3)
        replica.snapshot(other, Subject(1))
        replica.theta.copy_(theta)
        replica.snapshot(own, Subject(1))
        if harm:
            with pytest.raises(HarmfulTensorError, match=r"worse by \d"):
                replica.inspect(own, other, probation=True)
        else:
            assert replica.inspect(own, other, probation=True).weight == 1.0
    assert torch.equal(replica.phi, before), "candidates are tried elsewhere"
    assert torch.equal(replica.theta, theta)


def with_more_windows(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny text has but a few held-out windows; and they are drawn as a seed says."""
    assert replica.accept_test is not None
    replica.accept_test.chance = random.Random(1)
    monkeypatch.setattr(replica.accept_test, "pool", lambda source: np.tile(source.held_out(8), (8, 1)))


def test_an_honest_partner_that_is_behind_is_not_refused_while_much_is_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not trained since the last outer step: of what we learnt since, half is lost."""
    replica = learned(tmp_path, margin=1e-6)
    with_more_windows(replica, monkeypatch)
    own, other = (torch.zeros(replica.plan.box_size, dtype=torch.uint8) for _ in range(2))
    trained, before = replica.theta.clone(), replica.phi.clone()
    replica.theta.copy_(before)
    replica.snapshot(other, Subject(1))
    replica.theta.copy_(trained)
    replica.snapshot(own, Subject(1))
    assert replica.inspect(own, other, probation=True).weight == 1.0
    # where we learn nothing ourselves, the same harm is refused
    replica.phi.copy_(trained)
    replica.theta.copy_(2 * before - trained)
    replica.snapshot(other, Subject(1))
    replica.theta.copy_(trained)
    replica.snapshot(own, Subject(1))
    with pytest.raises(HarmfulTensorError, match=r"; 0\.0000 is allowed"):
        replica.inspect(own, other, probation=True)


def test_few_windows_tell_of_a_message_that_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all are tried where the few leave a doubt: the cost of the test is that of honest partners."""
    replica = learned(tmp_path)
    with_more_windows(replica, monkeypatch)
    tried: list[int] = []
    losses = Candidates.losses

    def counted(self: Candidates, windows: NDArray[np.int64], batch: int) -> list[float]:
        tried.append(len(windows) // batch)
        return losses(self, windows, batch)

    monkeypatch.setattr(Candidates, "losses", counted)
    own, other = (torch.zeros(replica.plan.box_size, dtype=torch.uint8) for _ in range(2))
    theta = replica.theta.clone()
    noise = torch.randn(theta.shape, generator=torch.Generator().manual_seed(1))
    for strength, expected in ((0.0, [FIRST] * 2), (0.3, [FIRST] * 2 + [BATCHES - FIRST] * 2 + [BATCHES])):
        tried.clear()
        replica.theta.add_(noise, alpha=strength)
        replica.snapshot(other, Subject(1))
        replica.theta.copy_(theta)
        replica.snapshot(own, Subject(1))
        with pytest.raises(HarmfulTensorError) if strength else nullcontext():
            replica.inspect(own, other, probation=True)
        assert tried == expected


def test_what_is_tried_on_is_there_before_the_first_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream looks through many documents for it: minutes that loading has, and an exchange has not."""
    asked: list[int] = []
    monkeypatch.setattr(Shard, "held_out", lambda _self, count: asked.append(count))
    trust, inner = Trust(accept=0.01), Inner(steps=4, batch=2, sequence=32)
    make_replica(sealed_run(inner=inner, trust=trust), tmp_path)
    assert asked == [BATCHES * POOL * 2]


def test_candidates_are_what_the_step_leaves(tmp_path: Path) -> None:
    replica = learned(tmp_path, margin=10)
    own, other = (torch.zeros(replica.plan.box_size, dtype=torch.uint8) for _ in range(2))
    replica.snapshot(other, Subject())
    for _ in range(2):
        replica.step()
    replica.snapshot(own, Subject())
    replica.inspect(own, other)
    flat = replica.phi.clone()
    replica._out().rehearse(own, other, flat, paired=True)
    replica.apply(own, other, 0)
    assert torch.equal(flat, replica.phi)


def test_who_is_tested(tmp_path: Path) -> None:
    replica = learned(tmp_path)
    test = replica.accept_test
    manifest = replica.manifest
    without = msgspec.structs.replace(manifest, trust=Trust(accept=0))
    assert bytes_on_device(manifest) == bytes_on_device(without) + 4, "and there is memory for it"
    assert isinstance(test, AcceptTest)
    assert isinstance(test.chance, random.SystemRandom), "nobody foresees which text it is tested on"
    test.chance = random.Random(1)
    assert test.due(1.0, probation=True)
    assert test.due(0.49, probation=False)
    assert 0.05 < sum(test.due(1.0, probation=False) for _ in range(400)) / 400 < 0.2
    assert make_replica(sealed_run(trust=Trust(accept=0)), tmp_path).accept_test is None


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


@pytest.mark.parametrize(
    ("attack", "error"), [("not finite", RejectedTensorError), ("sign flip", MisdirectedTensorError), ("drift", None)]
)
def test_attackers_meet_the_product_s_own_judgement(cache: Path, attack: Attack, error: type[Exception] | None) -> None:
    replicas, mean = attacked(cache, attack, Trust(direction=0.1))
    assert mean < 6
    assert {type(found) for _, found in replicas.refused} == ({error} if error else set())


def test_old_weights_lie_against_our_change(cache: Path) -> None:
    replicas, _ = attacked(cache, "stale", Trust(direction=0.1))
    assert replicas.share_refused("hostile") > 0
    assert {type(error) for _, error in replicas.refused} == {MisdirectedTensorError}


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
    assert percents["all mixed, everything on"] == percents["everything"] == ["+2.00 %"]
    assert percents["as by default"] == ["+1.00 %"]
    assert percents["none"] == ["+0.00 %"]
