"""What strangers may have: each limit at its bound, for a peer and for all that come from one address."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from nolocod.identity import PeerId
from nolocod.p2p.limits import rate_limits
from nolocod.p2p.limits.rate_limits import (
    ALL,
    RARE,
    DialLimiter,
    Rate,
    StreamLimiter,
    TokenBuckets,
    Windows,
)

if TYPE_CHECKING:
    import pytest

HOME, OFFICE = "192.0.2.1", "198.51.100.7"


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    buckets = TokenBuckets(Rate(2.0, 5))
    assert [buckets.take("one", 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert buckets.take("another", 0.0), "each name has its own"
    assert not buckets.take("one", 0.49)
    assert buckets.take("one", 0.5)
    assert [buckets.take("one", 1000.0) for _ in range(6)] == [True] * 5 + [False], "never more than the burst"


@given(st.lists(st.floats(0, 30), min_size=1, max_size=100))
def test_in_any_span_a_window_has_so_many_and_no_more(gaps: list[float]) -> None:
    windows, now, taken = Windows(4, 60.0), 0.0, []
    for gap in gaps:
        now += gap
        recent = [at for at in taken if at > now - 60]
        assert windows.full("one", now) == (len(recent) == 4)
        assert not windows.full("another", now), "each name has its own"
        if windows.take("one", now):
            taken.append(now)
            assert len(recent) < 4


def test_windows_have_room_for_so_many_names_however_often_each_came() -> None:
    windows = Windows(2, 60.0)
    for number in range(rate_limits._KEPT):
        assert windows.take(str(number), 0.0)
    assert windows.full("one more", 59.0)
    assert windows.take("7", 59.0), "those that are known still have theirs"
    assert not windows.full("one more", 60.0)


@given(st.lists(st.floats(0, 3), min_size=1, max_size=200))
def test_over_any_span_no_more_than_burst_and_rate_together(gaps: list[float]) -> None:
    buckets, now, taken = TokenBuckets(Rate(1.5, 4)), 0.0, []
    for gap in gaps:
        now += gap
        if buckets.take("one", now):
            taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= 4 + 1.5 * (taken[last] - taken[first]) + 1e-6


def test_thousands_of_names_cost_bounded_memory_and_full_buckets_none() -> None:
    buckets = TokenBuckets(Rate(1.0, 3))
    for number in range(5000):
        buckets.take(f"name-{number}", 0.0)
    assert len(buckets) == 1024
    assert not all(buckets.take("name-4999", 0.0) for _ in range(3)), "of the latest it is remembered what they took"
    buckets.take("later", 10.0)
    assert len(buckets) == 1


def test_a_debt_is_paid_before_more_is_had_and_is_no_more_than_a_burst() -> None:
    buckets = TokenBuckets(Rate(1.0, 4))
    buckets.charge("one", 100, 0.0)
    assert not buckets.take("one", 4.9)
    assert buckets.take("one", 5.0)
    assert buckets.take("another", 0.0)


# --- streams ----------------------------------------------------------------------------------------------


def test_a_peer_has_its_share_and_a_source_four_times_as_much() -> None:
    limiter = StreamLimiter(Rate(1.0, 2))

    def ask(peer: int, source: str | None = HOME, now: float = 0.0) -> str | None:
        return limiter.objection(PeerId(f"peer-{peer}"), source, now)

    assert [ask(0) for _ in range(3)] == [None, None, "peer"]
    assert [ask(number) for number in range(1, 10)] == [None] * 6 + ["source"] * 3
    assert ask(30, OFFICE) is None
    assert ask(31, None) is None, "one that has a share of its own"
    assert ask(40, now=1.0) is None


def test_who_goes_on_though_its_source_had_enough_floods() -> None:
    """Sixty identities of one address, each within its rate, would have us refuse more than one is let."""
    limiter = StreamLimiter(Rate(10.0, 60))
    while limiter.objection(PeerId(f"peer-{random.random()}"), HOME, 0.0) is None:
        pass
    asked = [limiter.objection(PeerId("peer"), HOME, 0.0) for _ in range(21)]
    assert asked == ["source"] * 20 + ["peer"], "a refused one counts for three"


def test_an_honest_node_behind_the_busiest_address_is_never_blamed() -> None:
    """Twice a second for ten seconds on two protocols, and on one for ten minutes, while others take all that there is."""
    every, common, rare = StreamLimiter(ALL), StreamLimiter(), StreamLimiter(RARE)
    now, asked = 0.0, set[str | None]()
    for number in range(1200):
        now += 0.5
        for other in range(60):
            for limiter in (every, common, rare):
                limiter.objection(PeerId(f"peer-{other}"), HOME, now)
        used = (every, every, common, rare) if number < 20 else (every, common)
        asked |= {limiter.objection(PeerId("honest"), HOME, now) for limiter in used}
    assert asked == {None, "source"}


# --- dialling ---------------------------------------------------------------------------------------------


def test_a_strangers_address_is_knocked_at_in_vain_so_often_and_no_more() -> None:
    """However many members say that they are there, on whatever ports."""
    dial_limiter = DialLimiter()
    dialled = sum(dial_limiter.may(HOME, float(second)) for second in range(600) for _ in range(10))
    assert dialled <= 40 + 0.5 * 600
    assert dial_limiter.may(OFFICE, 600.0)


def test_many_at_once_are_no_more_than_one_after_another() -> None:
    dial_limiter = DialLimiter(unknown=Rate(0.1, 3))
    assert [dial_limiter.may(HOME, 0.0) for _ in range(5)] == [True] * 3 + [False] * 2


def test_where_one_of_ours_answered_more_may_fail() -> None:
    dial_limiter = DialLimiter(unknown=Rate(0.1, 2), known=Rate(1.0, 5))
    assert [dial_limiter.may(HOME, 0.0) for _ in range(3)] == [True, True, False]
    dial_limiter.answered(HOME, 0.0)
    assert [dial_limiter.may(HOME, 0.0) for _ in range(6)] == [True] * 5 + [False]
    assert dial_limiter.may(HOME, 1.0)


def test_who_lost_a_race_did_not_keep_us_waiting_in_vain() -> None:
    """Members of one household, all of them faster by IPv6: the address that they share is there for the next one."""
    dial_limiter = DialLimiter(unknown=Rate(0.1, 2), known=Rate(1.0, 5))
    for _ in range(5):
        assert dial_limiter.may(HOME, 0.0)
        dial_limiter.overtaken(HOME, 0.0)
    assert [dial_limiter.may(HOME, 0.0) for _ in range(3)] == [True, True, False]


def test_who_chooses_the_races_has_us_knock_no_oftener_than_where_one_of_ours_answered() -> None:
    """A member may name its own address beside a stranger's, and win each time."""
    dial_limiter = DialLimiter()
    dialled = 0
    for second in range(600):
        for _ in range(20):
            if dial_limiter.may(HOME, float(second)):
                dial_limiter.overtaken(HOME, float(second))
                dialled += 1
    assert dialled <= 40 + 200 + (0.5 + 5) * 600


def test_what_is_answered_costs_nothing() -> None:
    dial_limiter = DialLimiter(unknown=Rate(0.1, 2), known=Rate(0.1, 2))
    for _ in range(50):
        assert dial_limiter.may(HOME, 0.0)
        dial_limiter.answered(HOME, 0.0)


def test_what_answered_is_remembered_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "_KEPT", 8)
    dial_limiter = DialLimiter(unknown=Rate(0.1, 1), known=Rate(1.0, 5))
    for number in range(100):
        dial_limiter.answered(f"10.0.0.{number}", 0.0)
    assert len(dial_limiter._answered) == 8
