"""Partners are drawn uniformly among those that may be one, and among no others."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nolocod.identity import PeerId
from nolocod.p2p.partners import choose
from nolocod.terms import Member, Standing

OWN = Standing(round=10, tokens=0, loss=0.0)


def member(name: str, *, round: int = 10, state: str = "training") -> Member:
    return Member(PeerId(name), Standing(round, 0, 0.0), state, (), "0", 0.0, None, lead=round - OWN.round)


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
