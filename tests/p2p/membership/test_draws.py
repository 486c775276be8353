"""Drawn pairs: both sides agree, nobody chooses his victim, and whoever is alone with few may offer to all."""

from __future__ import annotations

from collections import Counter
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import NotDrawnError
from nolocod.identity import PeerId
from nolocod.p2p.membership import draws as module
from nolocod.p2p.membership.draws import Draw, luck
from nolocod.proto.types import Accept, Answer, Busy, Member, Offer, Refuse, Standing

RUN = "ab" * 32


def members(count: int, *, state: str = "training") -> list[Member]:
    return [Member(PeerId(f"p{number}"), Standing(5, 0, 1.0), state, (), "", 0.0, None) for number in range(count)]


def draw(own: str, draws: int = 8) -> Draw:
    return Draw(RUN, PeerId(own), draws)


@given(st.text("abc", min_size=1), st.text("abc", min_size=1), st.integers(0, 1 << 40))
def test_both_of_a_pair_have_the_same_luck(one: str, other: str, round: int) -> None:
    found = luck(RUN, round, PeerId(one), PeerId(other))
    assert found == luck(RUN, round, PeerId(other), PeerId(one))
    assert 0 <= found < 1
    assert found != luck("cd" * 32, round, PeerId(one), PeerId(other))


def test_about_so_many_are_drawn_for_each_and_all_in_turn() -> None:
    own, everybody = draw("me"), members(64)
    times: Counter[str] = Counter()
    for round in range(400):
        times.update({member.peer_id for member in everybody} - own.undrawn(everybody, round))
    assert 8 - 0.5 < times.total() / 400 < 8 + 0.5
    expected = times.total() / 64
    statistic = sum((times[member.peer_id] - expected) ** 2 / expected for member in everybody)
    assert statistic < 92.0  # 99 % quantile of chi-square with 63 degrees of freedom


def test_among_few_or_where_the_run_draws_nobody_all_may_offer() -> None:
    for own, count in ((draw("me", 8), 8), (draw("me", 0), 500)):
        assert own.undrawn(members(count), 3) == set()
        assert own.objection(PeerId("stranger"), 3, partial(members, count)) is None


def test_only_those_who_train_are_counted() -> None:
    everybody = [*members(8), *members(100, state="paused")[8:]]
    assert draw("me").undrawn(everybody, 1) == set()


def test_who_is_drawn_by_one_side_is_let_pass_by_the_other_though_it_knows_twice_as_many() -> None:
    own = draw("me")
    for round in range(200):
        for member in members(30):
            if member.peer_id not in own.undrawn(members(30), round):
                assert draw(member.peer_id).objection(PeerId("me"), round, partial(members, 60)) is None


def test_a_stranger_may_offer_in_few_rounds_and_is_told_so_in_the_others() -> None:
    found = [draw("victim").objection(PeerId("attacker"), round, partial(members, 128)) for round in range(2000)]
    refused = [objection for objection in found if objection is not None]
    assert all(isinstance(objection, NotDrawnError) for objection in refused)
    assert "round" in refused[0].cause
    assert 0.1 < 1 - len(refused) / 2000 < 0.15  # twice 8 of 128


def test_a_lucky_round_is_used_once_and_rounds_do_not_go_back() -> None:
    victim, attacker = draw("victim"), PeerId("attacker")
    lucky = [round for round in range(500) if victim.objection(attacker, round, partial(members, 128)) is None]
    victim.accepted(attacker, lucky[3])
    assert [victim.objection(attacker, round, partial(members, 128)) is None for round in lucky[:6]] == [False] * 4 + [True] * 2


def test_who_is_not_drawn_is_refused_unasked_and_a_yes_uses_the_round_up() -> None:
    victim, attacker, asked = draw("victim"), PeerId("attacker"), list[Offer]()

    def decide(offer: Offer) -> Answer:
        asked.append(offer)
        return Accept(offer.standing) if len(asked) > 1 else Busy(1.0, "not now")

    for round in range(500):
        drawn = victim.objection(attacker, round, partial(members, 128)) is None
        offer = Offer(attacker, b"s", Standing(round, 0, 1.0))
        answers = [victim.answer(offer, partial(members, 128), decide) for _ in range(3)]
        if not drawn:
            assert asked == []
            assert {answer.code for answer in answers if isinstance(answer, Refuse)} == {NotDrawnError.entry.code}
        else:
            assert [type(answer) for answer in answers] == [Busy, Accept, Refuse]
            return
    raise AssertionError("no round was drawn")


def test_what_was_used_is_remembered_in_bounds() -> None:
    victim = draw("victim")
    for number in range(module._KEPT + 100):
        victim.accepted(PeerId(str(number)), 1)
    assert len(victim._used) == module._KEPT
