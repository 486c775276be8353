"""What counts as given, and what a pair that lies may add."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import ProtocolError
from nolocod.identity import Identity
from nolocod.p2p.exchange.contributions import ALONE, AWAY, FASTEST, PARTNERS, PEERS, SKEW, Tally, points
from tests.support.receipts import exchanged, side, signed

if TYPE_CHECKING:
    from nolocod.identity import PeerId
    from nolocod.observe.events import Contribution

NODES = [Identity.from_secret((number + 1).to_bytes(32, "big")) for number in range(8)]
HOUR = 3600.0


def of(tally: Tally, who: Identity = NODES[0]) -> Contribution:
    return next(one for one in tally.contributions() if one.peer_id == who.peer_id)


def around(seconds: float, count: int = 4, every: float = 600.0) -> Tally:
    """The first of `count` nodes exchanges with each of the others in turn."""
    tally = Tally()
    for number in range(int(seconds / every) + 1):
        tally.add(points(exchanged(NODES[0], NODES[1 + number % (count - 1)], number * every)))
    return tally


def test_what_was_trained_between_exchanges_counts_and_the_first_one_is_where_it_begins() -> None:
    tally = Tally()
    tally.add(points(exchanged(NODES[0], NODES[1], 5000.0)))
    assert (of(tally).tokens, of(tally).exchanges) == (0, 1), "what it had then may be a donor's"
    tally.add(points(exchanged(NODES[2], NODES[0], 5600.0)))
    tally.add(points(exchanged(NODES[0], NODES[1], 6000.0)))
    given = of(tally)
    assert (given.tokens, given.seconds, given.exchanges, given.partners) == (100_000, 1000.0, 3, 2)
    assert of(tally, NODES[1]).tokens == 100_000, "a receipt shows what both gave"


def test_a_tally_of_any_of_them_comes_to_the_same() -> None:
    whole = [exchanged(NODES[0], NODES[1 + number % 5], number * 100.0) for number in range(101)]
    some, reordered = [*whole[::7], whole[-1]], whole[::-1]
    found = []
    for receipts in (whole, some, reordered):
        tally = Tally()
        tally.add_all(map(points, receipts))
        found.append((of(tally).tokens, of(tally).seconds))
    assert found == [(1_000_000, 10_000.0)] * 3


def test_an_old_receipt_counts_once_and_not_again() -> None:
    tally = around(HOUR)
    before = of(tally)
    for number in range(6):
        tally.add(points(exchanged(NODES[0], NODES[1 + number % 3], number * 600.0)))
    assert of(tally) == before


def test_nothing_counts_of_the_time_in_which_a_node_was_away() -> None:
    tally = Tally()
    for time in (0.0, AWAY + 1, AWAY + 601):
        tally.add(points(exchanged(NODES[0], NODES[1], time)))
    assert (of(tally).tokens, of(tally).seconds) == (60_000, 600.0)


def test_a_step_back_to_a_checkpoint_costs_what_it_lost_and_no_more() -> None:
    tally = Tally()
    for time, tokens in ((0.0, 0), (600.0, 60_000), (1200.0, 30_000), (1800.0, 90_000)):
        sides = side(NODES[0], time, int(time), tokens), side(NODES[1], time, int(time), int(100 * time))
        tally.add(points(signed(NODES[0], NODES[1], sides)))
    assert of(tally).tokens == 120_000


def test_tokens_without_a_round_between_them_do_not_count() -> None:
    tally = Tally()
    for time in (0.0, 600.0):
        sides = side(NODES[0], time, 7, int(100 * time)), side(NODES[1], time, 7, 0)
        tally.add(points(signed(NODES[0], NODES[1], sides)))
    assert of(tally).tokens == 0


def test_a_receipt_counts_if_both_clocks_say_the_same() -> None:
    assert len(points(exchanged(NODES[0], NODES[1], 900.0, skew=SKEW))) == 2
    assert points(exchanged(NODES[0], NODES[1], 900.0, skew=SKEW + 1)) == ()
    beyond = side(NODES[0], 900.0, 1, 1)
    beyond.standing.time_ms = (1 << 64) - 1  # a partner's word: it must not fail an exchange that was ours
    assert points(signed(NODES[0], NODES[1], (beyond, side(NODES[1], 900.0, 1, 1)))) == ()
    untold = side(NODES[0], 900.0, 1, 1)
    untold.standing.ClearField("time_ms")  # an older release
    assert points(signed(NODES[0], NODES[1], (untold, side(NODES[1], 900.0, 1, 1)))) == ()


@pytest.mark.parametrize("number", ["round", "tokens"])
def test_numbers_beyond_all_measure_are_refused(number: str) -> None:
    told = side(NODES[0], 900.0, 1, 1)
    setattr(told.standing, number, 1 << 62)
    with pytest.raises(ProtocolError, match="too large"):
        points(signed(NODES[0], NODES[1], (told, side(NODES[1], 900.0, 1, 1))))


def test_a_receipt_of_one_peer_with_itself_is_none() -> None:
    with pytest.raises(ProtocolError, match="with itself"):
        points(exchanged(NODES[0], NODES[0], 900.0))


def test_one_partner_vouches_for_a_day_and_as_much_as_all_others() -> None:
    alone = around(3 * ALONE, count=2)
    assert of(alone).seconds == ALONE
    assert of(alone).tokens == pytest.approx(100 * ALONE)
    tally = around(3 * ALONE, count=2)
    for number in range(1, int(ALONE / 600) + 1):
        time = 3 * ALONE + number * 600.0
        tally.add(points(exchanged(NODES[0], NODES[2 + number % 2], time)))
    assert of(tally).seconds == 3 * ALONE, "a day of the two others, as much as that, and a day"
    assert of(around(3 * ALONE, count=4)).seconds == 3 * ALONE


def test_nobody_trained_much_faster_than_the_others() -> None:
    tally = Tally()
    for number in range(7):
        for one, other in pairwise(NODES[1:7]):
            tally.add(points(exchanged(one, other, number * 600.0 + NODES.index(one))))
        tally.add(points(exchanged(NODES[0], NODES[7], number * 600.0, rate=1e9, others=1e9)))
    assert of(tally).tokens == pytest.approx(FASTEST * 100 * 3600)
    assert of(tally, NODES[3]).tokens == pytest.approx(100 * 3600, rel=0.01)


def test_what_is_held_of_nodes_and_of_partners_has_a_limit() -> None:
    many = [Identity.from_secret((number + 1000).to_bytes(32, "big")) for number in range(PARTNERS + 40)]
    tally = Tally()
    for number, one in enumerate(many):
        tally.add(points(exchanged(NODES[0], one, number * 600.0)))
    assert of(tally).partners == PARTNERS
    assert of(tally).tokens == 100 * 600 * (len(many) - 1), "and nothing is lost by it"


def test_one_more_node_than_are_counted_takes_the_place_of_who_gave_least_and_never_the_readers() -> None:
    """Whoever signs with key after key would else be all that is counted, for ever."""
    own, most = NODES[0], around(HOUR)
    account = most._accounts[NODES[1].peer_id]
    tally = Tally(own.peer_id)
    tally.add(points(exchanged(own, NODES[7], 0.0)))
    tally._accounts |= {f"{number}": account for number in range(PEERS - 2)}  # type: ignore[misc]  # not ids
    tally.add(points(exchanged(NODES[1], NODES[2], 0.0)))
    assert len(tally._accounts) == PEERS
    assert {NODES[2].peer_id, own.peer_id} <= tally._accounts.keys()
    assert NODES[7].peer_id not in tally._accounts


def test_members_whom_the_reader_has_not_met_do_not_set_the_pace() -> None:
    tally = Tally()
    for number in range(7):
        for one, other in pairwise(NODES[:3]):
            tally.add(points(exchanged(one, other, number * 600.0 + NODES.index(one))))
        for one, other in pairwise(NODES[3:]):
            tally.add(points(exchanged(one, other, number * 600.0 + NODES.index(one), rate=0.1, others=0.1)))
    honest = {one.peer_id for one in NODES[:3]}

    def given(judges: set[PeerId] | None) -> int:
        return sum(one.tokens for one in tally.contributions(judges=judges) if one.peer_id in honest)

    assert given(honest) == pytest.approx(3 * 100 * 3600, rel=0.01)
    assert given(None) < 0.01 * given(honest), "five of eight are invented: as judges they take nearly all from the others"


def test_a_few_seconds_are_no_pace() -> None:
    tally = around(HOUR)
    for number in range(2):
        for one, other in ((4, 5), (6, 7)):
            tally.add(points(exchanged(NODES[one], NODES[other], number * 10.0, rate=1e-3, others=1e-3)))
    assert of(tally).tokens == pytest.approx(100 * HOUR)
