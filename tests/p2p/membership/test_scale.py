"""Membership where nobody holds everybody: hundreds of nodes, the product's own logic, a clock that is modelled.

What is asserted here is what docs/membership.md reports; `python tools/membership.py` prints its tables.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nolocod.identity import Identity
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.timing import Timing
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from tests.support.modelled_swarm import CALM, Checks, Node, Swarm, chi_square, draw, seconds_until_gone

if TYPE_CHECKING:
    from nolocod.identity import PeerId


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


def cost(checks: Checks, count: int, warm: float, seconds: float, timing: Timing = CALM) -> tuple[float, float]:
    """Bytes sent and signatures checked, per node and second."""
    swarm = Swarm(timing)
    swarm.add(count)
    swarm.run(warm)
    sent, checked = sum(node.sent for node in swarm.live()), checks.count
    swarm.run(seconds)
    return (
        (sum(node.sent for node in swarm.live()) - sent) / seconds / count,
        (checks.count - checked) / seconds / count,
    )


def test_what_a_node_sends_and_checks_does_not_grow_with_the_swarm(checks: Checks) -> None:
    figures = [cost(checks, count, 24.0, seconds) for count, seconds in ((50, 96.0), (200, 24.0), (800, 12.0))]
    sent, checked = [one for one, _ in figures], [one for _, one in figures]
    assert max(sent) <= 1.2 * min(sent)
    assert max(sent) <= 1000.0, "as much comes in: 2 kB/s in all"
    assert max(checked) <= 4.0


def test_small_swarms_cost_as_little(checks: Checks) -> None:
    for count in (3, 8, 16, 24):
        sent, checked = cost(checks, count, 60.0, 60.0)
        assert sent <= 1400.0
        assert checked <= 3.0


def test_in_a_small_swarm_a_newcomer_is_known_within_seconds_and_one_that_vanished_is_gone_within_thirty(
    checks: Checks,
) -> None:
    for count in (4, 9, 16):
        swarm = Swarm()
        old = swarm.add(count - 1)
        swarm.run(200.0)
        assert all(len(node.table.live(swarm.now)) == count - 2 for node in old)
        (newcomer,) = swarm.add(1, old[:1])
        swarm.run(3.0)
        assert all(newcomer.peer_id in node.table for node in old)
        assert len(newcomer.table.live(swarm.now)) == count - 1
        swarm.run(60.0)
        swarm.kill([newcomer])
        assert seconds_until_gone(swarm, {newcomer.peer_id}, 1.0, 40.0) <= 32.0


def test_whom_partner_draws_hit_is_uniform_and_views_change(checks: Checks) -> None:
    swarm = Swarm(CALM, seed=1)
    nodes = swarm.add(200)
    swarm.run(150.0)
    before = {node.peer_id: {member.peer_id for member in node.table.live(swarm.now)} for node in nodes}
    degrees = swarm.in_degrees()
    assert statistics.mean(len(view) for view in before.values()) >= 0.9 * CALM.capacity
    assert max(len(view) for view in before.values()) == CALM.capacity
    assert statistics.pstdev(degrees.values()) <= 0.15 * statistics.mean(degrees.values())
    drawn = draw(swarm, rounds=8, every=12.0)
    assert drawn.total() == 1600
    assert set(drawn) <= set(swarm.nodes)
    _, deviations = chi_square(drawn, nodes)
    assert deviations < 2.33, "p > 0.01"
    changed = [len(before[node.peer_id] - {member.peer_id for member in node.table.live(swarm.now)}) for node in nodes]
    assert statistics.mean(changed) >= 0.25 * CALM.capacity, "36 % where the two are drawn from 200 independently"


def _tries(node: Node, gone: set[PeerId]) -> int:
    """How many partners `node` draws until one is alive; those that are not it finds out of reach, and suspects."""
    for number in range(1, 100):
        partner = node.draw()
        if partner is not None and partner not in gone:
            return number
        if partner is not None:
            node.table.suspect(partner, node.swarm.now)
    pytest.fail("no live partner")


def test_half_the_swarm_gone_within_a_minute(checks: Checks) -> None:
    swarm = Swarm(CALM, seed=2)
    nodes = swarm.add(200)
    swarm.run(60.0)
    dead = nodes[0:200:2]  # the bootstrap among them
    for start in range(0, 100, 20):
        swarm.kill(dead[start : start + 20])
        swarm.run(12.0)
    survivors, gone = swarm.live(), {node.peer_id for node in dead}
    tries = [_tries(node, gone) for node in survivors]
    assert statistics.mean(tries) <= 3.0, "two, where half of those that one knows are dead"
    assert max(tries) <= 16
    seconds_until_gone(swarm, gone, 10.0, 200.0)
    (newcomer,) = swarm.add(1, survivors[:1])
    swarm.run(60.0)
    assert len(newcomer.table.live(swarm.now)) >= 60
    degrees = swarm.in_degrees()
    assert degrees[newcomer.peer_id] >= 20
    assert min(degrees.values()) >= 20, "nobody is forgotten"


def test_two_parts_that_meet_once_are_one_swarm_again(checks: Checks) -> None:
    swarm = Swarm(seed=3)
    left, right = swarm.add(12), swarm.add(12, side=1)
    swarm.run(120.0)
    assert all(member.peer_id in {node.peer_id for node in left} for node in left for member in node.table.live(swarm.now))
    for node in right:
        node.side = 0
    assert left[3].swap(right[7].peer_id)
    swarm.run(20.0)
    assert all(len(node.table.live(swarm.now)) == 23 for node in swarm.live())
    healed = [event for node in swarm.live() for _, event in node.healed]
    assert 1 <= len(healed) <= 24
    assert {event.peer_id for event in healed} & {left[3].peer_id, right[7].peer_id}
    assert all(event.members >= 2 for event in healed)


def test_a_swarm_that_never_fell_apart_has_nothing_to_heal(checks: Checks) -> None:
    swarm = Swarm(replace(CALM, capacity=32), seed=4)
    swarm.add(80)
    swarm.run(150.0)
    swarm.add(10, swarm.live()[:3])
    swarm.run(30.0)
    assert [node.healed for node in swarm.live() if node.healed] == []


def test_a_node_that_rests_beats_more_slowly_and_is_still_known(checks: Checks) -> None:
    swarm = Swarm(seed=5)
    nodes = swarm.add(5)
    nodes[1].state = "paused"
    swarm.run(100.0)
    sent = {node.number: node.sent for node in nodes}
    for _ in range(10):
        swarm.run(20.0)
        assert all(nodes[1].peer_id in node.table for node in nodes if node is not nodes[1])
    spent = {node.number: node.sent - sent[node.number] for node in nodes}
    assert spent[1] < 0.85 * statistics.mean(spent[number] for number in (0, 2, 3, 4))


class Flood:
    """A member with any number of keys of its own."""

    def __init__(self, own_wall: float) -> None:
        self.identities = [Identity.generate() for _ in range(200)]
        self.wall = own_wall

    def message(self, start: int) -> pb.Gossip:
        beats = [
            OwnHeartbeat(identity, "ab" * 32, lambda: (Standing(5, 0, 0.0), "training"), tuple, lambda: self.wall).heartbeat()
            for identity in self.identities[start : start + 40]
        ]
        return pb.Gossip(heartbeats=beats)


def test_one_that_floods_its_friends_fills_no_view(checks: Checks) -> None:
    swarm = Swarm(replace(CALM, capacity=32), seed=6)
    nodes = swarm.add(40)
    swarm.run(60.0)
    victim, flood = nodes[5], Flood(1_700_000_000.0 + swarm.now)
    friends, source = {identity.peer_id for identity in flood.identities}, nodes[9].peer_id
    before = checks.count
    for start in range(0, 200, 40):
        victim.gossip.learn(source, flood.message(start), swarm.now)
    brought = [member for member in victim.table.live(swarm.now) if member.peer_id in friends]
    assert len(brought) <= Timing().view // 2 + 1, "per beat"
    assert checks.count - before <= len(brought)


def test_what_one_source_says_is_looked_at_so_many_times_a_beat(checks: Checks) -> None:
    me, timing = Identity.generate(), Timing()
    own_heartbeat = OwnHeartbeat(me, "ab" * 32, lambda: (Standing(0, 0, 0.0), "training"), tuple, lambda: 1e9)
    table = Membership(me.peer_id, "ab" * 32, timing)
    gossip = Gossip(table, own_heartbeat, random.Random(0))
    source, rubbish = Identity.generate().peer_id, pb.Gossip(heartbeats=[b"rubbish"] * 1000)
    faults = [gossip.learn(source, rubbish, 1.0).faults for _ in range(10)]
    assert faults[0] == timing.view + 1
    assert sum(faults) == 3 * (timing.view + 1)
    gossip.beat(2.0)
    assert gossip.learn(source, rubbish, 2.0).faults == timing.view + 1, "the next beat is another"
