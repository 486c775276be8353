"""In which round the run is, and how long its phases are."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nolocod.identity import Identity, PeerId
from nolocod.p2p.membership import heartbeat
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.run_clock import believed_round, pace
from nolocod.proto.types import Member, Standing

RUN = "run"


def member(
    name: str, *, round: int = 10, phase: float = 0.0, verified: bool = False, state: str = "training", age: float = 0.0
) -> Member:
    standing = Standing(round, 0, 1.0)
    return Member(PeerId(name), standing, state, (), "1", age, None, verified=verified, phase=phase)


def test_a_liar_takes_nobody_further_than_the_verified_are() -> None:
    """From the first partner on; and what invented members and one of two verified ones tell is no reason to jump."""
    ahead = [replace(member(f"p{number}", round=round), verified=True) for number, round in enumerate((10, 10, 11, 12, 14))]
    invented = [member(f"invented {number}", round=1000) for number in range(20)]
    told = {name: believed_round([*invented, *ahead], 60.0, PeerId(name), 1000) for name in ("p0", "p4", "stranger")}
    assert told == {"p0": 11, "p4": 10, "stranger": 10}
    assert believed_round(ahead, 60.0, PeerId("p1"), 9) == 10, "who is behind, or says so, holds nobody back"
    since = [replace(one, age=130.0) for one in ahead]
    assert believed_round(since, 60.0, PeerId("p4"), 1000) == 12, "they went on since they said so"
    assert believed_round(since, 60.0, PeerId("p0"), 11) == 11, "which is no reason to go further than who is there"
    assert believed_round([replace(member("liar", round=13), verified=True), ahead[0]], 60.0, PeerId("liar"), 13) == 10
    assert believed_round([ahead[0]], 60.0, PeerId("p0"), 13) == 13, "of two nodes one takes the other along"
    assert believed_round(invented, 60.0, PeerId("stranger"), 13) == 0
    one_is_gone = [verified("gone", round=5), verified("p1", round=12), verified("p2", round=13)]
    assert believed_round(one_is_gone, 60.0, PeerId("this one"), 10) == 12, "of four nodes, too"


@pytest.mark.parametrize("lie", [14, 1000])
def test_a_third_that_are_always_ahead_take_nobody_with_them_step_by_step(lie: int) -> None:
    honest = [
        replace(member(f"p{number}", round=round), verified=True) for number, round in enumerate((8, 9, 9, 10, 10, 11, 12))
    ]
    liars = [replace(member(f"liar {number}", round=lie), verified=True) for number in range(3)]
    alone = PeerId("this one, which steps alone")
    assert believed_round(honest, 60.0, alone, 8) == 9
    assert believed_round([*honest, *liars], 60.0, alone, 8) == 10, "as far as half of the honest have come, and no further"
    behind = [replace(one, standing=Standing(0, 0, 1.0)) for one in liars]
    assert believed_round([*honest, *behind], 60.0, alone, 8) >= 8, "nor do they hold anybody back behind all others"


def verified(name: str, **facts: Any) -> Member:  # noqa: ANN401 - of `member`
    return member(name, verified=True, **facts)


def test_a_phase_takes_what_the_median_of_the_verified_that_train_says() -> None:
    others = [verified(str(phase), phase=phase) for phase in (30.0, 60.0, 70.0, 90.0)]
    assert pace(others, 10, 10.0) == (60.0, 0)
    assert pace(others[:1], 10, 10.0) == (20.0, 0), "two unlike machines meet halfway"
    assert pace([], 10, 10.0) == (10.0, 0)
    assert pace([], 10, 0.0) == (0.0, 0), "nothing was measured yet"
    assert pace(others, 10, 0.0) == (65.0, 0)
    silent = [verified(f"before {number}") for number in range(9)]  # of a release that does not tell it
    assert pace([*others, *silent], 10, 10.0) == (60.0, 0)


def test_no_minority_of_the_verified_moves_the_phase_beyond_the_honest_ones() -> None:
    honest = [verified(str(phase), phase=phase) for phase in (50.0, 60.0, 70.0)]
    for lie in (1e-3, 1e9):
        liars = [verified(f"liar {number}", phase=lie) for number in range(3)]
        assert 50.0 <= pace([*honest, *liars], 10, 60.0)[0] <= 70.0
        invented = [member(f"invented {number}", phase=lie) for number in range(100)]
        paused = [verified(f"paused {number}", phase=lie, state="paused") for number in range(100)]
        assert pace([*honest, *invented, *paused], 10, 60.0) == (60.0, 0)


def test_how_far_one_is_before_the_others() -> None:
    others = [verified(str(number), round=number, phase=1.0) for number in (7, 8, 10, 12)]
    assert [pace(others, number, 1.0)[1] for number in (5, 8, 20)] == [-3, 0, 12]


def test_the_others_went_on_since_their_heartbeats() -> None:
    """Or of short rounds everybody is before everybody else, and takes twice as long for each."""
    others = [verified(str(number), round=100, phase=0.5, age=5.0) for number in range(3)]
    assert pace(others, 112, 0.5) == (0.5, 2)
    assert pace([replace(one, state="finished") for one in others], 112, 0.5) == (0.5, 12), "but who has finished"
    assert pace([replace(one, phase=0.0) for one in others], 112, 0.0) == (0.0, 12), "nobody knows how long a round is"


@pytest.mark.parametrize(("told", "heard"), [(0.0, 0.0), (1e-9, 0.001), (61.2504, 61.251), (1e12, heartbeat.MOST_PHASE / 1000)])
def test_a_heartbeat_tells_the_phase_in_milliseconds(told: float, heard: float) -> None:
    identity = Identity.from_secret(bytes(32))
    own = OwnHeartbeat(identity, RUN, lambda: (Standing(1, 1, 1.0), "training"), lambda: (), phase=lambda: told)
    assert heartbeat.read(own.heartbeat(), RUN).phase == heard


def test_who_is_last_goes_on_at_the_pace_of_those_who_have_finished() -> None:
    """Else they followed whoever stays on to lie."""
    liars = [verified(f"liar {number}", phase=1e9) for number in range(3)]
    finished = [verified(f"finished {number}", phase=60.0, state="finished") for number in range(9)]
    assert pace([*finished, *liars], 10, 60.0)[0] == 60.0
