"""The rest after each inner step, on a clock of the test's."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from nolocod.trainer import duty
from nolocod.trainer.duty import Duty

if TYPE_CHECKING:
    from nolocod.trainer.replica import Replica


class Clock:
    now = 100.0
    computed = 7.0
    """The thread's."""

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(duty, "perf_counter", clock)
    monkeypatch.setattr(duty, "thread_time", lambda: clock.computed)
    return clock


def replica_of(clock: Clock, seconds: float, waiting: float = 0.0, devices: int = 1) -> Replica:
    """Whose inner steps take so long, and stand in line for so long besides."""

    def step() -> None:
        clock.computed += seconds
        clock.now += seconds + waiting

    return cast("Replica", SimpleNamespace(step=step, device=SimpleNamespace(type="cpu"), devices=("cpu",) * devices))


@pytest.mark.parametrize(("share", "rest"), [(1.0, 0.0), (0.5, 2.0), (0.8, 0.5), (0.1, 18.0)])
def test_the_rest_makes_up_for_the_step(clock: Clock, share: float, rest: float) -> None:
    duty = Duty()
    duty.share = share
    assert duty.left == 0
    assert duty.step(replica_of(clock, 2.0)) == 2.0
    assert duty.left == pytest.approx(rest)
    clock.now += rest / 2
    assert duty.left == pytest.approx(rest / 2)
    clock.now += rest
    assert duty.left == 0


@pytest.mark.parametrize(("devices", "rest"), [(1, 18.0), (2, 198.0)])
def test_nothing_rests_for_the_time_in_which_others_had_the_processor(clock: Clock, devices: int, rest: float) -> None:
    """But for that in which another device computes a part of the step."""
    duty = Duty()
    duty.share = 0.1
    assert duty.step(replica_of(clock, 2.0, waiting=20.0, devices=devices)) == 22.0, "so long it took"
    assert duty.left == duty.rest == pytest.approx(rest)


def test_another_share_counts_in_the_rest_under_way(clock: Clock) -> None:
    duty = Duty()
    duty.share = 0.1
    duty.step(replica_of(clock, 2.0))
    duty.share = 0.5
    assert duty.left == pytest.approx(2.0)
    duty.share = 1.0
    assert duty.left == 0


def test_a_rest_is_cut_into_slices_in_which_others_are_looked_for(clock: Clock) -> None:
    duty = Duty()
    duty.share = 0.5
    duty.step(replica_of(clock, 2.0))
    assert 0 < duty.slice < 0.1
    clock.now += 1.99
    assert duty.slice == duty.left == pytest.approx(0.01)
    clock.now += 1.0
    assert duty.slice == 0


def test_a_card_is_asked_for_one_step_ahead_and_times_are_its_own(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for its events: it begins a step when it has done the one before, whenever it is asked."""
    busy = 0.0  # until when

    class Event:
        def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
            assert enable_timing
            assert blocking, "a core is others' meanwhile"

        def record(self) -> None:
            self.at = max(clock.now, busy)

        def synchronize(self) -> None:
            clock.now = max(clock.now, self.at)

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    def step() -> None:
        nonlocal busy
        clock.now += 0.125
        busy = max(clock.now, busy) + 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    replica = cast("Replica", SimpleNamespace(step=step, device=SimpleNamespace(type="cuda"), devices=("cuda",)))
    duty = Duty()
    assert duty.step(replica) == 0.125, "nothing is known of the card yet"
    assert clock.now == 100.125
    assert [duty.step(replica) for _ in range(3)] == [2.125, 2.0, 2.0], "the first waited for what asked for it"
    assert busy - clock.now == 2.0, "it has one more to do"
    duty.share = 0.5
    assert duty.step(replica) == 2.0
    assert busy == clock.now, "in the rest it has none"
    assert duty.left == 2.0
    duty.share = 1.0
    assert duty.step(replica) == 0.125
