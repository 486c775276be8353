"""How long a phase is, in inner steps."""

from __future__ import annotations

import pytest

from nolocod.outer.phase import Phase, is_part

INNER = 25


def measured(step_seconds: float) -> Phase:
    phase = Phase(INNER)
    phase.follow(INNER, INNER * step_seconds)
    return phase


@pytest.mark.parametrize(
    ("step_seconds", "runs", "steps"),
    [
        (1.0, 25.0, 25),
        (1.03, 25.0, 25),
        (0.5, 25.0, 50),
        (2.0, 25.0, 13),
        (1 / 8, 25.0, 200),
        (1 / 100, 25.0, 200),
        (8.0, 25.0, 4),
        (100.0, 25.0, 4),
        (1.0, 1e9, 200),
        (1.0, 1e-9, 4),
    ],
)
def test_a_phase_lasts_as_long_as_the_median_machines_between_an_eighth_and_eight_times_the_inner_steps(
    step_seconds: float, runs: float, steps: int
) -> None:
    phase = measured(step_seconds)
    for _ in range(3):
        phase.fit(runs, 0)
    assert phase.steps == steps
    assert phase.seconds == pytest.approx(steps * step_seconds)


def test_of_a_slow_node_several_turns_go_by_in_one_inner_step() -> None:
    phase = Phase(1)
    phase.follow(1, 4.0)
    for _ in range(2):
        phase.fit(1.0, 0)
    assert (phase.steps, phase.turn) == (1, 0.25)


def test_who_is_two_rounds_before_the_others_trains_longer() -> None:
    phase = measured(1.0)
    assert [phase.fit(25.0, lead) or phase.steps for lead in (-5, 0, 1, 2, 3)] == [25, 25, 25, 29, 32]


def test_a_phase_is_at_most_twice_or_half_as_long_as_the_one_before() -> None:
    phase = measured(1.0)
    assert [phase.fit(runs, 0) or phase.steps for runs in (1e9, 1e9, 1e9, 1e9, 1e-9, 1e-9)] == [50, 100, 200, 200, 100, 50]
    assert [phase.fit(25.0, 0) or phase.steps for _ in range(2)] == [25, 25]


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
    phase = Phase(inner)
    phase.follow(1, 1.0)
    ends = []
    for _ in range(3):
        phase.fit(0.1 * inner, 0)
    for parts in range(1, 65):
        phase.fit(parts * inner / 8, 0)
        ends.append(phase.steps)
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
