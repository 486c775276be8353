"""Membership where nobody holds everybody: hundreds of nodes, the product's own logic, a clock that is modelled.

What is asserted here is what docs/membership.md reports; `python -m tools.membership` prints its tables.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.identity import Identity
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.timing import Timing
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from nolocod.studies.sim import clock
from nolocod.studies.sim.member import WALL
from tests.support.gossip_swarm import CALM, Checks, Member, chi_square, gossip_swarm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nolocod.identity import PeerId


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


def simulated(test: Callable[[Checks], Awaitable[None]]) -> Callable[[Checks], None]:
    """Run the test on the virtual clock, the same each time."""

    @functools.wraps(test)
    def run(checks: Checks) -> None:
        clock.run(lambda: test(checks), seed=0)

    return run


async def cost(checks: Checks, count: int, warm: float, seconds: float) -> tuple[float, float]:
    """Bytes sent and signatures checked, per node and second."""
    async with gossip_swarm(CALM) as swarm:
        members = swarm.add(count)
        await trio.sleep(warm)
        sent, checked = sum(member.port.sent for member in members), checks.count
        await trio.sleep(seconds)
        return (
            (sum(member.port.sent for member in members) - sent) / seconds / count,
            (checks.count - checked) / seconds / count,
        )


@simulated
async def test_what_a_node_sends_and_checks_does_not_grow_with_the_swarm(checks: Checks) -> None:
    figures = [await cost(checks, count, 24.0, seconds) for count, seconds in ((50, 96.0), (200, 24.0), (800, 12.0))]
    sent, checked = [one for one, _ in figures], [one for _, one in figures]
    assert max(sent) <= 1.2 * min(sent)
    assert max(sent) <= 1000.0, "as much comes in: 2 kB/s in all"
    assert max(checked) <= 4.0


@simulated
async def test_small_swarms_cost_as_little(checks: Checks) -> None:
    for count in (3, 8, 16, 24):
        sent, checked = await cost(checks, count, 60.0, 60.0)
        assert sent <= 1400.0
        assert checked <= 3.0


@simulated
async def test_in_a_small_swarm_a_newcomer_is_known_within_seconds_and_one_that_vanished_is_gone_within_thirty(
    checks: Checks,
) -> None:
    for count in (4, 9, 16):
        async with gossip_swarm() as swarm:
            old = swarm.add(count - 1)
            await trio.sleep(200.0)
            assert all(len(member.live()) == count - 2 for member in old)
            (newcomer,) = swarm.add(1, old[:1])
            await trio.sleep(3.0)
            assert all(newcomer.peer_id in member.table for member in old)
            assert len(newcomer.live()) == count - 1
            await trio.sleep(60.0)
            newcomer.kill()
            assert await swarm.seconds_until_gone([newcomer], 1.0, 40.0) <= 32.0


@simulated
async def test_whom_partner_draws_hit_is_nearly_uniform_and_views_change(checks: Checks) -> None:
    timing = replace(CALM, capacity=128)  # less than there are
    async with gossip_swarm(timing, seed=1) as swarm:
        members = swarm.add(200)
        await trio.sleep(150.0)
        before = {member.peer_id: set(member.live()) for member in members}
        degrees = swarm.in_degrees()
        assert statistics.mean(len(view) for view in before.values()) >= 0.9 * timing.capacity
        assert max(len(view) for view in before.values()) == timing.capacity
        assert statistics.pstdev(degrees.values()) <= 0.16 * statistics.mean(degrees.values()), "at first; 0.11 later"
        drawn = await swarm.drawn(rounds=8, every=12.0)
        assert drawn.total() == 1600
        assert set(drawn) <= set(swarm.by_peer)
        statistic, _ = chi_square(drawn, members)
        uneven = math.sqrt(max(0.0, statistic / (len(members) - 1) - 1) * len(members) / drawn.total())
        assert uneven <= 0.25, (
            "the spread of the chances to be drawn; not even, since members that are verified keep their place"
        )
        changed = [len(before[member.peer_id] - set(member.live())) for member in members]
        assert statistics.mean(changed) >= 0.25 * timing.capacity, "36 % where the two are drawn from 200 independently"


def _tries(member: Member, gone: set[PeerId]) -> int:
    """How many partners `member` draws until one is alive; those that are not it finds out of reach, and suspects."""
    for number in range(1, 100):
        partner = member.draw()
        if partner is not None and partner not in gone:
            return number
        if partner is not None:
            member.suspect(partner)
    pytest.fail("no live partner")


@simulated
async def test_half_the_swarm_gone_within_a_minute(checks: Checks) -> None:
    async with gossip_swarm(CALM, seed=2) as swarm:
        members = swarm.add(200)
        await trio.sleep(60.0)
        dead = members[0:200:2]  # the bootstrap among them
        for start in range(0, 100, 20):
            for member in dead[start : start + 20]:
                member.kill()
            await trio.sleep(12.0)
        survivors, gone = swarm.live(), {member.peer_id for member in dead}
        tries = [_tries(member, gone) for member in survivors]
        assert statistics.mean(tries) <= 3.0, "two, where half of those that one knows are dead"
        assert max(tries) <= 16
        await swarm.seconds_until_gone(dead, 10.0, 200.0)
        (newcomer,) = swarm.add(1, survivors[:1])
        await trio.sleep(60.0)
        assert len(newcomer.live()) >= 60
        degrees = swarm.in_degrees()
        assert degrees[newcomer.peer_id] >= 20
        assert min(degrees.values()) >= 20, "nobody is forgotten"


@simulated
async def test_two_parts_that_meet_once_are_one_swarm_again(checks: Checks) -> None:
    async with gossip_swarm(seed=3) as swarm:
        left, right = swarm.add(12), swarm.add(12, side=1)
        await trio.sleep(120.0)
        assert all(set(member.live()) <= {one.peer_id for one in left} for member in left)
        for member in right:
            member.port.side = 0
        assert await left[3].swap(right[7].peer_id)
        await trio.sleep(30.0)
        assert all(len(member.live()) == 23 for member in swarm.live())
        assert 1 <= len(swarm.healed) <= 24
        assert {event.peer_id for event in swarm.healed} & {left[3].peer_id, right[7].peer_id}
        assert all(event.members >= 2 for event in swarm.healed)


@simulated
async def test_a_swarm_that_never_fell_apart_has_nothing_to_heal(checks: Checks) -> None:
    async with gossip_swarm(replace(CALM, capacity=32), seed=4) as swarm:
        swarm.add(80)
        await trio.sleep(150.0)
        swarm.add(10, swarm.live()[:3])
        await trio.sleep(30.0)
        assert swarm.healed == []


@simulated
async def test_a_node_that_rests_beats_more_slowly_and_is_still_known(checks: Checks) -> None:
    async with gossip_swarm(seed=5) as swarm:
        members = swarm.add(5)
        members[1].state = "paused"
        await trio.sleep(100.0)
        sent = [member.port.sent for member in members]
        for _ in range(10):
            await trio.sleep(20.0)
            assert all(members[1].peer_id in member.table for member in members if member is not members[1])
        spent = [member.port.sent - before for member, before in zip(members, sent, strict=True)]
        assert spent[1] < 0.85 * statistics.mean(spent[number] for number in (0, 2, 3, 4))


class Flood:
    """A member with any number of keys of its own."""

    def __init__(self, run_id: str, wall: float) -> None:
        self.identities = [Identity.generate() for _ in range(200)]
        self.run_id = run_id
        self.wall = wall

    def message(self, start: int) -> pb.Gossip:
        beats = [
            OwnHeartbeat(identity, self.run_id, lambda: (Standing(5, 0, 0.0), "training"), tuple, lambda: self.wall).heartbeat()
            for identity in self.identities[start : start + 40]
        ]
        return pb.Gossip(heartbeats=beats)


@simulated
async def test_one_that_floods_its_friends_fills_no_view(checks: Checks) -> None:
    async with gossip_swarm(replace(CALM, capacity=32), seed=6) as swarm:
        members = swarm.add(40)
        await trio.sleep(60.0)
        victim, flood = members[5], Flood(swarm.run_id, WALL + trio.current_time())
        friends, source = {identity.peer_id for identity in flood.identities}, members[9].peer_id
        before = checks.count
        for start in range(0, 200, 40):
            victim.gossip.learn(source, flood.message(start), trio.current_time())
        brought = friends.intersection(victim.live())
        assert brought
        assert len(brought) <= Timing().view // 2 + 1, "per beat"
        assert checks.count - before <= len(brought)


def test_what_one_source_says_is_looked_at_so_many_times_a_beat(checks: Checks) -> None:
    me, timing = Identity.generate(), Timing()
    own_heartbeat = OwnHeartbeat(me, "ab" * 32, lambda: (Standing(0, 0, 0.0), "training"), tuple, lambda: 1e9)
    table = Membership(me.peer_id, "ab" * 32, timing)
    gossip = Gossip(table, own_heartbeat, random.Random(0))
    source, rubbish = Identity.generate().peer_id, pb.Gossip(heartbeats=[b"rubbish"] * 60)
    faults = [gossip.learn(source, rubbish, 1.0).faults for _ in range(10)]
    assert faults[0] == timing.view + 1
    assert sum(faults) == 3 * (timing.view + 1)
    gossip.beat(2.0)
    assert gossip.learn(source, rubbish, 2.0).faults == timing.view + 1, "the next beat is another"
