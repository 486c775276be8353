"""The rest after each inner step, on a clock of the test's."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from nolocod.trainer import duty, pipe
from nolocod.trainer.duty import Duty

if TYPE_CHECKING:
    from nolocod.trainer.replica import Replica


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(duty, "perf_counter", clock)
    return clock


def replica_of(clock: Clock, seconds: float) -> Replica:
    """Whose inner steps take so long."""

    def step() -> None:
        clock.now += seconds

    return cast("Replica", SimpleNamespace(step=step, device=SimpleNamespace(type="cpu")))


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


def test_another_share_counts_in_the_rest_under_way(clock: Clock) -> None:
    duty = Duty()
    duty.share = 0.1
    duty.step(replica_of(clock, 2.0))
    duty.share = 0.5
    assert duty.left == pytest.approx(2.0)
    duty.share = 1.0
    assert duty.left == 0


def test_what_is_asked_for_is_taken_at_once(clock: Clock) -> None:
    duty, requests = Duty(), cast("SimpleQueue[Any]", SimpleQueue())
    with pytest.raises(Empty):
        duty.next(requests, wait=False)
    request = pipe.Request(1, pipe.Train())
    for wait in (True, False):
        requests.put(request)
        assert duty.next(requests, wait=wait) is request
