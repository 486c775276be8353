"""How long a phase is, in inner steps."""

from __future__ import annotations

import random

import pytest

from nolocod.outer.phase import Phase, at_once, is_part

INNER = 25


def measured(step_seconds: float, *, enlarges: bool = True) -> Phase:
    phase = Phase(INNER, enlarges=enlarges)
    phase.follow(INNER, INNER * step_seconds)
    return phase


def fitted(phase: Phase, runs: float, lead: int = 0) -> Phase:
    """After as many phases as it takes to follow the run."""
    for _ in range(6):
        phase.fit(runs, lead)
    return phase


@pytest.mark.parametrize(
    ("step_seconds", "runs", "work"),
    [
        (1.0, 25.0, 25),
        (1.03, 25.0, 25),
        (0.5, 25.0, 50),
        (2.0, 25.0, 13),
        (1 / 8, 25.0, 200),
        (1 / 32, 25.0, 800),
        (1 / 100, 25.0, 1600),
        (8.0, 25.0, 4),
        (100.0, 25.0, 4),
        (1.0, 1e9, 1600),
        (1.0, 1e-9, 4),
    ],
)
@pytest.mark.parametrize("enlarges", [True, False])
def test_a_phase_lasts_as_long_as_the_median_machines_between_an_eighth_and_sixty_four_times_the_inner_steps(
    step_seconds: float, runs: float, work: int, *, enlarges: bool
) -> None:
    phase = fitted(measured(step_seconds, enlarges=enlarges), runs)
    work = work if enlarges else min(work, 8 * INNER)
    assert phase.steps * phase.times == work
    assert phase.seconds == pytest.approx(work * step_seconds)


def test_a_fast_machine_takes_larger_steps_rather_than_more_than_twice_as_many_in_a_row() -> None:
    phase = measured(1.0)
    found = []
    for times in (1, 1.5, 2, 2.5, 4, 6, 8):
        fitted(phase, times * INNER)
        found.append((phase.steps / INNER, phase.times))
    assert found == [(1, 1), (1.52, 1), (2, 1), (1.28, 2), (2, 2), (2, 3), (2, 4)]


def test_in_a_callers_own_loop_no_step_is_larger() -> None:
    phase = fitted(measured(1.0, enlarges=False), 8 * INNER)
    assert (phase.steps, phase.times) == (8 * INNER, 1)


def test_a_larger_step_is_no_slower_machine() -> None:
    phase = fitted(measured(1.0), 8 * INNER)
    phase.follow(2 * INNER * phase.times, 8.0 * INNER)
    assert phase.own == INNER


def test_of_a_slow_node_several_turns_go_by_in_one_inner_step() -> None:
    phase = Phase(1)
    phase.follow(1, 4.0)
    for _ in range(2):
        phase.fit(1.0, 0)
    assert (phase.steps, phase.turn) == (1, 0.25)


def taken(phase: Phase, steps: int, parts: int) -> Phase:
    phase.took(steps, parts)
    return phase


def test_after_an_outer_step_that_an_offer_brought_early_the_next_is_as_much_later() -> None:
    """Or there are more rounds, of all nodes, than the run says."""
    phase = measured(1.0)
    assert (phase.steps, phase.half) == (25, 13)
    taken(phase, 15, 1)
    assert (phase.steps, phase.half) == (35, 22)
    taken(phase, 35, 1)
    assert (phase.steps, phase.half) == (25, 13)
    taken(phase, 1, 1)
    assert (phase.steps, phase.half) == (38, 25), "by half a phase at most"
    assert phase.seconds == 25.0


def test_what_is_late_goes_together() -> None:
    phase = Phase(5, 5)
    phase.follow(5, 5.0)
    assert phase.due(4) == phase.due(0) == 1
    assert phase.due(9) == 2, "two turns have gone by, after the step under way"
    taken(phase, 9, 1)
    assert (phase.steps, phase.due(0), phase.due(5)) == (5, 1, 2), "four steps are left over"
    taken(phase, 6, 2)
    assert phase.due(4) == 1
    taken(phase, 1000, 1)
    assert phase.due(0) == 6, "all of the model is as much as there is, beside the turn under way"


