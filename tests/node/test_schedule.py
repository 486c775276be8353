"""When a node may train: hours, battery, the month; on clocks of the test's."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.node.schedule import PausePolicy, month_spent, open_at, opens_in, outside_hours
from nolocod.observe.events import Event, Paused, Resumed, StateChanged
from nolocod.units import Hours

if TYPE_CHECKING:
    from collections.abc import Iterator

NIGHT = Hours.parse("22:00-07:00", "--hours")
NOON = Hours.parse("12:00-13:30", "--hours")


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks go forward on 2025-03-30 at 02:00, and back on 2025-10-26 at 03:00."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


def local(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("2025-06-15T21:59:59", False),
        ("2025-06-15T22:00:00", True),
        ("2025-06-16T00:00:00", True),
        ("2025-06-16T06:59:59", True),
        ("2025-06-16T07:00:00", False),
        ("2025-06-16T12:00:00", True),
        ("2025-06-16T13:30:00", False),
    ],
)
def test_hours_begin_and_end_to_the_minute(text: str, is_open: bool, berlin: None) -> None:
    assert open_at([NIGHT, NOON], local(text)) == is_open


def test_the_next_opening_is_told(berlin: None) -> None:
    assert opens_in([NIGHT, NOON], local("2025-06-15T07:00:00")) == 5 * 3600
    assert opens_in([NIGHT, NOON], local("2025-06-15T13:30:00")) == 8.5 * 3600
    assert opens_in([NOON], local("2025-06-15T13:30:00")) == 22.5 * 3600


@pytest.mark.parametrize(
    ("span", "now", "hours"),
    [
        ("22:00-07:00", "2025-03-29T20:00:00", 2.0),
        ("04:00-05:00", "2025-03-30T01:00:00", 2.0),  # the hour from 2 to 3 is not there
        ("04:00-05:00", "2025-10-26T01:00:00", 4.0),  # and here it is there twice
        ("02:30-04:00", "2025-03-30T01:00:00", 1.5),  # begins at 03:30 by the new time
    ],
)
def test_where_the_clocks_change_the_time_on_the_wall_counts(span: str, now: str, hours: float, berlin: None) -> None:
    assert opens_in([Hours.parse(span, "--hours")], local(now)) == hours * 3600


def test_outside_of_its_hours_a_node_pauses_and_says_until_when(berlin: None) -> None:
    now = local("2025-06-15T07:00:00")
    check = outside_hours(lambda: [NIGHT, NOON], lambda: now)
    assert check() == Paused("hours", "outside of --hours 22:00-07:00, 12:00-13:30", 5 * 3600)
    now += 5 * 3600
    assert check() is None
    assert outside_hours(tuple, lambda: now + 9 * 3600)() is None, "no hours are all"


def test_a_month_that_is_spent_pauses_until_its_end() -> None:
    spent = False
    check = month_spent(lambda: spent, lambda: 3600.0)
    assert check() is None
    spent = True
    pause = check()
    assert pause is not None
    assert (pause.reason, pause.seconds) == ("budget", 3600.0)
    assert "--monthly-budget" in pause.why


# --- the policy ---------------------------------------------------------------------------------------


class Scene:
    """A policy with two reasons that the test sets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.first: Paused | None = None
        self.second: Paused | None = None
        self.policy = PausePolicy([lambda: self.first, lambda: self.second], self.events.append)


HOURS = Paused("hours", "outside", 3600.0)
BATTERY = Paused("battery", "unplugged", None)


async def test_a_pause_begins_and_ends_by_itself(autojump_clock: object) -> None:
    scene = Scene()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.policy.run)
        await scene.policy.wait_resumed()
        began = trio.current_time()
        scene.first = HOURS
        await scene.policy.wait_paused()
        assert trio.current_time() - began <= 1.0
        assert scene.policy.pause == HOURS
        scene.first = None
        await scene.policy.wait_resumed()
        assert trio.current_time() - began <= 2.0
        nursery.cancel_scope.cancel()
    assert scene.events == [HOURS, Resumed()]


async def test_the_first_reason_counts_and_another_one_keeps_it_paused(autojump_clock: object) -> None:
    scene = Scene()
    scene.first, scene.second = HOURS, BATTERY
    scene.policy.look()
    scene.first = None
    scene.policy.look()
    assert scene.policy.pause == BATTERY
    scene.second = None
    scene.policy.look()
    assert scene.events == [HOURS, BATTERY, Resumed()]


async def test_who_wants_the_machine_now_is_told_from_who_can_wait(autojump_clock: object) -> None:
    scene = Scene()
    scene.first = HOURS
    urgent: list[float] = []

    async def wait() -> None:
        await scene.policy.wait_urgent()
        urgent.append(trio.current_time() - began)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.policy.run)
        nursery.start_soon(wait)
        await trio.sleep(10.5)
        assert urgent == []
        scene.first = Paused("used", "somebody plays", 600.0)
        await trio.sleep(1)
        assert urgent == [pytest.approx(11)]
        nursery.cancel_scope.cancel()


async def test_a_rest_ends_with_the_pause_or_with_a_stop(autojump_clock: object) -> None:
    scene, stop = Scene(), trio.Event()
    assert await scene.policy.rest(stop)
    assert scene.events == []
    scene.first = HOURS
    scene.policy.look()
    with trio.move_on_after(10) as waited:
        await scene.policy.rest(stop)
    assert waited.cancelled_caught
    assert scene.events == [HOURS, StateChanged("paused")]
    stop.set()
    assert not await scene.policy.rest(stop)


async def test_a_pause_is_told_again_only_if_its_end_moved(autojump_clock: object) -> None:
    scene = Scene()
    scene.first = HOURS
    scene.policy.look()
    await trio.sleep(100)
    scene.first = Paused("hours", "outside", 3500.0)
    scene.policy.look()
    assert scene.events == [HOURS]
    scene.first = Paused("hours", "outside", 7200.0)  # somebody set the clock
    scene.policy.look()
    assert scene.events == [HOURS, scene.first]


def test_without_checks_nothing_pauses() -> None:
    async def main() -> None:
        policy = PausePolicy([], pytest.fail)
        policy.look()
        await policy.wait_resumed()

    trio.run(main)
