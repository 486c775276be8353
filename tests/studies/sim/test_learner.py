"""Simulated nodes whose replicas learn: the same rules as real ones, and what attackers do to them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import TrainerError
from nolocod.run.manifest import Trust
from nolocod.studies.lab import attacks
from nolocod.studies.sim.learner import LearningSwarm
from nolocod.studies.sim.swarm import simulate_in
from nolocod.trainer.replica import Replica

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.studies.sim.swarm import Report

SMALL = attacks.AttackTrial(attacks.NONE, Trust(), 6, 2, hidden=16, phase=10, step_seconds=6.0, head_start=2, rounds=5)


class Kept(LearningSwarm):
    """Can be looked at while it runs."""

    last: Kept

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        Kept.last = self


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenised text, made once: it takes longer than all the rest."""
    return tmp_path_factory.mktemp("cache")


def run(
    cache: Path, attack: str = attacks.NONE, trust: Trust | None = None, kind: type[Kept] = Kept, **changes: int
) -> tuple[Kept, Report]:
    trial = replace(SMALL, attack=attack, trust=trust or Trust(), **changes)
    given = trial.manifest(), trial.head_start, trial.attacks, cache
    report, swarm = simulate_in(partial(kind, *given), trial.plan, trial.scenario)
    assert report.violations == ()
    return swarm, report


@pytest.fixture(scope="module")
def calm(cache: Path) -> tuple[Kept, Report]:
    return run(cache)


def test_nodes_learn_and_no_inner_step_is_lost(calm: tuple[Kept, Report]) -> None:
    swarm, report = calm
    assert max(swarm.losses()) < 5.0, "guessing is 5.5"
    assert report.paired > 5 * report.solo
    assert (swarm.ended, swarm.behind, swarm.starved()) == (0, set(), [])
    late = [replica.inner_steps - swarm.inner_steps[number] for number, replica in swarm.replicas.items()]
    assert all(0 <= steps <= SMALL.phase for steps in late), "what is not of an outer step came after the last one"


def test_one_seed_gives_one_log_and_one_loss(cache: Path, calm: tuple[Kept, Report]) -> None:
    again, report = run(cache)
    assert report.digest == calm[1].digest
    assert again.losses() == calm[0].losses()


def test_a_huge_message_is_scaled_to_the_radius_and_ruins_the_undefended(cache: Path, calm: tuple[Kept, Report]) -> None:
    defended, _ = run(cache, "huge")
    undefended, _ = run(cache, "huge", attacks.OFF)
    assert max(defended.losses()) < 1.1 * max(calm[0].losses())
    assert undefended.ended or not max(undefended.losses()) < 5.4


def test_who_sends_what_is_not_finite_is_refused_and_banned(cache: Path) -> None:
    (swarm, report), (_, trusting) = run(cache, "not finite"), run(cache, "not finite", attacks.OFF, rounds=2)
    assert report.hostile == trusting.hostile == 0
    assert max(swarm.losses()) < 5.0
    assert report.bans > 0
    assert trusting.bans == 0


def test_who_gives_nothing_starves_others_and_that_is_counted(cache: Path) -> None:
    swarm, report = run(cache, "stall", hostile=SMALL.honest, rounds=3)
    assert report.hostile == 0
    assert swarm.starved()


@pytest.mark.parametrize("attack", ["clock", attacks.MIXED])
def test_every_attack_is_committed_where_nothing_is_wrong_with_its_form(cache: Path, attack: str) -> None:
    swarm, report = run(cache, attack)
    assert report.hostile > 0
    assert swarm.ended == 0
    assert max(swarm.losses()) < 5.4


def test_a_node_whose_trainer_fails_ends_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Replica.step

    def step(self: Replica) -> None:
        if self is Kept.last.replicas.get(3):
            raise TrainerError("it broke.")
        honest(self)

    monkeypatch.setattr(Kept, "last", Kept.__new__(Kept), raising=False)
    Kept.last.replicas = {}
    monkeypatch.setattr(Replica, "step", step)
    swarm, report = run(cache)
    assert swarm.ended == 1
    assert not swarm.losses()
    assert report.paired >= 5 * SMALL.rounds * 0.8


class OneSlow(Kept):
    def add(self, donor: object = None):  # noqa: ANN201 - a SimNode
        node = super().add()
        node.replica.speed *= 12 if node.number == 3 else 1
        return node


def test_a_node_that_falls_behind_is_counted(cache: Path, calm: tuple[Kept, Report]) -> None:
    swarm, _ = run(cache, kind=OneSlow, rounds=8)
    assert swarm.behind == {3}
