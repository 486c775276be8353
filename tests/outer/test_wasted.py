"""What partners may take of a node's time for nothing, alone and together."""

from __future__ import annotations

from nolocod.identity import PeerId
from nolocod.outer.wasted import WastedTime

ONE, OTHER = PeerId("one"), PeerId("other")


def test_partners_together_have_a_sixteenth_whatever_each_took() -> None:
    wasted = WastedTime()
    for number in range(4):
        wasted.charge(PeerId(f"p{number}"), 6.0, 0.0)
    assert wasted.wary(0.0)
    assert not any(wasted.by(peer, 0.0) for peer in wasted.peers)
    assert wasted.apart(0.0) == {PeerId(f"p{number}") for number in range(4)}
    assert wasted.wary(59.0)
    assert not wasted.wary(61.0), "24 s are paid for, 20 s aside"
    assert not wasted.apart(61.0)


def test_what_is_little_sets_nobody_apart_and_lasts_until_all_is_paid() -> None:
    wasted = WastedTime()
    wasted.charge(ONE, 5.0, 0.0)
    for _ in range(30):
        wasted.charge(OTHER, 0.9, 0.0)
    assert wasted.apart(0.0) == {ONE}
    assert wasted.apart(150.0) == {ONE}, "its own part is paid for, the rest is not"
    wasted.charge(ONE, 2.0, 500.0)
    assert not wasted.wary(500.0), "all began anew"


def test_one_alone_is_left_after_four_minutes() -> None:
    wasted = WastedTime()
    wasted.charge(ONE, 239.0, 0.0)
    assert not wasted.by(ONE, 0.0)
    wasted.charge(ONE, 2.0, 0.0)
    assert wasted.by(ONE, 0.0)
    assert not wasted.by(OTHER, 0.0)
    assert not wasted.by(ONE, 16.0)


def test_those_set_apart_are_so_many_and_no_more() -> None:
    wasted = WastedTime()
    for number in range(3000):
        wasted.charge(PeerId(f"p{number}"), 9.0, 0.0)
    assert len(wasted.peers) == 1024
    assert PeerId("p2999") in wasted.peers


def test_half_of_our_time_may_go_into_asking_who_is_busy_and_says_so_soon() -> None:
    """Who waits for one behind a slow line asks some dozens of times a minute, and an answer takes 0.2 to 0.7 s there."""

    def wary_after(period: float, answer: float) -> bool:
        wasted = WastedTime()
        for number in range(1000):
            wasted.charge(ONE, answer, number * period, busy=True)
        return wasted.wary(1000 * period)

    assert not wary_after(2.0, 0.9)
    assert not wary_after(1.2, 0.5)
    assert wary_after(1.2, 0.9), "hardly any time is left for others' offers"
    assert wary_after(20.0, 1.5), "it kept us waiting"
