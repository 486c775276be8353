"""Whom a node lets be a member of an invited run, and when it may be none itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.errors import (
    AdmissionError,
    InvitationError,
    InvitationOverError,
    NotInvitedError,
    PeerInvitationOverError,
    PeerNotInvitedError,
)
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, Troubled
from nolocod.p2p.membership import admission as module
from nolocod.p2p.membership import left_by_commands
from nolocod.p2p.membership.admission import InvitedAdmission
from nolocod.paths import DataDir
from nolocod.run import credentials, invitations
from nolocod.run.credentials import Grant
from nolocod.run.invitations import (
    Revocations,
    seal_revocations,
    sign_admission,
)
from nolocod.run.manifest import Manifest, Sealed, seal

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_000_000.0
OWNER = Identity.from_secret(bytes(range(32)))
KEY = Identity.from_secret(bytes(range(1, 33)))
ANN, BOB = Identity.generate().peer_id, Identity.generate().peer_id


@pytest.fixture
def paths(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path)


def a_run() -> Sealed:
    return seal(Manifest(name="private", model={"model_type": "llama"}, access="invited"), OWNER)


def an_admission(paths: DataDir, clock: list[float], own: PeerId = OWNER.peer_id) -> InvitedAdmission:
    return InvitedAdmission(a_run(), own, paths, clock=lambda: clock[0])


def invited(paths: DataDir, peer: PeerId, lasts: float = 60.0) -> bytes:
    """The admission of a peer that the owner of `paths` has invited just now."""
    _, text = credentials.issue(paths, a_run(), OWNER, Grant(NOW, lasts))
    return sign_admission(invitations.read_token(text), peer)


def test_an_admission_lets_in_who_shows_an_admission_while_it_lasts(paths: DataDir) -> None:
    clock = [NOW]
    admission, shown = an_admission(paths, clock), invited(paths, ANN)
    assert isinstance(admission.objection(ANN), PeerNotInvitedError)
    assert admission.admits(ANN, shown, NOW)
    assert admission.objection(ANN) is None
    assert not admission.admits(BOB, shown, NOW)
    assert isinstance(admission.objection(BOB), AdmissionError)
    assert not admission.admits(BOB, b"", NOW)
    assert isinstance(admission.objection(BOB), PeerNotInvitedError)
    clock[0] = NOW + 60
    assert isinstance(admission.objection(ANN), PeerInvitationOverError)
    assert not admission.admits(ANN, shown, clock[0])
    assert admission.admits(ANN, invited(paths, ANN, 600.0), clock[0]), "a new one may follow"
    assert admission.objection(ANN) is None
    assert admission.admits(OWNER.peer_id, b"", NOW)


def test_an_admission_learns_revocations_and_never_older_ones(paths: DataDir) -> None:
    admission, run_id = an_admission(paths, [NOW]), a_run().run_id
    assert admission.admits(ANN, invited(paths, ANN), NOW)
    older = seal_revocations(Revocations(1), run_id, OWNER)
    newer = seal_revocations(Revocations(2, peers=frozenset({ANN})), run_id, OWNER)
    assert admission.learn(newer)
    assert isinstance(admission.objection(ANN), PeerInvitationOverError)
    assert not admission.learn(older), "replayed"
    assert not admission.learn(newer)
    assert admission.revocations == newer
    with pytest.raises(AdmissionError):
        admission.learn(seal_revocations(Revocations(3), run_id, KEY))
    assert isinstance(admission.objection(ANN), PeerInvitationOverError)


def test_a_node_finds_out_by_itself_that_it_may_not_be_a_member(paths: DataDir, tmp_path: Path) -> None:
    theirs, clock = DataDir(tmp_path / "theirs"), [NOW]
    with pytest.raises(NotInvitedError):
        an_admission(theirs, clock, ANN)
    _, text = credentials.issue(paths, a_run(), OWNER, Grant(NOW, 60.0))
    credentials.accept(theirs, text, ANN, NOW)
    assert an_admission(theirs, clock, ANN).shown
    with pytest.raises(InvitationError):
        an_admission(theirs, clock, BOB)
    with pytest.raises(InvitationOverError, match="expired"):
        an_admission(theirs, [NOW + 60], ANN)
    credentials.revoke(paths, a_run(), OWNER, [ANN])
    theirs.revocations.write_bytes(credentials.stored_revocations(paths))
    with pytest.raises(InvitationOverError, match="revoked"):
        an_admission(theirs, clock, ANN)


async def test_revocations_go_both_ways_between_a_node_and_its_directory(
    paths: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_by_commands, "_REREAD", 0.01)
    admission, run_id, told = an_admission(paths, [NOW]), a_run().run_id, list[Event]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.run, told.append)
        credentials.revoke(paths, a_run(), OWNER, [ANN])
        stored = credentials.stored_revocations(paths)
        with trio.fail_after(60):
            while admission.revocations != stored:  # noqa: ASYNC110  # a file is what is waited for
                await trio.sleep(0.01)
        newer = seal_revocations(Revocations(9, peers=frozenset({BOB})), run_id, OWNER)
        assert admission.learn(newer)
        with trio.fail_after(60):
            while credentials.stored_revocations(paths) != newer:  # noqa: ASYNC110  # a file is what is waited for
                await trio.sleep(0.01)
        paths.revocations.write_bytes(b"nonsense")
        with trio.fail_after(60):
            while not told:  # noqa: ASYNC110  # a file is what is waited for
                await trio.sleep(0.01)
        assert admission.revocations == newer
        nursery.cancel_scope.cancel()


def test_what_is_kept_of_one_that_was_refused_is_small_and_does_not_grow(paths: DataDir) -> None:
    """Errors that are kept hold on to the message they came from, and to more with every time that they are raised."""
    admission = an_admission(paths, [NOW])
    assert not admission.admits(ANN, b"", NOW)
    for _ in range(3):
        with pytest.raises(PeerNotInvitedError) as caught:
            raise admission.objection(ANN) or AssertionError
        assert len(caught.traceback) == 1
        assert caught.value.__context__ is None


def test_those_whose_invitation_is_over_push_out_nobody(paths: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 4)
    admission, over = an_admission(paths, [NOW]), credentials.issue(paths, a_run(), OWNER, Grant(NOW, -1.0))[1]
    assert admission.admits(ANN, invited(paths, ANN), NOW)
    for _ in range(8):
        eve = Identity.generate().peer_id
        assert not admission.admits(eve, sign_admission(invitations.read_token(over), eve), NOW)
        assert isinstance(admission.objection(eve), PeerInvitationOverError)
    assert admission.objection(ANN) is None
    assert len(admission._refused) == 4


async def test_a_member_learns_its_own_end_however_many_others_it_knows(
    paths: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    monkeypatch.setattr(left_by_commands, "_REREAD", 0.01)
    theirs, clock, told = DataDir(tmp_path / "theirs"), [NOW], list[Event]()
    _, text = credentials.issue(paths, a_run(), OWNER, Grant(NOW, 60.0))
    credentials.accept(theirs, text, BOB, NOW)
    admission = an_admission(theirs, clock, BOB)
    for _ in range(3):
        peer = Identity.generate().peer_id
        assert admission.admits(peer, invited(paths, peer, 600.0), NOW)
    clock[0] += 60
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.run, told.append)
        with trio.fail_after(60):
            while not told:  # noqa: ASYNC110  # nobody tells of it
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert [event.code for event in told if isinstance(event, Troubled)] == [PeerInvitationOverError.entry.code]


async def test_a_damaged_file_of_revocations_is_told_once(paths: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_by_commands, "_REREAD", 0.0)
    admission, told, looks = an_admission(paths, [NOW]), list[Event](), 0
    paths.revocations.write_bytes(b"nonsense")
    read = credentials.stored_revocations

    def counted(where: DataDir) -> bytes:
        nonlocal looks
        looks += 1
        return read(where)

    monkeypatch.setattr(credentials, "stored_revocations", counted)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(admission.run, told.append)
        with trio.fail_after(60):
            while looks < 5:  # noqa: ASYNC110  # a thread is what is waited for
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    (trouble,) = told
    assert isinstance(trouble, Troubled)
    assert "Remove it" in trouble.message
