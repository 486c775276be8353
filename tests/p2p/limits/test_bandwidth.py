"""Rates and the month's bytes, on trio's virtual clock and a wall clock of the test's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from nolocod.errors import DataDirError
from nolocod.observe.events import Event, Traffic, Troubled
from nolocod.p2p.limits.bandwidth import Bucket, Budget, Ledger, shortfalls
from nolocod.p2p.settings import Allowance

if TYPE_CHECKING:
    from pathlib import Path

MB = 1_000_000


class Wall:
    """The time of day, as the test says."""

    def __init__(self, text: str = "2025-06-15T12:00:00") -> None:
        self.now = 0.0
        self.set(text)

    def set(self, text: str) -> None:
        self.now = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.now


class Scene:
    """A budget in a directory of its own, and what it told."""

    def __init__(self, folder: Path, allowance: Allowance) -> None:
        self.wall = Wall()
        self.path = folder / "usage.json"
        self.events: list[Event] = []
        self.ledger = Ledger(self.path, self.wall)
        self.budget = Budget(allowance, self.ledger, self.events.append)
        self.sent: list[tuple[float, str, int]] = []
        """(time, connection, bytes) of what was sent."""

    async def send(self, name: str, count: int, pieces: int) -> None:
        for _ in range(pieces):
            await self.budget.up(count)
            self.sent.append((trio.current_time(), name, count))


# --- tokens -------------------------------------------------------------------------------------------


@given(
    rate=st.integers(32_000, 10**9),
    needs=st.lists(st.tuples(st.integers(1, 70_000), st.floats(0, 0.5)), min_size=1, max_size=50),
)
@settings(max_examples=200)
def test_no_span_of_time_holds_more_than_the_rate_and_what_was_saved_up(rate: int, needs: list[tuple[int, float]]) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    sent: list[tuple[float, int]] = []
    for count, pause in needs:
        now += pause
        while (seconds := bucket.wait(count, now)) > 0:
            now += seconds
        bucket.take(count)
        sent.append((now, count))
    for first in range(len(sent)):
        total = 0
        for last in range(first, len(sent)):
            total += sent[last][1]
            span = sent[last][0] - sent[first][0]
            saved = max(0.1 * rate, sent[first][1])
            assert total <= rate * span + saved + 1e-6 * rate + 1, "bytes above the rate"


def test_a_bucket_without_a_rate_never_waits() -> None:
    bucket = Bucket(None, 0.0)
    bucket.take(10**15)
    assert bucket.wait(10**15, 0.0) == 0.0


# --- rates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_transfer_goes_at_the_rate_and_no_faster(direction: str, tmp_path: Path, autojump_clock: object) -> None:
    allowance = Allowance(up=MB) if direction == "up" else Allowance(down=MB)
    budget = Scene(tmp_path, allowance).budget
    began = trio.current_time()
    for _ in range(100):
        await (budget.up(50_000) if direction == "up" else budget.down(50_000))
    took = trio.current_time() - began
    assert took == pytest.approx(5.0, rel=0.05)
    assert took >= 5.0 - 0.1 - 1e-9, "no more than a tenth of a second was saved up"


async def test_directions_do_not_hinder_each_other(tmp_path: Path, autojump_clock: object) -> None:
    budget = Scene(tmp_path, Allowance(up=MB)).budget
    began = trio.current_time()
    await budget.down(100 * MB)
    assert trio.current_time() == began


async def test_without_limits_nothing_waits_and_all_is_counted(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance())
    began = trio.current_time()
    await scene.budget.up(100 * MB)
    await scene.budget.down(200 * MB)
    assert trio.current_time() == began
    assert (scene.budget.sent, scene.budget.received, scene.ledger.used) == (100 * MB, 200 * MB, (100 * MB, 200 * MB))
    assert scene.budget.piece(1 << 20) == 1 << 20
    assert not scene.budget.spent


async def test_connections_take_turns_and_a_heartbeat_waits_for_one_piece_each(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance(up=MB))
    piece = scene.budget.piece(1 << 20)
    assert piece == 50_000
    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(scene.send, name, piece, 40)
        await trio.sleep(1.01)
        began = trio.current_time()
        await scene.send("heartbeat", 300, 1)
        assert trio.current_time() - began <= 3 * 0.05 + 0.001
    turns = [name for _, name, _ in scene.sent if name != "heartbeat"]
    for start in range(0, len(turns), 3):
        assert set(turns[start : start + 3]) == set("abc")


async def test_pieces_get_smaller_when_many_wait(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance(up=MB, down=10 * MB))
    async with trio.open_nursery() as nursery:
        for name in "abcd":
            nursery.start_soon(scene.send, name, 400_000, 1)
        await trio.sleep(0.001)
        assert scene.budget.piece(1 << 20) == 50_000 // 4, "one has its turn, three wait"
        assert scene.budget.piece(100) == 100


async def test_what_is_cancelled_while_it_waits_is_not_paid(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance(up=MB))
    await scene.budget.up(100_000)  # all that was saved up
    with trio.move_on_after(0.5):
        await scene.budget.up(10 * MB)
    assert scene.budget.sent == 100_000
    began = trio.current_time()
    await scene.budget.up(100_000)
    assert trio.current_time() == began, "the tokens of the wait were not lost"


async def test_what_came_is_counted_though_the_wait_for_it_is_cancelled(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance(down=MB))
    with trio.move_on_after(0.5):
        await scene.budget.down(10 * MB)
    assert scene.budget.received == 10 * MB
    began = trio.current_time()
    await scene.budget.down(1)
    assert trio.current_time() - began == pytest.approx(9.4, rel=0.01)


# --- the month ----------------------------------------------------------------------------------------


async def test_the_reserve_is_for_heartbeats_and_beyond_the_budget_nothing_is_sent(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, Allowance(monthly=100 * MB))
    await scene.budget.up(50 * MB)
    await scene.budget.down(48 * MB - 1)
    assert not scene.budget.spent
    await scene.budget.down(1)
    assert scene.budget.spent
    began = trio.current_time()
    await scene.budget.up(MB)
    assert trio.current_time() == began, "heartbeats go on"
    with trio.move_on_after(3600) as scope:
        await scene.budget.up(MB + 1)
    assert scope.cancelled_caught
    assert scene.ledger.total == 99 * MB


async def test_no_exchange_begins_that_the_month_would_not_let_us_finish(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance(monthly=100 * MB))
    scene.budget.keep_back(10 * MB)
    await scene.budget.up(79 * MB - 1)
    assert not scene.budget.spent
    await scene.budget.up(1)
    assert scene.budget.spent, "21 MB are 10 MB each way, and what sealing adds"
    scene.budget.keep_back(1)
    assert scene.budget.spent, "the greater reserve stays"


@pytest.mark.parametrize(
    ("allowance", "says"),
    [
        (Allowance(), []),
        (Allowance(up=2 * MB, down=2 * MB, monthly=1000 * MB), []),
        (Allowance(up=MB, down=2 * MB), ["at --max-upload an exchange takes 400 s, and partners wait 300 s: 11.2Mbit do."]),
        (Allowance(down=MB), ["at --max-download an exchange takes 400 s, and partners wait 300 s: 11.2Mbit do."]),
        (Allowance(monthly=839 * MB), ["--monthly-budget is less than one exchange, 0.84 GB: this node only rests."]),
    ],
)
def test_limits_in_which_no_exchange_fits_are_told(allowance: Allowance, says: list[str]) -> None:
    assert shortfalls(allowance, 400 * MB, 300.0) == says


async def test_with_the_month_the_wait_ends(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance(monthly=MB))
    await scene.budget.up(MB)
    assert scene.budget.spent
    assert scene.budget.seconds_left == pytest.approx(15.5 * 86_400)

    async def turn_the_page() -> None:
        await trio.sleep(1000)
        scene.wall.set("2025-07-01T00:00:01")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn_the_page)
        await scene.budget.up(1000)
    assert not scene.budget.spent
    assert (scene.ledger.name, scene.ledger.total) == ("2025-07", 1000)


def test_a_year_ends_too(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "usage.json", Wall("2025-12-31T23:59:00"))
    assert (ledger.name, ledger.seconds_left()) == ("2025-12", 60.0)


def test_the_count_outlives_the_process(tmp_path: Path) -> None:
    path, wall = tmp_path / "usage.json", Wall()
    ledger = Ledger(path, wall)
    ledger.add(3, 4)
    ledger.save()
    assert Ledger(path, wall).used == (3, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["usage.json"]


@pytest.mark.parametrize("back", ["1970-01-01T00:00:00", "2025-05-31T23:59:00", "2025-06-01T00:00:00"])
def test_a_clock_that_jumps_back_forgives_nothing(back: str, tmp_path: Path) -> None:
    path, wall = tmp_path / "usage.json", Wall()
    ledger = Ledger(path, wall)
    ledger.add(100, 0)
    ledger.save()
    for one in (ledger, Ledger(path, wall)):  # while it runs, and over a restart
        wall.set(back)
        assert one.total >= 100
        one.add(1, 0)
        wall.set("2025-06-15T12:00:00")
        assert one.total == 101, "and what was moved meanwhile is counted"


def test_a_clock_that_was_once_far_ahead_does_not_stop_the_months(tmp_path: Path) -> None:
    wall = Wall()
    ledger = Ledger(tmp_path / "usage.json", wall)
    ledger.add(100, 0)
    wall.set("2040-01-01T00:00:00")
    ledger.add(1, 0)
    wall.set("2025-06-20T00:00:00")
    assert ledger.total == 100
    wall.set("2025-07-01T00:00:00")
    assert (ledger.name, ledger.total) == ("2025-07", 0)


def test_old_months_are_forgotten(tmp_path: Path) -> None:
    wall = Wall()
    ledger = Ledger(tmp_path / "usage.json", wall)
    for year in range(2025, 2060):
        wall.set(f"{year}-03-01T00:00:00")
        ledger.add(1, 0)
    ledger.save()
    assert ledger.total == 1
    assert (tmp_path / "usage.json").read_text().count("up") == 12


@pytest.mark.parametrize("content", ["", "{", '{"2025-13":{}}', '{"2025-06":{"up":-1}}', '{"2025-06":{"upp":1}}', "[]"])
def test_a_damaged_count_is_an_error_and_not_a_fresh_start(content: str, tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    path.write_text(content)
    with pytest.raises(DataDirError, match=r"usage\.json"):
        Ledger(path)


def test_the_count_is_due_soon_and_not_for_every_record(tmp_path: Path) -> None:
    wall = Wall()
    ledger = Ledger(tmp_path / "usage.json", wall)
    wall.now += 1000
    assert not ledger.due, "nothing to write"
    ledger.add(1, 0)
    ledger.save()
    ledger.add(1000, 0)
    assert not ledger.due
    wall.now += 60
    assert ledger.due
    ledger.save()
    assert not ledger.due
    ledger.add(0, 16 << 20)
    assert ledger.due
    ledger.save()
    ledger.add(1, 0)
    wall.now -= 1
    assert ledger.due, "a clock that was set back says nothing about how long it was"


async def test_what_is_due_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, Allowance())
    saved = trio.Event()
    save = scene.ledger.save

    def save_and_tell() -> None:
        save()
        trio.from_thread.run_sync(saved.set)

    monkeypatch.setattr(scene.ledger, "save", save_and_tell)
    await scene.budget.down(17 << 20)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.budget.run)
        with trio.fail_after(60):
            await saved.wait()
        nursery.cancel_scope.cancel()
    assert Ledger(scene.path, scene.wall).used == (0, 17 << 20)


async def test_a_disk_that_fails_is_told_and_costs_nothing_else(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance())
    scene.path.mkdir()
    await scene.budget.up(1)
    await scene.budget.save()
    assert [type(event) for event in scene.events] == [Troubled]


# --- what is told -------------------------------------------------------------------------------------


async def test_traffic_is_told_while_there_is_some(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, Allowance())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.budget.run)
        for _ in range(10):
            await trio.sleep(1)
            await scene.budget.up(1000)
        await trio.sleep(0.5)
        told = [event for event in scene.events if isinstance(event, Traffic)]
        assert told[-1].sending == pytest.approx(1000, rel=0.25)
        await trio.sleep(20)
        told = [event for event in scene.events if isinstance(event, Traffic)]
        assert (told[-1].sent, told[-1].sending, told[-1].month, told[-1].month_sent) == (10_000, 0.0, "2025-06", 10_000)
        assert len(told) < 20, "a line at rest is not news"
        nursery.cancel_scope.cancel()
