"""The table of members: only a fresh, signed heartbeat of our run makes one, and silence ends it."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import BannedError, OtherRunError, ProtocolError, RemoteError, SignatureError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import PeerLost, PeerSeen
from nolocod.p2p.membership.admission import Admission
from nolocod.p2p.membership.heartbeat import MAX_HEARTBEAT, WATCHING, OwnHeartbeat
from nolocod.p2p.membership.table import PER_GROUP, Membership, share
from nolocod.p2p.timing import Timing
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import seal
from nolocod.proto.types import Built, Standing

RUN = "ab" * 32
WALL = 1_700_000_000.0
ME = Identity.generate()
HERE = "/ip4/192.0.2.1/tcp/4001"


class Node:
    """One peer that speaks; time is what the test says."""

    def __init__(self, run_id: str = RUN) -> None:
        self.identity = Identity.generate()
        self.standing = Standing(1, 100, 3.5)
        self.state = "training"
        self.wall = WALL
        self.addresses: tuple[str, ...] = (HERE,)
        self.own_heartbeat = OwnHeartbeat(
            self.identity, run_id, lambda: (self.standing, self.state), lambda: self.addresses, lambda: self.wall
        )

    def beat(self, *, leaving: bool = False) -> bytes:
        self.own_heartbeat.leaving = leaving
        return self.own_heartbeat.heartbeat()


def table(timing: Timing | None = None) -> Membership:
    return Membership(ME.peer_id, RUN, timing or Timing(lasting=20.0))  # the same from the start, whatever its size


def sealed(node: Node, **changes: object) -> bytes:
    heartbeat = pb.Heartbeat(count=1, standing=pb.Standing(round=1), state="training", time_ms=int(WALL * 1000))
    for name, value in changes.items():
        if name == "addresses":
            heartbeat.addresses.extend(value)  # type: ignore[arg-type]  # a list of texts
        elif name == "round":
            heartbeat.standing.round = value  # type: ignore[assignment]  # an int
        else:
            setattr(heartbeat, name, value)
    return seal(pb.Body(run_id=RUN, heartbeat=heartbeat), node.identity)


def test_a_member_tells_what_its_libraries_made_of_the_model_once_it_knows() -> None:
    members, node = table(), Node()
    members.heard(node.beat(), 5.0, WALL)
    assert members.live(5.0)[0].built == Built(), "as the release before"
    built = Built(b"l" * 16, b"w" * 16, "torch 2.8, transformers 5.1")
    node.own_heartbeat.built = lambda: built
    members.heard(node.beat(), 6.0, WALL)
    assert members.live(6.0)[0].built == built
    node.own_heartbeat.built = lambda: Built(b"l" * 17, b"", "x\n" * 99)
    members.heard(node.beat(), 7.0, WALL)
    assert members.live(7.0)[0].built == Built(libraries="x?" * 40), "a digest of another length is none, a text is bounded"


def test_a_heartbeat_makes_a_member() -> None:
    members, node = table(), Node()
    change = members.heard(node.beat(), 5.0, WALL)
    assert change == PeerSeen(node.identity.peer_id, 1, 100, 3.5, "training")
    (member,) = members.live(7.0, {node.identity.peer_id: "direct"})
    assert (member.peer_id, member.standing, member.state) == (node.identity.peer_id, node.standing, "training")
    assert (member.addresses, member.age, member.reach) == ((HERE,), 2.0, "direct")


def test_an_echo_changes_nothing_and_keeps_nobody_alive() -> None:
    members, node = table(), Node()
    raw = node.beat()
    members.heard(raw, 0.0, WALL)
    assert members.heard(raw, 19.0, WALL) is None
    assert members.live(21.0) == []
    assert members.expire(21.0) == [PeerLost(node.identity.peer_id, "silent for 20 s")]
    assert members.heard(raw, 22.0, WALL) is None, "the dead do not come back by an echo"
    assert members.live(22.0) == []
    assert members.heard(node.beat(), 23.0, WALL) is not None, "but by a new heartbeat of their own"


def test_a_new_heartbeat_with_the_same_content_is_no_news_but_keeps_alive() -> None:
    members, node = table(), Node()
    members.heard(node.beat(), 0.0, WALL)
    assert members.heard(node.beat(), 15.0, WALL) is None
    assert len(members.live(30.0)) == 1
    node.standing = Standing(2, 200, 3.0)
    assert isinstance(members.heard(node.beat(), 16.0, WALL), PeerSeen)


def test_counts_grow_over_restarts_and_under_a_stopped_clock() -> None:
    members, node = table(), Node()
    members.heard(node.beat(), 0.0, WALL)
    for second in range(1, 4):  # three beats within one millisecond
        members.heard(node.beat(), float(second), WALL)
        assert members.live(float(second))[0].age == 0.0
    again = OwnHeartbeat(node.identity, RUN, lambda: (Standing(9, 9, 9.0), "training"), list, lambda: WALL + 1)
    assert isinstance(members.heard(again.heartbeat(), 10.0, WALL), PeerSeen)


def test_leaving_ends_it_at_once() -> None:
    members, node = table(), Node()
    before = node.beat()
    members.heard(before, 0.0, WALL)
    late = node.beat()
    assert members.heard(node.beat(leaving=True), 1.0, WALL) == PeerLost(node.identity.peer_id, "it left")
    assert members.live(1.0) == []
    assert members.heard(late, 2.0, WALL) is None, "an older heartbeat that arrives late does not undo it"
    assert members.heard(Node().beat(leaving=True), 2.0, WALL) is None, "a stranger's leave is no news"


def test_one_that_only_watches_is_no_member() -> None:
    members, node = table(), Node()
    node.state = WATCHING
    assert members.heard(node.beat(), 1.0, WALL) is None
    assert node.identity.peer_id not in members


def test_our_own_heartbeat_is_no_member() -> None:
    members = table()
    own_heartbeat = OwnHeartbeat(ME, RUN, lambda: (Standing(1, 1, 1.0), "training"), list, lambda: WALL)
    assert members.heard(own_heartbeat.heartbeat(), 0.0, WALL) is None
    assert members.live(0.0) == []


def test_of_another_run_or_altered_or_unsigned_it_is_refused() -> None:
    members, node = table(), Node()
    with pytest.raises(OtherRunError):
        members.heard(Node(run_id="cd" * 32).beat(), 0.0, WALL)
    envelope = pb.Envelope.FromString(node.beat())
    body = pb.Body.FromString(envelope.body)
    body.heartbeat.standing.round = 99
    envelope.body = body.SerializeToString()
    with pytest.raises(SignatureError):
        members.heard(envelope.SerializeToString(), 0.0, WALL)
    with pytest.raises(ProtocolError):
        members.heard(seal(pb.Body(run_id=RUN, gossip=pb.Gossip()), node.identity), 0.0, WALL)
    assert members.live(0.0) == []


def test_somebody_cannot_speak_for_another() -> None:
    members, victim, thief = table(), Node(), Node()
    envelope = pb.Envelope.FromString(thief.beat())
    body = pb.Body.FromString(envelope.body)
    body.sender = victim.identity.peer_id
    envelope.body = body.SerializeToString()
    with pytest.raises(SignatureError):
        members.heard(envelope.SerializeToString(), 0.0, WALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "Dancing!"},
        {"state": "x" * 17},
        {"state": ""},
        {"version": "9" * 33},
        {"addresses": [HERE] * 9},
        {"count": 1 << 60},
        {"time_ms": 1 << 60},
        {"round": 1 << 60},
        {"version": "9" * MAX_HEARTBEAT},
    ],
)
def test_what_no_honest_node_sends_is_refused(changes: dict[str, object]) -> None:
    members = table()
    with pytest.raises(ProtocolError):
        members.heard(sealed(Node(), **changes), 0.0, WALL)
    assert members.live(0.0) == []


@pytest.mark.parametrize(
    ("told", "shown"), [("Ann's box", "Ann's box"), ("<b>", ""), ("a\u202eb", ""), ("x" * 33, ""), (" x", "")]
)
def test_what_a_node_is_called_is_shown_if_that_is_safe(told: str, shown: str) -> None:
    alice, members = Node(), table()
    alice.own_heartbeat.name = told
    members.heard(alice.beat(), 0.0, WALL)
    assert [member.name for member in members.live(0.0)] == [shown]


def test_addresses_that_cannot_be_dialled_are_left_out() -> None:
    members, node = table(), Node()
    members.heard(sealed(node, addresses=["/ip4/0.0.0.0/tcp/5", HERE, "x" * 500, "/ip4/1.2.3.4/tcp/0"]), 0.0, WALL)
    assert members.addresses(node.identity.peer_id) == (HERE,)


def test_a_loss_that_is_no_number_is_passed_on() -> None:
    members, node = table(), Node()
    node.standing = Standing(0, 0, math.nan)
    members.heard(node.beat(), 0.0, WALL)
    assert math.isnan(members.live(0.0)[0].standing.loss)


@given(raw=st.binary(max_size=200))
def test_no_bytes_do_more_than_raise_an_error_of_ours(raw: bytes) -> None:
    members = table()
    with contextlib.suppress(RemoteError):
        members.heard(raw, 0.0, WALL)
    assert members.live(0.0) == []


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_heartbeat_altered_anywhere_makes_no_other_member(position: int, flip: int) -> None:
    members, node = table(), Node()
    raw = bytearray(node.beat())
    raw[position % len(raw)] ^= flip
    with contextlib.suppress(RemoteError):
        members.heard(bytes(raw), 0.0, WALL)
    for member in members.live(0.0):  # the envelope's minor version is not signed: it may differ
        assert (member.peer_id, member.standing) == (node.identity.peer_id, node.standing)


def test_the_table_is_bounded_and_keeps_the_fresh() -> None:
    members = table(Timing(capacity=4))
    nodes = [Node() for _ in range(5)]
    for second, node in enumerate(nodes[:4]):
        members.heard(node.beat(), float(second), WALL)
    assert members.heard(nodes[4].beat(), 5.0, WALL, age=5.5) is None, "it is staler than the stalest"
    assert members.heard(nodes[4].beat(), 5.0, WALL, newcomer=False) is None, "its source brought enough"
    members.heard(nodes[0].beat(), 6.0, WALL)
    assert isinstance(members.heard(nodes[4].beat(), 7.0, WALL), PeerSeen)
    live = {member.peer_id for member in members.live(7.0)}
    assert live == {node.identity.peer_id for node in nodes} - {nodes[1].identity.peer_id}
    assert members.expire(7.0) == [PeerLost(nodes[1].identity.peer_id, "made room for others")]
    assert members.expire(7.0) == []
    members.heard(nodes[2].beat(), 8.0, WALL, newcomer=False)
    ages = {member.peer_id: member.age for member in members.live(8.0)}
    assert ages[nodes[2].identity.peer_id] == 0.0, "who is known is heard from whomever"


def test_an_old_heartbeat_of_one_we_never_knew_lives_only_as_long_as_it_is_young() -> None:
    members, node, dead = table(), Node(), Node()
    members.heard(node.beat(), 0.0, WALL, age=15.0)
    assert members.live(4.0)[0].age == 19.0
    assert members.live(6.0) == []
    assert members.heard(dead.beat(), 0.0, WALL, age=21.0) is None
    assert dead.identity.peer_id not in members


def test_a_large_run_is_believed_for_longer_and_at_first_every_run_may_be_large() -> None:
    timing = Timing(live=20.0, lasting=180.0, crowd=1)
    members = Membership(ME.peer_id, RUN, timing)
    nodes = [Node() for _ in range(3)]
    for node in nodes:
        members.heard(node.beat(), 0.0, WALL)
    assert members.lasts(5.0) == 180.0
    assert not members.settled(59.0)
    assert members.lasts(20.0) == 60.0
    assert members.settled(60.0)
    assert len(members.live(60.0)) == 3
    assert len(members.expire(61.0)) == 3
    assert members.lasts(61.0) == 20.0


def test_who_could_not_be_reached_is_gone_after_half_the_time() -> None:
    members, nodes = table(), [Node(), Node()]
    for node in nodes:
        members.heard(node.beat(), 0.0, WALL)
    unreached = nodes[0].identity.peer_id
    members.suspect(unreached, 1.0)
    assert members.expire(10.0) == []
    assert members.expire(10.5) == [PeerLost(unreached, "silent for 10 s")]
    assert members.heard(nodes[0].beat(), 11.0, WALL, age=10.5) is None, "sealed before it was found out of reach"
    members.heard(nodes[0].beat(), 11.0, WALL)
    assert members.expire(20.0) == [], "heard again, it has all the time"


def test_how_others_reach_it_and_what_it_gives() -> None:
    members = table()
    words = {"public": "public", "symmetric": "symmetric", "": None, "quantum": None}
    for word, meant in words.items():
        node = Node()
        members.heard(sealed(node, reach=word, relays=word == "public"), 0.0, WALL)
        member = members.live(0.0)[-1]
        assert (member.nat, member.relays) == (meant, word == "public")


class ByPassword(Admission):
    """Admits those that show "yes"; takes back what it is told."""

    def __init__(self) -> None:
        self.word = b"yes"
        self.revocations = b""

    def admits(self, peer: PeerId, admission: bytes, wall: float) -> bool:
        return admission == self.word

    def learn(self, raw: bytes) -> bool:
        self.revocations, self.word = raw, b"no more"
        return True


def test_only_who_is_admitted_is_a_member_and_only_as_long() -> None:
    password = ByPassword()
    members, invited, stray = Membership(ME.peer_id, RUN, admission=password), Node(), Node()
    assert members.heard(sealed(stray), 0.0, WALL) is None
    assert isinstance(members.heard(sealed(invited, admission=b"yes"), 0.0, WALL), PeerSeen)
    assert [member.peer_id for member in members.live(0.0)] == [invited.identity.peer_id]
    assert members.review(WALL) == []
    password.learn(b"all")
    assert [lost.peer_id for lost in members.review(WALL)] == [invited.identity.peer_id]
    assert members.live(0.0) == []


def test_suspicion_needs_time_and_a_sign_of_life_to_pass() -> None:
    members, node = table(), Node()
    peer = node.identity.peer_id
    members.heard(node.beat(), 0.0, WALL)
    members.suspect(peer, 0.0)
    assert members.suspected(1.0) == {peer}
    assert members.suspected(11.0) == {peer}, "not heard since"
    members.heard(node.beat(), 12.0, WALL)
    assert members.suspected(12.0) == set()
    members.suspect(peer, 12.0)
    members.heard(node.beat(), 12.5, WALL, age=1.0)
    assert members.suspected(23.0) == {peer}, "that was sealed before it was found out of reach"
    members.met(peer, "direct", "192.0.2.1")
    members.suspect(peer, 11.0)
    members.heard(node.beat(), 11.5, WALL)
    members.suspect(peer, 12.0)
    members.heard(node.beat(), 13.0, WALL)
    assert members.suspected(31.0) == {peer}, "the second failure in a row counts double"
    assert members.suspected(32.0) == set()
    members.suspect(peer, 32.0)
    members.met(peer, "direct", "192.0.2.1")
    assert members.suspected(33.0) == set()
    assert [member.peer_id for member in members.live(13.0)] == [peer], "suspected is not dead"


def test_a_view_is_the_freshest_and_some_of_the_rest() -> None:
    members = table(Timing(view=8))
    raws = []
    for second in range(20):
        raws.append(Node().beat())
        members.heard(raws[-1], float(second), WALL)
    told = dict(members.encode_view(random.Random(0), 19.0))
    assert len(told) == 8
    assert [told[raw] for raw in raws[-4:]] == [3.0, 2.0, 1.0, 0.0]
    assert not set(raws[10:]) & set(dict(members.encode_view(random.Random(0), 19.0, set(raws[10:]))))
    views = {tuple(members.encode_view(random.Random(seed), 19.0)) for seed in range(10)}
    assert len(views) > 1, "the rest is drawn, so that everybody gets known"


def test_a_view_is_bounded_in_bytes_too() -> None:
    members, nodes = table(Timing(view_bytes=1000)), [Node() for _ in range(5)]
    nodes[4].addresses = tuple(f"/dns4/{'x' * 200}.{n}.example/tcp/4001" for n in range(8))
    for second, node in enumerate(nodes):
        members.heard(node.beat(), float(second), WALL)
    told = members.encode_view(random.Random(0), 4.0)
    assert 3 <= len(told) < 5
    assert sum(len(raw) for raw, _ in told) <= 1000


def test_a_sample_is_of_live_members() -> None:
    members, nodes = table(), [Node() for _ in range(6)]
    for number, node in enumerate(nodes):
        members.heard(node.beat(), 0.0 if number else -30.0, WALL)
    drawn = members.sample(random.Random(0), 3, 0.0)
    assert len(set(drawn)) == 3
    assert nodes[0].identity.peer_id not in members.sample(random.Random(0), 6, 0.0)


def test_the_clock_offset_is_the_median_of_what_verified_members_say_themselves() -> None:
    """100 invented members an hour ahead, and a carrier that lies about ages, turn no clock."""
    members = table()
    assert members.clock_offset() == 0.0
    for offset in (0.0, 700.0, 701.0):
        node = Node()
        node.wall = WALL + offset
        members.heard(node.beat(), 3.0, WALL + 3.0, age=3.0, carrier=node.identity.peer_id)
        members.met(node.identity.peer_id, "direct", "127.0.0.1")
    for _ in range(100):
        ghost = Node()
        ghost.wall = WALL + 3600.0
        members.heard(ghost.beat(), 3.0, WALL + 3.0, carrier=Identity.generate().peer_id)
    assert members.clock_offset() == pytest.approx(700.0, abs=0.01)
    members.heard(node.beat(), 4.0, WALL + 4.0, age=15.0, carrier=ME.peer_id)
    assert members.clock_offset() == pytest.approx(700.0, abs=0.01), "what a carrier says of ages turns no clock"
    for _ in range(3):
        loud = Node()
        loud.wall = WALL + 3600.0
        members.heard(loud.beat(), 3.0, WALL + 3.0, carrier=loud.identity.peer_id)
        members.met(loud.identity.peer_id, "inbound", "127.0.0.1")
    assert members.clock_offset() == pytest.approx(700.0, abs=0.01), "nor does who comes to us unasked"


def test_a_carrier_that_lies_about_ages_ends_nobody() -> None:
    """It passes every heartbeat on first, as one that is nearly too old; each member speaks for itself now and then."""
    liar, lost = Identity.generate().peer_id, list[PeerLost]()
    members, nodes = table(Timing(live=20.0, lasting=20.0)), [Node() for _ in range(24)]
    for now in range(0, 240, 2):
        for node in nodes:
            node.wall = WALL + now
            raw = node.beat()
            if now:
                members.heard(raw, float(now), WALL + now, age=19.9, carrier=liar)
            if now % 30 == 0 or now < 2:
                members.heard(raw, float(now), WALL + now, carrier=node.identity.peer_id)
        lost += members.expire(float(now) + 1.0)
    assert (len(lost), len(members)) == (0, 24)


def test_another_carriers_younger_age_counts_and_none_beyond_the_first_hearing() -> None:
    members, node = table(), Node()
    raw = node.beat()
    members.heard(raw, 100.0, WALL + 100.0, age=15.0)
    members.heard(raw, 101.0, WALL + 101.0, age=4.0)
    assert members.live(101.0)[0].age == 4.0
    members.heard(raw, 110.0, WALL + 110.0, age=0.0)
    assert members.live(110.0)[0].age == 10.0, "a lie buys one lifetime from the first hearing on, once"
    members.heard(raw, 111.0, WALL + 111.0, age=19.0)
    assert members.live(111.0)[0].age == 11.0


def test_a_clock_that_is_set_back_costs_a_member_nothing() -> None:
    members, node = table(), Node()
    for now, wall in ((0.0, 0.0), (10.0, -7200.0), (20.0, -7190.0), (30.0, 7200.0), (40.0, 7210.0)):
        node.wall = WALL + wall
        node.own_heartbeat.clock = lambda: node.wall
        members.heard(node.beat(), now, WALL + now, age=1.0)
        assert members.live(now)[0].age <= 1.0


def test_verified_members_keep_their_place_in_a_full_table_and_in_what_is_told() -> None:
    members = table(Timing(capacity=8, view=8))
    kept = joined(members, 4)
    for peer in kept:
        members.met(peer, "direct", "127.0.0.1")
    for now in range(1, 30):
        members.heard(Node().beat(), now / 10, WALL)
    assert {*kept} <= {member.peer_id for member in members.live(3.0)}
    told = [members_of(raw) for raw, _ in members.encode_view(random.Random(0), 3.0)]
    assert len({*told} & {*kept}) >= 2
    assert {*members.sample(random.Random(0), 9, 3.0, members.verified())} == {*kept}
    more = joined(members, 1)[0]
    members.met(more, "direct", "127.0.0.1")
    for now in range(30, 60):
        members.heard(Node().beat(), now / 10, WALL)
    assert len(members.verified()) == 4, "above half of it the stalest of all makes room"


def members_of(raw: bytes) -> PeerId:
    return PeerId(pb.Body.FromString(pb.Envelope.FromString(raw).body).sender)


def test_a_member_is_known_with_its_lead_at_the_time_of_its_heartbeat() -> None:
    node, members = Node(), table()
    members.heard(node.beat(), 0.0, WALL, own_round=5)
    (member,) = members.live(1.0)
    assert member.lead == member.standing.round - 5


def test_a_full_table_gives_up_the_stalest_however_often_the_others_were_heard() -> None:
    rng, members = random.Random(1), table(Timing(capacity=8, live=1e6))
    nodes = {node.identity.peer_id: node for node in (Node() for _ in range(24))}
    sealed_at: dict[str, float] = {}
    spoke: dict[str, float] = {}
    for now in range(1000):
        peer = rng.choice([*nodes])
        age = min(rng.uniform(0.0, 50.0), now - spoke.get(peer, -50.0))  # nobody seals an older one later
        heard, full = now - age, len(members) == 8
        spoke[peer], nodes[peer].wall = heard + 0.01, WALL + heard
        stalest = min(sealed_at, key=lambda one: sealed_at[one]) if full else None
        members.heard(nodes[peer].beat(), float(now), WALL + now, age=age)
        if peer in sealed_at:
            sealed_at[peer] = max(sealed_at[peer], heard)
        elif stalest is None:
            sealed_at[peer] = heard
        elif heard > sealed_at[stalest]:
            del sealed_at[stalest]
            sealed_at[peer] = heard
        assert {member.peer_id for member in members.live(float(now))} == set(sealed_at)


def joined(members: Membership, count: int = 1, address: str = HERE) -> list[PeerId]:
    nodes = [Node() for _ in range(count)]
    for node in nodes:
        node.addresses = (address,)
        members.heard(node.beat(), 0.0, WALL)
    return [node.identity.peer_id for node in nodes]


def test_only_who_was_dialled_or_committed_an_exchange_is_verified() -> None:
    members, committed = table(), dict[PeerId, int]()
    members.committed = lambda peer: committed.get(peer, 0)
    heard_of, caller, partner, dialled, carried, far_partner = peers = joined(members, 6)
    members.met(caller, "inbound", "198.51.100.1")
    members.met(partner, "inbound", "198.51.101.1")
    members.met(dialled, "direct", "198.51.102.1")
    members.met(carried, "relayed", "")
    members.met(Identity.generate().peer_id, "direct", "198.51.103.1")
    assert members.verified() == {dialled, carried}, "who is no member is none"
    committed |= {partner: 1, far_partner: 3}
    assert members.verified() == {dialled, carried, partner}, "a partner speaks for itself before it counts"
    live = {member.peer_id: (member.verified, member.group) for member in members.live(1.0)}
    groups = [live[peer] for peer in peers]
    assert groups[:4] == [(False, ""), (False, ""), (True, "198.51.101.0/24"), (True, "198.51.102.0/24")]
    assert (heard_of in members, groups[4]) == (True, (True, "relayed"))
    members.ban = lambda peer: BannedError("it lied.") if peer == dialled else None
    counted = {member.peer_id for member in members.live(1.0) if member.verified}
    assert counted == {carried, partner}, "who is banned decides nothing"
    assert members.size() == (3, 3), "but is there: whoever counts members takes it off"


def test_verified_members_of_one_address_group_count_up_to_its_share_partners_first() -> None:
    members, committed = table(), dict[PeerId, int]()
    members.committed = lambda peer: committed.get(peer, 0)
    hosts = {"four": "198.51.100.", "six": "2001:db8:7::", "private": "10.0.0.", "loopback": "127.0.0.1", "": ""}
    for name, host in hosts.items():
        peers = joined(members, 9)
        for number, peer in enumerate(peers):
            members.met(peer, "direct" if host else "relayed", f"{host}{number + 1}" if host.endswith((".", ":")) else host)
        bounded = name not in ("private", "loopback")
        assert members.verified() & {*peers} == {*peers[: PER_GROUP if bounded else 9]}, name
        committed[peers[8]] = 1
        assert peers[8] in members.verified()
    elsewhere = joined(members)[0]
    members.met(elsewhere, "direct", "203.0.113.1")
    members.met(elsewhere, "inbound", "198.51.100.77")
    assert {member.group for member in members.live(1.0) if member.peer_id == elsewhere} == {"203.0.113.0/24"}


def test_who_left_or_is_out_of_reach_for_long_is_verified_no_more() -> None:
    members, node = table(), Node()
    peer = node.identity.peer_id
    members.heard(node.beat(), 0.0, WALL)
    members.met(peer, "direct", "127.0.0.1")
    for now in (1.0, 2.0):
        members.suspect(peer, now)
        assert members.verified() == {peer}
    members.suspect(peer, 3.0)
    assert members.verified() == set()
    members.met(peer, "direct", "127.0.0.1")
    members.heard(node.beat(leaving=True), 4.0, WALL)
    members.heard(node.beat(), 5.0, WALL)
    assert members.verified() == set()


def test_what_news_are_worth_is_the_share_of_those_heard_of_that_answered_of_late() -> None:
    members, half = table(), 0.5
    assert share(members.answers) == 1.0, "nobody was tried"
    peers = joined(members, 20)
    for peer in peers[:2]:
        members.met(peer, "direct", "127.0.0.1")
        members.met(peer, "direct", "127.0.0.1")
    for peer in peers[2:4]:
        members.suspect(peer, 1.0)
    members.met(peers[4], "inbound", "127.0.0.1")
    members.suspect(peers[0], 1.0)
    assert share(members.answers) == half, "who spoke to us is there, answer or not"
    for now in (1.0, 20.0, 300.0):
        members.suspect(peers[2], now)
    assert share(members.answers) == half, "who is tried again tells nothing new of the others"
    for peer in joined(members, 32):
        members.suspect(peer, 1.0)
    assert share(members.answers) == 0.0


@pytest.mark.parametrize(("answered", "kept"), [(True, 16), (False, 24)])
def test_where_few_of_those_heard_of_answer_more_of_the_verified_keep_their_place(answered: bool, kept: int) -> None:
    members = table(Timing(capacity=64, live=1e6))
    for peer in joined(members, 24):
        members.met(peer, "direct", "127.0.0.1")
    for peer in joined(members, 0 if answered else 32):
        members.suspect(peer, 1.0)
    for now in range(2, 100):
        members.heard(Node().beat(), float(now), WALL)
    assert len(members.verified()) == kept


def test_the_size_of_the_run_counts_the_verified_and_of_the_others_those_that_were_not_dialled_in_vain() -> None:
    members = table(Timing(live=20.0, lasting=20.0))
    peers = joined(members, 6, "/ip4/127.0.0.1/tcp/1")  # of no address group
    assert members.size() == (0, 6)
    members.met(peers[0], "direct", "127.0.0.1")
    members.met(peers[1], "inbound", "127.0.0.1")
    members.suspect(peers[2], 1.0)
    assert members.size() == (1, 4), "who calls us may be one of many names; who is not there is not counted"
    for peer in peers[:2]:
        members.suspect(peer, 1.0)
    members.heard(Node().beat(), 40.0, WALL)
    members.expire(40.0)
    assert members.size() == (0, 4), "silent for less than three lives, but for those out of reach"
    members.heard(Node().beat(), 100.0, WALL)
    assert members.size()[1] < 4


def test_the_many_of_one_address_group_that_are_only_heard_of_count_as_few() -> None:
    members = table()
    joined(members, 12, "/ip4/203.0.113.7/tcp/4001")
    assert members.size() == (0, PER_GROUP)


def test_a_connection_that_is_alive_is_a_sign_of_life_too() -> None:
    members = table(Timing(live=20.0, lasting=20.0))
    near, far = joined(members, 2)
    members.connected = frozenset([near])
    assert [lost.peer_id for lost in members.expire(30.0)] == [far]
    assert [member.peer_id for member in members.live(30.0)] == [near]
    assert [lost.peer_id for lost in members.expire(90.0)] == [near], "not for ever: it says nothing"


def test_whoever_fell_silent_a_moment_ago_may_offer_still() -> None:
    members = table(Timing(live=20.0, lasting=20.0))
    (peer,) = joined(members, 1)
    members.expire(30.0)
    assert peer not in members
    assert members.known(peer, 30.0)
    assert not members.known(peer, 70.0)


@pytest.mark.parametrize("answered", [True, False])
def test_where_few_of_those_heard_of_answer_a_view_tells_more_of_those_that_spoke(answered: bool) -> None:
    members, rng = table(Timing(view=8, live=1e6)), random.Random(1)
    spoke = joined(members, 16)
    for peer in spoke:
        members.met(peer, "direct", "127.0.0.1")
    for peer in joined(members, 0 if answered else 32):
        members.suspect(peer, 1.0)
    for now in range(2, 34):
        members.heard(Node().beat(), float(now), WALL)
    ours = {members.said(peer)[0] for peer in spoke}
    told = sum(raw in ours for _ in range(100) for raw, _ in members.encode_view(rng, 40.0)) / 100
    assert 4 <= told < 6 if answered else told == 8