def test_rounds_go_by_as_turns_do() -> None:
    """Of whoever is taken early by others, and late where all are busy."""
    phase, rng, steps, parts = Phase(3, 8), random.Random(1), 0, 0
    phase.follow(3, 0.6)
    for _ in range(200):
        done = rng.randint(phase.half, phase.steps + 4)
        count = min(phase.due(done - 1), 2)
        phase.took(done, count)
        steps, parts = steps + done, parts + count
    assert steps / 3 == pytest.approx(parts, rel=0.01)


def test_who_is_two_rounds_before_the_others_trains_longer() -> None:
    phase = measured(1.0)
    assert [phase.fit(25.0, lead) or phase.steps for lead in (-5, 0, 1, 2, 3)] == [25, 25, 25, 29, 32]


def test_a_fast_machine_comes_back_to_the_others_as_soon_as_one_like_them() -> None:
    """Phases of its own length would be nothing to them: two fast ones stayed before all others, and met each other alone."""
    phase = fitted(measured(1 / 8), 25.0, lead=9)
    assert phase.seconds == 50.0
    assert phase.wait_ahead == 8 * 25.0


def test_a_phase_is_at_most_twice_or_half_as_long_as_the_one_before() -> None:
    phase = measured(1.0)
    found = [phase.fit(runs, 0) or phase.steps * phase.times for runs in (1e9, 1e9, 1e9, 1e9, 1e-9, 1e-9)]
    assert found == [50, 100, 200, 400, 200, 100]
    assert [phase.fit(25.0, 0) or phase.steps for _ in range(2)] == [50, 25]


def test_nothing_is_fitted_before_a_step_was_timed() -> None:
    phase = Phase(INNER)
    phase.fit(1000.0, 0)
    assert (phase.own, phase.steps, phase.turn, phase.seconds) == (0, INNER, INNER, INNER)


def test_one_slow_step_is_not_the_machines_speed() -> None:
    phase = measured(1.0)
    phase.follow(1, 11.0)
    assert phase.own == pytest.approx(INNER * 1.4)


@pytest.mark.parametrize("inner", [1, 3, 8, 10, 25, 100])
def test_a_trainer_tells_of_each_step_that_a_phase_may_end_after(inner: int) -> None:
    told = [done for done in range(1, 8 * inner + 1) if is_part(done, inner)]
    phase = Phase(inner, enlarges=False)
    phase.follow(1, 1.0)
    ends = []
    for _ in range(3):
        phase.fit(0.1 * inner, 0)
    for parts in range(1, 65):
        phase.fit(parts * inner / 8, 0)
        ends.append(phase.steps)
        early = Phase(inner, enlarges=False)
        early.took(parts % inner, 1)
        assert {early.steps, early.half} <= set(told)
    assert set(ends) <= set(told)
    assert len(set(ends)) >= 0.8 * len(told), "but those near the run's `inner.steps`"


def test_those_who_lie_about_their_phases_make_nobodys_longer() -> None:
    """A quarter who tell endless ones move the median from 1 to 1.05; a third of the nodes took an eighth more."""
    longer = []
    for percent in range(80, 126):
        phase = measured(percent / 100)
        phase.fit(1.05 * INNER, 0)
        longer.append(phase.seconds > 1.06 * max(INNER, INNER * percent / 100))
    assert not any(longer)


def test_an_exchange_is_about_a_quarter_of_the_model_or_what_takes_two_seconds() -> None:
    assert [at_once(parts, 10.0, 4.0) for parts in (1, 3, 4, 5, 25)] == [1, 1, 1, 2, 7]
    assert [at_once(5, seconds, 4.0) for seconds in (0.0, 0.1, 0.4, 0.5, 0.7, 1.0)] == [5, 5, 5, 4, 2, 2]
    assert [at_once(5, 4.0, whole) for whole in (10.0, 50.0, 70.0, 100.0)] == [2, 3, 4, 5]
