"""Partners are drawn uniformly among those that are reached straight, less often where a relay carries, and among no others."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nolocod.identity import PeerId
from nolocod.p2p.membership.peer_scoring import Conduct, Reputation
from nolocod.p2p.membership.peer_selection import FEW, RELAYED, PeerSelection, meet
from nolocod.p2p.nat.classify import needs_relay
from nolocod.proto.types import Member, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nolocod.observe.events import NatClass, Reach

OWN = Standing(round=10, tokens=0, loss=0.0)


US = PeerId("us")


def choose(
    rng: random.Random,
    members: list[Member],
    own: Standing,
    staleness: int,
    avoid: Collection[PeerId],
    carried: Collection[PeerId] = (),
) -> PeerId | None:
    """As a node does that never had a partner."""
    return PeerSelection(US, rng, Reputation(lambda _: None)).draw(members, own, staleness, avoid, carried)


def member(name: str, *, round: int = 10, state: str = "training") -> Member:
    return Member(PeerId(name), Standing(round, 0, 0.0), state, (), "0", 0.0, None, lead=round - OWN.round)


def spoken_to(name: str) -> Member:
    """One that we dialled."""
    return replace(member(name), group=name, verified=True)


def test_uniform_by_chi_square() -> None:
    members = [member(f"p{number}", round=10 + number % 3) for number in range(8)]
    rng = random.Random(1)
    draws = 8000
    counts = Counter(choose(rng, members, OWN, 3, set()) for _ in range(draws))
    expected = draws / len(members)
    statistic = sum((counts[one.peer_id] - expected) ** 2 / expected for one in members)
    assert statistic < 18.48  # 99 % quantile of chi-square with 7 degrees of freedom


def test_the_order_of_members_does_not_weigh_in() -> None:
    members = [member(f"p{number}") for number in range(4)]
    counts = Counter(choose(random.Random(seed), members[::-1], OWN, 3, set()) for seed in range(4000))
    assert set(counts) == {one.peer_id for one in members}
    assert max(counts.values()) < 1.2 * min(counts.values())


def test_nobody_fit_is_nobody() -> None:
    members = [
        member("behind", round=6),
        member("ahead", round=14),
        member("joins", state="joining"),
        member("done", state="finished"),
        member("avoided"),
    ]
    assert choose(random.Random(0), members, OWN, 3, {PeerId("avoided")}) is None
    assert choose(random.Random(0), [], OWN, 3, set()) is None


def test_the_staleness_limit_is_inclusive_on_both_sides() -> None:
    for distance in (-3, 3):
        near = member("near", round=10 + distance)
        assert choose(random.Random(0), [near], OWN, 3, set()) == "near"
        assert (
            choose(
                random.Random(0),
                [replace(near, standing=Standing(10 + distance * 2, 0, 0.0), lead=distance * 2)],
                OWN,
                3,
                set(),
            )
            is None
        )


def test_rounds_that_went_by_since_a_heartbeat_do_not_count() -> None:
    """We are at round 10; its heartbeat said 4 when we were at 3: it has surely gone on as we have."""
    peer = replace(member("peer", round=4), lead=1)
    assert choose(random.Random(0), [peer], OWN, 3, set()) == "peer"


def test_weights_just_taken_over_bring_the_others_near() -> None:
    """Its heartbeat said 11 when we were at 2, and then we fetched weights of round 10."""
    peer = replace(member("peer", round=11), lead=9)
    assert choose(random.Random(0), [peer], OWN, 3, set()) == "peer"


@given(
    rounds=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["joining", "training", "finished"])), max_size=12),
    avoided=st.sets(st.integers(0, 11)),
    seed=st.integers(0, 1000),
)
def test_only_the_fit_are_ever_drawn(rounds: list[tuple[int, str]], avoided: set[int], seed: int) -> None:
    members = [member(str(number), round=when, state=state) for number, (when, state) in enumerate(rounds)]
    avoid = {PeerId(str(number)) for number in avoided}
    fit = {m.peer_id for m in members if m.state == "training" and abs(m.standing.round - 10) <= 3} - avoid
    chosen = choose(random.Random(seed), members, OWN, 3, avoid)
    assert (chosen in fit) if fit else (chosen is None)


# --- reach ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "nat", "reach", "failed", "expected"),
    [
        ("cone", "cone", None, False, False),
        ("cone", "cone", None, True, True),
        ("cone", "cone", "punched", True, False),
        ("cone", "cone", "relayed", False, False),  # met just now: the punch is tried first
        ("cone", "symmetric", None, False, True),
        ("symmetric", "symmetric", "relayed", False, True),
        ("symmetric", "public", None, False, False),
        ("public", "symmetric", None, True, False),
        ("symmetric", "cone", "inbound", False, False),
        ("cone", "client", None, False, True),
        (None, "cone", None, False, False),
        (None, None, "relayed", False, True),
        (None, "public", "relayed", False, False),
    ],
)
def test_who_is_reached_only_through_a_relay(
    own: NatClass | None, nat: NatClass | None, reach: Reach | None, failed: bool, expected: bool
) -> None:
    one = replace(member("p"), nat=nat, reach=reach)
    assert needs_relay(one, own, {one.peer_id} if failed else ()) is expected


def test_carried_members_are_drawn_less_often_and_never_not_at_all() -> None:
    members = [member(f"p{number}") for number in range(4)]
    rng, draws = random.Random(3), 10_000
    counts = Counter(choose(rng, members, OWN, 3, set(), {PeerId("p0")}) for _ in range(draws))
    assert counts[PeerId("p0")] == pytest.approx(draws * RELAYED / (3 + RELAYED), rel=0.1)
    assert choose(rng, members[:1], OWN, 3, set(), {PeerId("p0")}) == "p0", "better a relay than nobody"


class Swarm:
    """100 members in three NAT classes, and who of them can be reached by whom only through a relay."""

    def __init__(self, seed: int, *, weighed: bool) -> None:
        self.rng = random.Random(seed)
        kinds: list[NatClass] = ["public"] * 30 + ["cone"] * 50 + ["symmetric"] * 20
        self.members = [replace(member(f"p{number}"), nat=kind) for number, kind in enumerate(kinds)]
        self.number = {one.peer_id: number for number, one in enumerate(self.members)}
        pairs = [(left, right) for left in self.members for right in self.members if left.peer_id < right.peer_id]
        failed = {pair: self.rng.random() < 0.3 for pair in ((left.peer_id, right.peer_id) for left, right in pairs)}
        self.carried: dict[PeerId, set[PeerId]] = {one.peer_id: set() for one in self.members}
        for left, right in pairs if weighed else []:
            if needs_relay(right, left.nat, {right.peer_id} if failed[left.peer_id, right.peer_id] else ()):
                self.carried[left.peer_id].add(right.peer_id)
                self.carried[right.peer_id].add(left.peer_id)

    def draw(self, number: int) -> int:
        own = self.members[number]
        others = self.members[:number] + self.members[number + 1 :]
        chosen = choose(self.rng, others, OWN, 3, set(), self.carried[own.peer_id])
        assert chosen is not None
        return self.number[chosen]

    def gap(self) -> float:
        """The second smallest eigenvalue of the Laplacian of the expected pairs, by power iteration: with it, the replicas'
        variance falls per pair like 1 - gap / (2 N) (Boyd et al., Randomized gossip algorithms, 2006). Uniform: N / (N - 1)."""
        count = len(self.members)
        drawn = [[0.0] * count for _ in range(count)]
        for one in self.members:
            row = [
                0.0 if one is other else RELAYED if other.peer_id in self.carried[one.peer_id] else 1.0
                for other in self.members
            ]
            drawn[self.number[one.peer_id]] = [weight / sum(row) for weight in row]
        pairs = [[(drawn[i][j] + drawn[j][i]) / 2 for j in range(count)] for i in range(count)]
        degrees = [sum(row) for row in pairs]
        bound = 2 * max(degrees)
        vector = [self.rng.gauss(0, 1) for _ in range(count)]
        for _ in range(120):
            mean = sum(vector) / count
            vector = [value - mean for value in vector]
            size = sum(value * value for value in vector) ** 0.5
            vector = [value / size for value in vector]
            image = [
                (bound - degrees[i]) * vector[i] + sum(weight * value for weight, value in zip(pairs[i], vector, strict=True))
                for i in range(count)
            ]
            top = sum(value * image_value for value, image_value in zip(vector, image, strict=True))
            vector = image
        return bound - top

    def variance_left(self, rounds: int) -> float:
        """The share of the replicas' variance after so many rounds, in each of which everybody draws a partner once."""
        count = len(self.members)
        values = [self.rng.gauss(0, 1) for _ in range(count)]
        before = _variance(values)
        for _ in range(rounds):
            for number in range(count):
                partner = self.draw(number)
                values[number] = values[partner] = (values[number] + values[partner]) / 2
        return _variance(values) / before


