"""Two nodes with one identity find out about each other; restarts, echoes and replays never look like that."""

from __future__ import annotations

import random

import pytest

from nolocod.identity import Identity
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import OwnHeartbeat, new_life
from nolocod.p2p.membership.table import Membership
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import MAX_NUMBER, peek
from nolocod.proto.types import Standing

RUN = "ab" * 32
WALL = 1_700_000_000.0
OURS, FRIEND = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2))


class Life:
    """One process of a node, from `wall` on."""

    def __init__(self, wall: float, identity: Identity = OURS, seed: int = 0) -> None:
        self.wall = wall
        life = new_life(wall, random.Random(f"{wall} {seed}"))
        self.own_heartbeat = OwnHeartbeat(
            identity, RUN, lambda: (Standing(1, 1, 1.0), "training"), lambda: (), lambda: self.wall, life=life
        )
        self.table = Membership(identity.peer_id, RUN)
        self.gossip = Gossip(self.table, self.own_heartbeat, random.Random(seed))

    def beat(self) -> bytes:
        self.wall += 1.0
        return self.own_heartbeat.heartbeat()

    def hears(self, *raws: bytes) -> None:
        self.gossip.beat(self.wall)
        heard = self.gossip.learn(FRIEND.peer_id, pb.Gossip(heartbeats=raws), self.wall)
        assert heard.faults == 0

    @property
    def knows(self) -> bool:
        return self.own_heartbeat.clone != 0


def test_each_learns_of_the_other_within_one_beat_and_which_began_later() -> None:
    elder, younger = Life(WALL), Life(WALL + 100)
    elder.wall = WALL + 100
    younger.hears(elder.beat())
    assert not younger.knows, "that may be an echo of an earlier life of ours"
    elder.hears(younger.beat())
    assert elder.knows
    younger.hears(elder.beat())
    assert younger.knows
    assert younger.own_heartbeat.clone == elder.own_heartbeat.life < younger.own_heartbeat.life == elder.own_heartbeat.clone


def test_a_restart_is_no_clone_however_long_its_echoes_go_about() -> None:
    before = Life(WALL)
    echoes = [before.beat() for _ in range(50)]
    after = Life(WALL + 60)
    for echo in (*echoes, *reversed(echoes)):
        after.hears(echo)
        after.hears(after.beat())
    assert not after.knows
    third = Life(WALL + 120)
    for echo in (*echoes, after.beat()):
        third.hears(echo)
    assert not third.knows, "what a former life said of its former life is not about us"


def test_a_stranger_cannot_make_us_stop_by_what_we_once_said() -> None:
    elder, younger = Life(WALL), Life(WALL + 100)
    recorded = []
    for _ in range(3):  # a real clone, recorded by somebody
        recorded += [elder.beat(), younger.beat()]
        elder.hears(recorded[-1])
        younger.hears(recorded[-2])
    assert elder.knows
    again = Life(WALL + 1000)
    for raw in recorded * 3:
        again.hears(raw)
    assert not again.knows


def test_a_clone_is_found_though_older_echoes_go_about() -> None:
    dead, elder, younger = Life(WALL - 500), Life(WALL), Life(WALL + 100)
    echo, elder.wall = dead.beat(), WALL + 100
    for _ in range(2):
        younger.hears(elder.beat(), echo)
        elder.hears(younger.beat(), echo)
    assert elder.knows
    assert younger.knows


def test_a_clock_that_ran_ahead_is_not_held_against_the_next_life() -> None:
    before = Life(WALL + 100_000)
    echo = before.beat()
    friend = Life(WALL, FRIEND)
    friend.hears(echo)
    after = Life(WALL)
    friend.hears(after.beat())
    assert friend.table.live(friend.wall)[0].version
    assert friend.table._entries[OURS.peer_id].said.raw == echo, "its count is below what its peers have"
    after.hears(echo)
    beat = after.beat()
    friend.hears(beat)
    assert friend.table._entries[OURS.peer_id].said.raw == beat


@pytest.mark.parametrize("count", [MAX_NUMBER - 1, MAX_NUMBER // 2])
def test_nothing_makes_us_count_beyond_all_measure(count: int) -> None:
    life = Life(WALL)
    life.own_heartbeat.hear(pb.Heartbeat(count=count, life=5))
    assert peek(life.beat()).heartbeat.count == int((WALL + 1) * 1000)


def test_our_own_echo_and_an_older_releases_say_nothing() -> None:
    life = Life(WALL)
    life.hears(life.beat())
    life.own_heartbeat.hear(pb.Heartbeat(count=int(WALL * 1000) + 10**6, other=0))
    assert not life.knows
    silent = OwnHeartbeat(OURS, RUN, lambda: (Standing(1, 1, 1.0), "training"), lambda: ())
    silent.hear(pb.Heartbeat(count=1, life=7, other=0))
    assert silent.clone == 0
