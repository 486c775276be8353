"""Inner steps of half a minute and of minutes, and lines that are cut for two: exchanges commit, and nobody is blamed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.errors import PeerTooSlowError
from nolocod.p2p.exchange.progress import Pace
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.proto.envelope import standing_from_wire, standing_to_wire
from nolocod.proto.limits import SLOWEST_STEP, Limits
from nolocod.proto.types import Accept, Standing
from tests.p2p.exchange.test_service import CHUNK, _threads_inline, pair
from tests.support.sim_net import Cut

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.proto.types import Ended
    from tests.p2p.exchange.test_service import Node

__all__ = ["_threads_inline"]

LIMITS = Limits(chunk_bytes=CHUNK)


async def exchange(alice: Node, bob: Node, steps: tuple[float, float]) -> Ended:
    """Alice offers to Bob; each part of their trainers takes the seconds of one inner step, and a second one under way."""
    for node, step in zip((alice, bob), steps, strict=True):
        node.local_side.phase = 25 * max(step, max(steps) / 8)
        node.local_side.snapshot_seconds = node.local_side.inspect_seconds = 2 * step
    bob.reception.answer = Accept(Standing(4, 40, 2.0, steps[1]))
    ended = await alice.exchange_service.offer(bob.peer_id, Standing(3, 30, 2.5, steps[0]), 0, alice.local_side)
    await bob.reception.told.wait()
    return ended


@pytest.mark.parametrize("steps", [(30.0, 30.0), (200.0, 200.0), (0.1, 200.0), (200.0, 0.1), (0.1, 30.0), (300.0, 300.0)])
async def test_an_exchange_commits_however_long_inner_steps_take(
    tmp_path: Path, virtual_clock: object, steps: tuple[float, float]
) -> None:
    """Where they took more than 16 s none did, and the partner that worked was blamed."""
    async with pair(tmp_path, LIMITS) as (alice, bob, _):
        ended = await exchange(alice, bob, steps)
    assert (ended.outcome, ended.reason) == ("committed", "")
    assert bob.reception.over[0].outcome == "committed"
    assert {conduct for _, conduct in (*alice.judged, *bob.judged)} == {Conduct.COMMITTED}


@pytest.mark.parametrize(("phase", "most"), [(100.0, 100.0), (1e5, 3 * SLOWEST_STEP)])
async def test_a_step_is_waited_for_three_times_or_a_phase_and_no_more(
    tmp_path: Path, virtual_clock: object, phase: float, most: float
) -> None:
    """Who stalls says of itself what it likes: up to a bound it is believed, and then blamed."""
    async with pair(tmp_path, LIMITS) as (alice, bob, _):
        bob.local_side.snapshot_seconds = math.inf
        bob.reception.answer = Accept(Standing(4, 40, 2.0, 1e9))
        alice.local_side.phase = phase
        began = trio.current_time()
        ended = await alice.offer(bob)
        took = trio.current_time() - began
    assert ended.outcome == "aborted"
    assert alice.judged == [(bob.peer_id, Conduct.WITHHELD)]
    assert most < took < most + LIMITS.accept_seconds + 5


@pytest.mark.parametrize("credit", [0.0, 0.25])
async def test_where_time_was_lost_a_partners_word_counts_for_nothing_and_a_newcomers_for_less_and_it_has_no_blame(
    tmp_path: Path, virtual_clock: object, credit: float
) -> None:
    async with pair(tmp_path, LIMITS) as (alice, bob, _):
        alice.local_side.credit = credit
        began = trio.current_time()
        ended = await exchange(alice, bob, (0.1, 250.0))
        took = trio.current_time() - began
    assert ended.outcome == "aborted"
    assert took < max(120, credit * 25 * 250 / 8) + LIMITS.accept_seconds + 5
    assert alice.judged == []


def test_how_long_a_partner_is_waited_for_follows_from_its_steps_and_ours() -> None:
    waits = {
        steps: Limits().paced(300.0, 0, steps).snapshot_seconds for steps in ((0.1, 0.0), (60.0, 0.0), (0.1, 70.0), (0.1, 1e9))
    }
    assert waits == {(0.1, 0.0): 120.0, (60.0, 0.0): 180.0, (0.1, 70.0): 210.0, (0.1, 1e9): 300.0}
    assert [Limits().paced(300.0, 0, (0.1, 1e9), credit).settle_seconds for credit in (0.0, 0.25, 1.0)] == [60.0, 75.0, 300.0]
    assert Limits().paced(1e6, 0, (0.1, 1e9)).settle_seconds == 3 * SLOWEST_STEP
    assert Limits().paced(10.0, 0, (30.0, 200.0), wary=True).settle_seconds == 60.0
    assert Limits().paced(10.0, 1_000_000_000).snapshot_seconds == 220.0
    assert Limits().paced(10.0, 3_500_000_000).snapshot_seconds == 720.0


@pytest.mark.parametrize("told", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_a_steps_seconds_that_cannot_be_count_as_not_told(told: float) -> None:
    assert standing_from_wire(standing_to_wire(Standing(1, 2, 3.0, told))).step_seconds == 0.0
    assert standing_from_wire(standing_to_wire(Standing(1, 2, 3.0, 30.0))).step_seconds == 30.0


# --- lines that are cut, and slow ones --------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [20.0, 120.0])
async def test_a_large_exchange_outlives_a_line_that_is_cut_for_minutes(
    tmp_path: Path, virtual_clock: object, cut: float
) -> None:
    """What came is worth waiting for as long as all of it again would take; a small one is not."""
    limits = Limits(chunk_bytes=CHUNK, slowest_rate=10.0)
    async with pair(tmp_path, limits, (Cut(0, "out", 3000),)) as (alice, bob, net):

        async def repair() -> None:
            await trio.sleep(cut)
            net.down = lambda _: False

        net.down = lambda _: bool(net.lines)
        net.nursery.start_soon(repair)
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended.outcome == bob.reception.over[0].outcome == "committed"
    assert {conduct for _, conduct in (*alice.judged, *bob.judged)} == {Conduct.COMMITTED}
    assert Limits().resume(1_000_000) == Limits().resume_seconds
    assert Limits().resume(62_500_000) == Limits().longest_resume_seconds


async def moving(rate: float, size: int, *, up: bool = True) -> float:
    """Seconds until a partner that has described, and whose chunks come with `rate` bytes a second, is found too slow."""
    pace, began = Pace(Limits(), size, lambda: up), trio.current_time()
    pace.described.set()
    prepared = trio.Event()
    prepared.set()

    async def move() -> None:
        while True:
            await trio.sleep(10.0)
            pace.move(int(10 * rate))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move)
        with trio.move_on_after(3 * Limits().whole(size)) as scope:
            with pytest.raises(PeerTooSlowError) if up else nullcontext() as raised:
                await pace.watch(prepared)
            assert raised is None or raised.type is PeerTooSlowError, "a slow line is no fault"
        assert scope.cancelled_caught is not up
        nursery.cancel_scope.cancel()
    return trio.current_time() - began


async def test_a_slow_line_has_the_time_that_its_bytes_take_and_a_trickle_not_for_ever(virtual_clock: object) -> None:
    size = 3_500_000_000
    assert Limits().whole(size) > size / (5e6 / 8 / 4), "a line of 5 Mbit/s, shared with three others"
    took = await moving(20_000, size)
    assert Limits().whole(size) < took < Limits().whole(size) + 20
    assert await moving(0, size, up=False) == 3 * Limits().whole(size), "no stream is up: that has a bound of its own"
