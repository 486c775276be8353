"""Reputation: misdeeds ban, faults that may be nobody's do not, and thousands of identities push out nothing that counts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import (
    AlteredBytesError,
    BannedError,
    DataDirError,
    HarmfulTensorError,
    OtherRunError,
    PeerBusyError,
    PeerTooSlowError,
    PeerUnavailableError,
    PeerVersionError,
    ProtocolError,
    RefusedError,
    RejectedTensorError,
    RelayBudgetError,
    SignatureError,
)
from nolocod.identity import PeerId
from nolocod.observe.events import Event, PeerBanned, PeerJudged, Troubled
from nolocod.p2p.membership import peer_scoring as module
from nolocod.p2p.membership.peer_scoring import Conduct, Records, Reputation, conduct_in, conduct_of
from nolocod.p2p.membership.table import Membership
from nolocod.proto.types import Ended

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.errors import RemoteError

PEER = PeerId("peer")
BAD = [conduct for conduct in Conduct if conduct.worth == 0]


class Scene:
    def __init__(self, *, newcomers: int = 3, judging: bool = True) -> None:
        self.events: list[Event] = []
        self.reputation = Reputation(self.events.append, newcomers, judging)

    def repeat(self, conduct: Conduct, times: int = 1, peer: PeerId = PEER, now: float = 1000.0) -> None:
        for _ in range(times):
            self.reputation.judge(peer, conduct, now)

    def until_banned(self, conduct: Conduct, now: float = 1000.0, most: int = 100) -> int:
        """How often a peer may do that before it is banned, that time included."""
        for count in range(1, most + 1):
            self.repeat(conduct, now=now)
            if self.reputation.banned(PEER, now):
                return count
        pytest.fail("it is never banned")

    @property
    def bans(self) -> list[float]:
        return [event.seconds for event in self.events if isinstance(event, PeerBanned)]


@pytest.mark.parametrize(
    ("conduct", "newcomer", "trusted"),
    [
        (Conduct.FALSE_SIGNATURE, 2, 3),
        (Conduct.ALTERED_BYTES, 2, 3),
        (Conduct.FALSE_WEIGHTS, 2, 3),
        (Conduct.FALSE_TENSOR, 1, 2),
        (Conduct.BROKE_PROTOCOL, 4, 6),
        (Conduct.REJECTED, 5, 8),
        (Conduct.FALSE_NEWS, 9, 16),
        (Conduct.WITHHELD, 11, 20),
        (Conduct.FLOODED, 46, 80),
    ],
)
def test_how_often_newcomers_and_the_trusted_may_do_what(conduct: Conduct, newcomer: int, trusted: int) -> None:
    assert Scene().until_banned(conduct) == newcomer
    scene = Scene()
    scene.repeat(Conduct.COMMITTED, 100)
    assert scene.until_banned(conduct) == trusted


def test_every_misdeed_has_its_row_above() -> None:
    [mark] = test_how_often_newcomers_and_the_trusted_may_do_what.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(BAD)


def test_bans_end_and_are_twice_as_long_the_next_time_up_to_a_day() -> None:
    scene, now = Scene(), 1000.0
    for _ in range(10):
        scene.until_banned(Conduct.FALSE_SIGNATURE, now)
        left = scene.reputation.banned(PEER, now)
        assert scene.reputation.banned(PEER, now + left - 1) == pytest.approx(1)
        now += left
        assert not scene.reputation.banned(PEER, now)
        assert scene.reputation.objection(PEER, now) is None
    assert scene.bans == [600, 1200, 2400, 4800, 9600, 19200, 38400, 76800, 86400, 86400]


def test_who_sends_what_no_honest_node_makes_is_banned_for_an_hour() -> None:
    scene = Scene()
    scene.repeat(Conduct.FALSE_TENSOR)
    assert scene.bans == [3600]
    scene.repeat(Conduct.FALSE_TENSOR, now=1e6)
    assert scene.bans == [3600, 7200]


def test_after_a_ban_less_is_forgiven_than_before() -> None:
    scene = Scene()
    scene.until_banned(Conduct.BROKE_PROTOCOL)
    assert scene.until_banned(Conduct.BROKE_PROTOCOL, now=1000.0 + 600) == 2


def test_what_is_done_while_banned_neither_counts_nor_is_told() -> None:
    scene = Scene()
    scene.until_banned(Conduct.FALSE_SIGNATURE)
    told = len(scene.events)
    scene.repeat(Conduct.FALSE_SIGNATURE, 50)
    assert (scene.bans, len(scene.events)) == ([600], told)


def test_good_exchanges_make_up_for_a_rare_rejection() -> None:
    """An honest pair may be refused now and then by a test that errs: one in ten of all for ever is borne."""
    scene, rng = Scene(), random.Random(4)
    for _ in range(5000):
        scene.repeat(Conduct.REJECTED if rng.random() < 0.1 else Conduct.COMMITTED)
    assert not scene.bans


def test_the_error_of_a_ban_names_the_peer_and_the_time() -> None:
    scene = Scene()
    scene.until_banned(Conduct.ALTERED_BYTES)
    found = scene.reputation.objection(PEER, 1000.0)
    assert isinstance(found, BannedError)
    assert "peer" in found.cause
    assert "600 s" in found.cause
    assert scene.reputation.shunned(1000.0) == {PEER}


def test_where_the_run_wants_no_bans_there_are_none() -> None:
    scene = Scene(judging=False)
    scene.repeat(Conduct.FALSE_SIGNATURE, 20)
    scene.repeat(Conduct.COMMITTED, 3)
    assert not scene.events
    assert not scene.reputation.banned(PEER, 1000.0)
    assert not scene.reputation.probation(PEER), "the clip's probation is another setting"


def test_probation_lasts_for_so_many_committed_exchanges_and_begins_anew_after_a_ban() -> None:
    scene = Scene(newcomers=3)
    for _ in range(3):
        assert scene.reputation.probation(PEER)
        scene.repeat(Conduct.COMMITTED)
    assert not scene.reputation.probation(PEER)
    scene.until_banned(Conduct.FALSE_SIGNATURE)
    assert scene.reputation.probation(PEER)
    assert not Scene(newcomers=0).reputation.probation(PEER)


def test_changes_are_told_with_the_reason() -> None:
    scene = Scene()
    scene.repeat(Conduct.FALSE_SIGNATURE, 2)
    assert scene.events == [
        PeerJudged(PEER, 0.25, Conduct.FALSE_SIGNATURE.words),
        PeerJudged(PEER, 0.0, Conduct.FALSE_SIGNATURE.words),
        PeerBanned(PEER, 600.0, Conduct.FALSE_SIGNATURE.words),
    ]


# --- what counts as whose fault ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "conduct"),
    [
        (SignatureError("x"), Conduct.FALSE_SIGNATURE),
        (AlteredBytesError("x"), Conduct.ALTERED_BYTES),
        (ProtocolError("x"), Conduct.BROKE_PROTOCOL),
        (RejectedTensorError("x"), Conduct.FALSE_TENSOR),
        (HarmfulTensorError("x"), Conduct.REJECTED),
        (PeerUnavailableError("x"), None),
        (PeerTooSlowError("x"), None),
        (RefusedError("x"), None),
        (RelayBudgetError("x"), None),
        (BannedError("x"), None),
        (OtherRunError("x"), None),
        (PeerVersionError("x"), None),
        (PeerBusyError("x", retry_after=1.0), None),
    ],
)
def test_what_an_error_says_of_the_peer(error: RemoteError, conduct: Conduct | None) -> None:
    assert conduct_of(error) is conduct


@pytest.mark.parametrize(
    ("outcome", "received", "failure", "conduct"),
    [
        ("committed", 100, None, Conduct.COMMITTED),
        ("in_doubt", 100, None, Conduct.WITHHELD),
        ("aborted", 0, PeerTooSlowError("x"), Conduct.WITHHELD),
        ("aborted", 100, PeerTooSlowError("x"), Conduct.WITHHELD),
        ("aborted", 40, PeerTooSlowError("x"), None),
        ("aborted", 0, PeerUnavailableError("x"), None),
        ("aborted", 40, AlteredBytesError("x"), Conduct.ALTERED_BYTES),
        ("aborted", 100, RejectedTensorError("x"), Conduct.FALSE_TENSOR),
        ("aborted", 40, RefusedError("the partner aborted (NLC-207): your tensor is bad"), None),
        ("aborted", 0, None, None),
    ],
)
def test_what_an_exchange_says_of_the_partner(
    outcome: str, received: int, failure: RemoteError | None, conduct: Conduct | None
) -> None:
    ended = Ended(outcome, PEER, b"", received=received, error="NLC-207")  # type: ignore[arg-type]
    assert conduct_in(ended, failure, 100) is conduct


def test_the_banned_are_given_nothing_and_others_what_the_owner_lets_them() -> None:
    scene = Scene()
    table = Membership(PeerId("we"), "run", ban=lambda peer: scene.reputation.objection(peer, 1000.0))
    assert table.objection(PEER) is None
    scene.until_banned(Conduct.FALSE_SIGNATURE)
    assert isinstance(table.objection(PEER), BannedError)
    assert table.objection(PeerId("other")) is None
    assert table.admission.admits(PEER, b"", 0.0), "it is a member all the same: others may think better of it"


# --- memory -------------------------------------------------------------------------------------------------


def test_thousands_of_identities_push_out_neither_bans_nor_friends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 64)
    scene = Scene()
    scene.until_banned(Conduct.FALSE_SIGNATURE)
    friend = PeerId("friend")
    scene.repeat(Conduct.COMMITTED, 5, friend)
    for number in range(2000):
        scene.repeat(Conduct.BROKE_PROTOCOL, 1 + number % 3, PeerId(f"one-of-many-{number}"))
    assert len(scene.reputation) == 64
    assert scene.reputation.banned(PEER, 1000.0)
    assert not scene.reputation.probation(friend)


def test_more_bans_than_there_is_room_for_leave_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 8)
    scene = Scene()
    scene.until_banned(Conduct.FALSE_SIGNATURE)
    scene.until_banned(Conduct.FALSE_SIGNATURE, now=2000.0)
    for number in range(100):
        scene.repeat(Conduct.FALSE_SIGNATURE, 2, PeerId(f"one-of-many-{number}"), now=2000.0)
    assert len(scene.reputation) == 8
    assert scene.reputation.banned(PEER, 2000.0) == 1200


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(list(Conduct)), st.floats(0, 3000)), max_size=200))
def test_whatever_happens_scores_and_sizes_stay_in_bounds(deeds: list[tuple[int, Conduct, float]]) -> None:
    scene, now = Scene(), 0.0
    for number, conduct, seconds in deeds:
        now += seconds
        scene.reputation.judge(PeerId(str(number)), conduct, now)
        assert 0 <= scene.reputation.banned(PeerId(str(number)), now) <= 86_400
    assert len(scene.reputation) <= 31
    assert all(0 <= event.reputation <= 1 for event in scene.events if isinstance(event, PeerJudged))


# --- over restarts ------------------------------------------------------------------------------------------


def test_bans_and_friends_outlive_a_restart(tmp_path: Path) -> None:
    path, friend = tmp_path / "reputation.json", PeerId("friend")
    scene = Scene()
    records = Records(path, scene.reputation, 1000.0)
    records.save()
    assert not path.exists(), "nothing to tell"
    scene.until_banned(Conduct.FALSE_SIGNATURE)
    scene.repeat(Conduct.COMMITTED, 3, friend)
    records.save()
    after = Scene()
    Records(path, after.reputation, 1100.0)
    assert after.reputation.banned(PEER, 1100.0) == 500
    assert not after.reputation.probation(friend)
    assert after.bans == [500], "status and log learn of it"
    assert after.until_banned(Conduct.FALSE_SIGNATURE, 1700.0) == 1
    assert after.bans == [500, 1200]


def test_a_clock_set_back_makes_no_ban_longer_than_the_longest(tmp_path: Path) -> None:
    scene = Scene()
    records = Records(tmp_path / "r", scene.reputation, 2e9)
    scene.until_banned(Conduct.FALSE_SIGNATURE, now=2e9)
    records.save()
    after = Scene()
    Records(tmp_path / "r", after.reputation, 1e9)
    assert after.reputation.banned(PEER, 1e9) == 86_400
    assert after.reputation.banned(PEER, 1e9 + 80_000) == 6_400, "it runs on from there"
    assert after.reputation.banned(PEER, 1e9 + 86_400) == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'[{"peer_id": "x", "score": 7}]', b"\xff\xfe"])
def test_a_damaged_file_is_one_warning_and_a_new_beginning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "reputation.json"
    path.write_bytes(content)
    scene = Scene()
    records = Records(path, scene.reputation, 1000.0)
    assert [(event.code, str(path) in event.message) for event in scene.events if isinstance(event, Troubled)] == [
        (DataDirError.entry.code, True)
    ]
    assert len(scene.reputation) == 0
    scene.repeat(Conduct.COMMITTED, 1)
    records.save()
    again = Scene()
    Records(path, again.reputation, 1000.0)
    assert (len(again.reputation), again.events) == (1, [])


def test_what_a_disk_does_not_take_is_tried_again(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    scene = Scene()
    records = Records(blocked / "reputation.json", scene.reputation, 1000.0)
    scene.repeat(Conduct.COMMITTED)
    with pytest.raises(DataDirError):
        records.save()
    blocked.unlink()
    records.save()
    after = Scene()
    Records(blocked / "reputation.json", after.reputation, 1000.0)
    assert len(after.reputation) == 1, "it is tried again"


def test_three_bans_of_one_address_group_keep_out_its_strangers_and_no_partner() -> None:
    """A fourth identity of the same attacker gets nothing; neighbours that exchanged with us, and other places, do."""
    groups = {f"evil {number}": "203.0.113.0/24" for number in range(3)} | {
        "fourth": "203.0.113.0/24",
        "partner": "203.0.113.0/24",
        "elsewhere": "198.51.100.0/24",
    }
    reputation = Reputation(lambda _: None, group_of=lambda peer: groups.get(peer))
    reputation.judge(PeerId("partner"), Conduct.COMMITTED, 0.0)
    for number in range(3):
        assert not reputation.banned(PeerId("fourth"), float(number)), "two may be a university's"
        for _ in range(2):
            reputation.judge(PeerId(f"evil {number}"), Conduct.FALSE_SIGNATURE, float(number))
    assert reputation.banned(PeerId("fourth"), 3.0) == 597.0, "as long as three last"
    assert not any(reputation.banned(PeerId(peer), 3.0) for peer in ("partner", "elsewhere", "of nowhere"))
    assert not reputation.banned(PeerId("fourth"), 601.0)