def _variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def test_mixing_across_nat_classes_is_nearly_as_quick_as_uniform_choice() -> None:
    uniform, weighed = Swarm(1, weighed=False), Swarm(1, weighed=True)
    assert uniform.gap() == pytest.approx(100 / 99, rel=1e-3)
    assert 0.65 < weighed.gap() / uniform.gap() < 0.85
    # And by simulation: the same contraction within a half more rounds.
    rounds = 6
    plain = sum(Swarm(seed, weighed=False).variance_left(rounds) for seed in range(4)) / 4
    longer = sum(Swarm(seed, weighed=True).variance_left(rounds * 3 // 2) for seed in range(4)) / 4
    assert longer < plain


def test_few_exchanges_load_a_relay() -> None:
    swarm = Swarm(2, weighed=True)
    drawn = [(number, swarm.draw(number)) for _ in range(20) for number in range(100)]
    carried = sum(swarm.members[partner].peer_id in swarm.carried[swarm.members[number].peer_id] for number, partner in drawn)
    assert carried / len(drawn) < 0.16


# --- hours, and what one that is always first or always there can have -------------------------------------


PEERS = [spoken_to(f"p{number}") for number in range(199)]
STEPS = 160
HOSTILE = {one.peer_id for one in PEERS[:60]}


def selection(probation: int = 0, members: Collection[Member] = ()) -> PeerSelection:
    """In a run that has `members`."""
    verified = sum(bool(member.group) for member in members)
    return PeerSelection(
        US, random.Random(1), Reputation(lambda _: None, probation), lambda: (verified, len(members) - verified)
    )


def shares(pick: Callable[[PeerSelection, Standing], PeerId | None], members: list[Member]) -> Counter[PeerId | None]:
    """The partners of a node that takes `STEPS` outer steps with whom `pick` says."""
    drawing, found = selection(0, members), Counter[PeerId | None]()
    for number in range(STEPS):
        peer = pick(drawing, Standing(number, 0, 0.0))
        found[peer] += 1
        if peer is not None:
            drawing.met(peer, members, offered=True)
            drawing._answered.clear()  # their share is another test's
    return found


def test_thirty_of_a_hundred_that_are_always_first_have_thirty_five_of_a_hundred_steps() -> None:
    def captured(drawing: PeerSelection, own: Standing) -> PeerId | None:
        now = [replace(one, standing=own, lead=0) for one in members]
        return next((peer for peer in sorted(HOSTILE) if drawing.admits(peer, now, own, 3, late=True)), None)

    for verified in (199, 24):
        heard_of = [member(one.peer_id) for one in [*PEERS[7:60], *PEERS[77:]]]
        members = PEERS if verified == 199 else [*PEERS[:7], *PEERS[60:77], *heard_of]
        found = shares(captured, members)
        assert 0.2 < 1 - found[None] / STEPS <= 0.35


def test_members_that_were_dialled_in_vain_are_not_believed_whatever_round_they_claim() -> None:
    met, unreached = PEERS[:24], [member(f"gone {number}") for number in range(60)]

    def believed(heard_of: int) -> int:
        drawing = PeerSelection(US, random.Random(1), Reputation(lambda _: None), lambda: (24, heard_of), lambda: [True] * 16)
        return drawing.count([*met, *unreached], [*met, *unreached])[1]

    assert (believed(0), believed(60)) == (24, 84)


def test_a_runs_first_rounds_are_no_more_the_attackers_than_later_ones() -> None:
    def used(node: PeerId, hostile: PeerId, rounds: int) -> int:
        """The exchanges of one that is always first: one an hour."""
        number, count = 0, 0
        while number < rounds:
            due = meet(node, hostile, number, 199)
            count, number = count + due, number + (16 if due else 1)
        return count

    nodes = [PeerId(f"honest {number}") for number in range(50)]
    for rounds in (16, 32, 160):
        assert 0.25 < sum(used(node, one, rounds) for node in nodes for one in HOSTILE) / len(nodes) / rounds < 0.37


def test_hours_are_the_same_for_both_and_come_to_every_pair() -> None:
    one, other = PeerId("one"), PeerId("other")
    hours = [meet(one, other, number, 199) for number in range(8000)]
    assert hours == [meet(other, one, number, 199) for number in range(8000)]
    assert 0.05 < sum(hours) / len(hours) < 0.1, "13 of 199"
    assert all(meet(one, other, number, 12) for number in range(100)), "in a small run it is always their hour"
    assert all(meet(one, other, number, 150) for number, due in enumerate(hours) if due), "who knows fewer knows the hours"


def test_no_partner_comes_twice_while_others_live() -> None:
    members, drawing = [spoken_to(f"p{number}") for number in range(8)], selection()
    partners: list[PeerId] = []
    for _ in range(100):
        peer = drawing.draw(members, OWN, 3, ())
        assert peer is not None
        assert peer not in partners[-4:]
        partners.append(peer)
        drawing.met(peer, members, offered=False)
        assert not drawing.admits(peer, members, OWN, 3, late=True)
    alone = members[:1]
    assert drawing.draw(alone, OWN, 3, ()) == alone[0].peer_id
    assert drawing.admits(alone[0].peer_id, alone, OWN, 3, late=False), "of two nodes each is the other's partner, always"


def test_own_and_answered_steps_alternate_until_own_draws_fail() -> None:
    members, drawing = [member(f"p{number}") for number in range(12)], selection()
    for one in members[:6]:
        assert drawing.admits(one.peer_id, members, OWN, 3, late=False)
        drawing.met(one.peer_id, members, offered=True)
    assert not drawing.admits(PeerId("p7"), members, OWN, 3, late=False)
    assert drawing.admits(PeerId("p7"), members, OWN, 3, late=True)
    for one in members[6:9]:
        drawing.met(one.peer_id, members, offered=False)
    assert drawing.admits(PeerId("p11"), members, OWN, 3, late=False)


def test_in_a_large_run_an_hour_that_is_not_theirs_is_not_taken_though_nobody_else_is_free() -> None:
    drawing, outside = selection(), [one for one in PEERS if not meet(US, one.peer_id, OWN.round, len(PEERS))]
    assert not any(drawing.admits(one.peer_id, PEERS, OWN, 3, late=True) for one in outside)
    busy = {one.peer_id for one in PEERS} - {one.peer_id for one in outside}
    assert drawing.draw(PEERS, OWN, 3, busy) is None
    few = outside[:FEW]
    assert drawing.draw(few, OWN, 3, ()) is not None


def test_who_would_say_no_since_its_hour_is_over_or_not_begun_by_its_own_round_is_drawn_after_all_others() -> None:
    """Of 48 nodes one lost 111 s of two phases so: 14 partners said "others come first"."""
    own = Standing(40, 0, 0.0)
    drawing, ahead = (
        selection(),
        [replace(spoken_to(f"p{number}"), lead=3, standing=Standing(43, 0, 0.0)) for number in range(200)],
    )
    drawing.size = lambda: (200, 0)
    ours = [one for one in ahead if meet(US, one.peer_id, own.round, 200)]
    both = [one for one in ours if meet(US, one.peer_id, own.round + 3, 200)]
    only_ours = [one for one in ours if one not in both]
    assert both
    assert only_ours
    surely = {one.peer_id for one in both if meet(US, one.peer_id, own.round, 400)}
    assert {drawing.draw(ahead, own, 3, ()) for _ in range(500)} == surely
    assert {drawing.draw(ahead, own, 3, surely) for _ in range(500)} == {one.peer_id for one in both} - surely
    left = {drawing.draw(ahead, own, 3, {one.peer_id for one in both}) for _ in range(500)}
    assert left == {one.peer_id for one in only_ours}, "what we know of its round may be old"


def test_who_meets_us_though_it_counts_twice_our_members_is_drawn_before_others() -> None:
    """One of 24 nodes counted 16 members where others counted 30: for a minute nine partners said "others come first"."""
    members, drawing = [spoken_to(f"p{number}") for number in range(16)], selection()
    drawing.size = lambda: (16, 0)
    surely = {one.peer_id for one in members if meet(US, one.peer_id, OWN.round, 32)}
    assert 0 < len(surely) < 16
    assert {drawing.draw(members, OWN, 3, ()) for _ in range(500)} == surely
    left = {drawing.draw(members, OWN, 3, surely) for _ in range(500)}
    assert left == {one.peer_id for one in members} - surely


def test_those_that_are_banned_take_up_no_hours() -> None:
    """Beside 8 banned of 32 a fifth of the steps found nobody."""
    members, drawing = [spoken_to(f"p{number}") for number in range(32)], selection()
    drawing.size, banned = lambda: (32, 0), {PeerId(f"p{number}") for number in range(16)}
    outside = [one for one in members[16:] if not meet(US, one.peer_id, OWN.round, 32)]
    assert outside
    assert drawing.draw(outside, OWN, 3, ()) is None, "it is not their hour"
    drawing.banned = lambda: banned
    surely = {one.peer_id for one in members[16:] if meet(US, one.peer_id, OWN.round, 32)}
    rest = {one.peer_id for one in members[16:]} - surely
    drawn = [{drawing.draw(members, OWN, 3, avoid) for _ in range(500)} for avoid in ((), surely)]
    assert drawn == [surely, rest], "nobody else, and all of these"
    assert all(drawing.admits(one.peer_id, members, OWN, 3, late=False) for one in outside)


def test_an_address_group_weighs_as_much_as_four_and_has_four_of_sixteen_answered_steps() -> None:
    crowd = [replace(member(f"c{number}"), group="203.0.113.0/24") for number in range(6)]
    others = [replace(member(f"o{number}"), group=f"o{number}") for number in range(6)]
    drawing, drawn = selection(), Counter[PeerId | None]()
    for _ in range(6000):
        drawn[drawing.draw([*crowd, *others], OWN, 3, ())] += 1
    assert sum(drawn[one.peer_id] for one in crowd) == pytest.approx(6000 * 4 / 10, rel=0.08)
    for one in crowd[:4]:
        assert drawing.admits(one.peer_id, [*crowd, *others], OWN, 3, late=False)
        drawing.met(one.peer_id, [*crowd, *others], offered=True)
    assert not drawing.admits(crowd[4].peer_id, [*crowd, *others], OWN, 3, late=False)
    assert drawing.admits(crowd[4].peer_id, [*crowd, *others], OWN, 3, late=True)
    assert drawing.admits(crowd[4].peer_id, crowd, OWN, 3, late=False), "where all are of one group it is nobody's share"


def test_who_is_set_apart_is_as_if_it_were_not_there() -> None:
    """Rests follow those that are left, and hours where nobody else is free: or in a run full of such nobody would be met."""
    members, apart = [spoken_to(f"p{number}") for number in range(40)], {PeerId(f"p{number}") for number in range(30)}
    drawing, left = selection(0, members), {PeerId(f"p{number}") for number in range(30, 40)}
    avoided: set[PeerId] = set()
    while (peer := drawing.draw(members, OWN, 3, avoided, apart=apart)) is not None:
        avoided.add(peer)
    assert avoided == left
    assert all(drawing.admits(peer, members, OWN, 3, apart, late=True) for peer in left)
    many = [spoken_to(f"p{number}") for number in range(80)]
    drawing, others = selection(0, many), [PeerId(f"p{number}") for number in range(30, 80)]
    assert all(drawing.admits(peer, many, OWN, 3, apart, late=True) for peer in others), "own draws failed: whoever is left"
    assert not all(drawing.admits(peer, many, OWN, 3, apart, late=False) for peer in others)
    drawing = selection(0, members)
    for number in range(30, 38):
        drawing.met(PeerId(f"p{number}"), members, offered=False)
    rested = {drawing.draw(members, OWN, 3, set(), apart=apart) for _ in range(300)}
    assert rested
    assert rested <= left
    assert PeerId("p37") not in rested


def test_influence_grows_with_committed_exchanges_and_falls_with_faults() -> None:
    drawing = selection(probation=3)
    friend, stranger, liar = (PeerId(name) for name in ("friend", "stranger", "liar"))
    members = [replace(member(peer), group=peer) for peer in (friend, stranger, liar)]
    for peer in (friend, liar):
        for _ in range(3):
            drawing.reputation.judge(peer, Conduct.COMMITTED, 0.0)
    drawing.reputation.judge(liar, Conduct.REJECTED, 0.0)
    assert [drawing.reputation.influence(peer) for peer in (friend, stranger, liar)] == [1.0, 0.25, 0.5]
    drawn = Counter(drawing.draw(members, OWN, 3, ()) for _ in range(7000))
    assert drawn[friend] / drawn[stranger] == pytest.approx(4, rel=0.15)
    fresh = selection(probation=3)
    drawn = Counter(fresh.draw(members, OWN, 3, ()) for _ in range(7000))
    assert max(drawn.values()) < 1.1 * min(drawn.values()), "in a fresh swarm all are strangers, and alike"


def test_who_is_only_heard_of_is_drawn_less_often() -> None:
    members = [replace(member("spoken to"), group="x"), member("heard of")]
    rng = random.Random(5)
    drawn = Counter(PeerSelection(US, rng, Reputation(lambda _: None)).draw(members, OWN, 3, ()) for _ in range(5000))
    assert drawn[PeerId("spoken to")] / drawn[PeerId("heard of")] == pytest.approx(4, rel=0.15)


# --- members that somebody invented --------------------------------------------------------------------------


class Peer:
    """A node of a run of `real` ones, that was also told of a thousand that nobody ever spoke to: all that its table still
    holds of them are in its round, and as many as there can be have their hour, as ids are free to choose."""

    def __init__(self, own: PeerId, names: list[PeerId], rng: random.Random, invented: int) -> None:
        self.own, self.number, self.due, self.began, self.tries = own, 0, 1 + rng.random(), 0.0, 0
        self.answered = deque([True] * len(names), 16)
        self.rng = rng
        self.selection = PeerSelection(
            own, rng, Reputation(lambda _: None), lambda: (len(self._real), invented), lambda: self.answered
        )
        self.avoid: dict[PeerId, float] = {}
        self._real = [spoken_to(name) for name in names if name != own]
        self._pool = [PeerId(f"i{one}") for one in range(invented)]
        self._members = (-1, self._real)

    @property
    def standing(self) -> Standing:
        return Standing(self.number, 0, 0.0)

    @property
    def members(self) -> list[Member]:
        if self._members[0] != self.number:
            ground = sorted(self._pool, key=lambda peer: not meet(self.own, peer, self.number, len(self._pool)))
            told = [*self._real, *map(member, ground[:120])]
            self._members = self.number, [replace(one, standing=self.standing, lead=0) for one in told]
        return self._members[1]

    def draw(self, now: float) -> PeerId | None:
        self.avoid = {peer: until for peer, until in self.avoid.items() if until > now}
        drawn = self.selection.draw(self.members, self.standing, 3, self.avoid)
        self.tries = self.tries + 1 if drawn is not None else 3
        return drawn

    def admits(self, peer: PeerId, now: float) -> bool:
        return self.selection.admits(peer, self.members, self.standing, 3, late=now >= self.due and self.tries >= 3)

    def stepped(self, now: float, partner: Peer | None, *, offered: bool) -> None:
        if partner is not None:
            self.selection.met(partner.own, self.members, offered=offered)
        self.number, self.tries, self.began = self.number + 1, 0, now
        self.due = now + self.rng.uniform(0.9, 1.1)
        self.answered.extend([False] * 2 if self._pool else [])  # whom its gossip dials
        self.avoid.clear()


def run_of(real: int, invented: int, steps: int) -> tuple[float, float, Counter[tuple[PeerId, PeerId]]]:
    """Draws of a step, the share of steps taken alone, and who met whom. As in outer.loop, whoever is past half of its phase
    answers, who refuses is asked again at its boundary, and one that is not there is not asked again in this step."""
    rng, names = random.Random(7), [PeerId(f"p{number}") for number in range(real)]
    peers = {name: Peer(name, names, rng, invented) for name in names}
    draws, alone, pairs = 0, 0, Counter[tuple[PeerId, PeerId]]()
    while 2 * pairs.total() + alone < steps:
        one = min(peers.values(), key=lambda peer: peer.due)
        now, partner = one.due, None
        while partner is None and (name := one.draw(now)) is not None:
            draws += 1
            other = peers.get(name)
            if other is None:
                one.avoid[name] = math.inf
                one.answered.append(False)
            elif other.due - now <= 0.5 and other.admits(one.own, now):
                partner = other
            else:
                one.avoid[name] = max(now, other.due - 0.5 if other.due - now > 0.5 else other.due) + 0.05
        if partner is None and (waits := [until for until in one.avoid.values() if until < math.inf]) and now < one.began + 3:
            one.tries, one.due = 3, min(waits)
            continue
        alone += partner is None
        for peer, met in ((one, partner), (partner, one)):
            if peer is not None:
                peer.stepped(now, met, offered=peer is partner)
        if partner is not None:
            pairs[min(one.own, partner.own), max(one.own, partner.own)] += 1
    return draws / steps, alone / steps, pairs


@pytest.mark.parametrize("real", [2, 3, 9, 20])
def test_a_thousand_invented_members_cost_a_run_next_to_nothing(real: int) -> None:
    _, calm_alone, _ = run_of(real, 0, 20 * real)
    draws, alone, pairs = run_of(real, 1000, 20 * real)
    assert draws <= 2.0
    assert alone <= calm_alone + (0.02 if real <= 9 else 0.2), "until 16 dials were in vain a larger run may be larger yet"
    if real == 3:
        assert min(pairs.values()) >= pairs.total() / 5, "nobody is left out"
    assert len(pairs) >= min(real * (real - 1) // 2, 3 * real), "nor do they part into pairs"


def test_the_offer_of_a_newcomer_that_is_only_heard_of_is_taken_in_its_hour_however_large_the_run() -> None:
    drawing, newcomer = selection(), PeerId("newcomer")
    drawing.size, drawing.answers = lambda: (40, 160), lambda: [True] * 8 + [False] * 2
    members = [*PEERS[:40], *(member(one.peer_id) for one in PEERS[40:127]), member(newcomer)]
    taken = [drawing.admits(newcomer, members, Standing(number, 0, 0.0), 3, late=False) for number in range(10, 4000)]
    assert taken == [meet(US, newcomer, number, 200) for number in range(10, 4000)]


def test_the_offer_of_one_that_nobody_spoke_to_is_no_more_welcome_for_what_others_invent() -> None:
    drawing, stranger = selection(), PeerId("stranger")
    drawing.size, drawing.answers = lambda: (20, 1001), lambda: [False] * 16
    members, rounds = [*PEERS[:20], member(stranger)], [Standing(number, 0, 0.0) for number in range(20, 400)]
    assert drawing.count(members, members) == (1021, 20)
    for late in (False, True):
        taken = [drawing.admits(stranger, members, one, 3, late=late) for one in rounds]
        assert taken == [meet(US, stranger, one.round, 1021) for one in rounds]
        assert sum(taken) < 0.1 * len(rounds)


def test_one_only_heard_of_comes_before_the_same_partner_again() -> None:
    """Two of three real nodes, whose exchanges left no pause, met four times in a row: the third had come to them, so that both
    had only heard of it, and it found neither of them free."""
    members = [spoken_to("met last"), member("heard of")]
    selection = PeerSelection(US, random.Random(2), Reputation(lambda _: None), lambda: (1, 1))
    first = Counter(selection.draw(members, OWN, 3, ()) for _ in range(1000))
    assert first[PeerId("met last")] > 700
    selection.met(PeerId("met last"), members, offered=True)
    assert {selection.draw(members, OWN, 3, ()) for _ in range(1000)} == {"heard of"}
    assert selection.draw(members, OWN, 3, {PeerId("heard of")}) == "met last"
    selection.answers = lambda: [False] * 4 + [True]
    doubted = Counter(selection.draw(members, OWN, 3, ()) for _ in range(1000))
    assert doubted[PeerId("met last")] > 700, "they may be invented, where few answer"
