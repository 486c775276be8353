"""Invitations, admissions, revocations, and the files that they are kept in: every way in which one can be wrong."""

from __future__ import annotations

import base64
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import (
    AdmissionError,
    DataDirError,
    InvitationError,
    InvitationOverError,
    PeerNotInvitedError,
    UsageError,
    WrongRunError,
)
from nolocod.identity import Identity, PeerId
from nolocod.paths import DataDir
from nolocod.proto import nolocod_pb2 as pb
from nolocod.run import credentials, invitations
from nolocod.run.credentials import Grant
from nolocod.run.invitations import (
    Invitation,
    Revocations,
    Token,
    open_admission,
    open_revocations,
    seal_revocations,
    sign_admission,
)
from nolocod.run.manifest import Manifest, Sealed, seal

if TYPE_CHECKING:
    from pathlib import Path

RUN = "ab" * 32
NOW = 1_000_000.0
OWNER = Identity.from_secret(bytes(range(32)))
KEY = Identity.from_secret(bytes(range(1, 33)))
ANN, BOB = Identity.generate().peer_id, Identity.generate().peer_id
INVITATION = Invitation(RUN, bytes(16), NOW + 60, KEY.public)
TOKEN = Token(invitations.seal_invitation(INVITATION, OWNER), KEY.secret, ("/ip4/192.0.2.1/tcp/4001/p2p/x",), bytes(32))


def admission(peer: PeerId = ANN, owner: Identity = OWNER, **changes: object) -> bytes:
    invitation = replace(INVITATION, **changes)  # type: ignore[arg-type]  # the fields' types differ
    return sign_admission(replace(TOKEN, invitation=invitations.seal_invitation(invitation, owner)), peer)


# --- admissions ---------------------------------------------------------------------------------------


def test_an_admission_is_good_with_nothing_but_the_manifest() -> None:
    assert open_admission(admission(), ANN, OWNER.peer_id, RUN) == INVITATION
    named = open_admission(admission(peer=ANN), ANN, OWNER.peer_id, RUN)
    assert Revocations().over(named, ANN, NOW) is None


def test_who_shows_nothing_is_not_invited() -> None:
    with pytest.raises(PeerNotInvitedError):
        open_admission(b"", ANN, OWNER.peer_id, RUN)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (admission(owner=KEY), "not the run owner's"),
        (admission(peer=BOB), "another peer"),
        (sign_admission(replace(TOKEN, secret=bytes(32)), ANN), "invitation's key"),
        (admission(run_id="cd" * 32), "is for run"),
        (
            pb.Admission(invitation=invitations.seal_invitation(replace(INVITATION, id=b"x"), OWNER)).SerializeToString(),
            "its parts",
        ),
        (bytes(invitations.MAX_ADMISSION + 1), "above the limit"),
        (b"\xff" * 9, "cannot be parsed"),
    ],
    ids=["another owner", "another peer", "another key", "another run", "no id", "too large", "garbage"],
)
def test_an_admission_is_refused(raw: bytes, cause: str) -> None:
    with pytest.raises(AdmissionError, match=cause):
        open_admission(raw, ANN, OWNER.peer_id, RUN)


def test_an_invitation_for_one_peer_is_of_no_use_to_another() -> None:
    only_bob = replace(TOKEN, invitation=invitations.seal_invitation(replace(INVITATION, peer=BOB), OWNER))
    assert open_admission(sign_admission(only_bob, BOB), BOB, OWNER.peer_id, RUN).peer == BOB
    with pytest.raises(AdmissionError, match="another peer"):
        open_admission(sign_admission(only_bob, ANN), ANN, OWNER.peer_id, RUN)


def test_every_altered_byte_is_found() -> None:
    raw = admission()
    for place in range(len(raw)):
        altered = bytearray(raw)
        altered[place] ^= 1
        with pytest.raises((AdmissionError, PeerNotInvitedError)):
            open_admission(bytes(altered), ANN, OWNER.peer_id, RUN)


def test_what_is_signed_as_one_thing_is_not_taken_for_another() -> None:
    sealed = pb.Sealed.FromString(TOKEN.invitation)
    with pytest.raises(AdmissionError, match="not the run owner's"):
        open_revocations(sealed.SerializeToString(), OWNER.peer_id, RUN)


# --- the end of an admission --------------------------------------------------------------------------


def test_a_membership_ends_with_its_time_or_by_the_owners_word() -> None:
    assert "expired" in Revocations().over(INVITATION, ANN, INVITATION.expires).cause  # type: ignore[union-attr]
    by_invitation = Revocations(1, invitations=frozenset({INVITATION.id}))
    by_peer = Revocations(1, peers=frozenset({ANN}))
    assert "was revoked" in by_invitation.over(INVITATION, BOB, NOW).cause  # type: ignore[union-attr]
    assert "has revoked" in by_peer.over(INVITATION, ANN, NOW).cause  # type: ignore[union-attr]
    assert by_peer.over(INVITATION, BOB, NOW) is None


def test_revocations_come_from_the_owner_of_this_run_alone() -> None:
    told = Revocations(3, frozenset({bytes(16)}), frozenset({ANN}))
    raw = seal_revocations(told, RUN, OWNER)
    assert open_revocations(raw, OWNER.peer_id, RUN) == told
    with pytest.raises(AdmissionError, match="not the run owner's"):
        open_revocations(seal_revocations(told, RUN, KEY), OWNER.peer_id, RUN)
    with pytest.raises(AdmissionError, match="another run"):
        open_revocations(seal_revocations(told, "cd" * 32, OWNER), OWNER.peer_id, RUN)
    with pytest.raises(AdmissionError, match="above the limit"):
        open_revocations(bytes(invitations.MAX_REVOCATIONS + 1), OWNER.peer_id, RUN)


# --- tokens -------------------------------------------------------------------------------------------


def test_a_token_survives_being_pasted() -> None:
    text = invitations.print_token(TOKEN)
    assert text.isascii()
    assert not set(text) & set(" \n/+=")
    assert invitations.read_token(f"  {text}\n") == TOKEN


@given(st.data())
def test_a_token_that_was_altered_is_refused_or_the_same(data: st.DataObject) -> None:
    text = invitations.print_token(TOKEN)
    place = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 3))
    altered = text[:place] + data.draw(st.text(max_size=3)) + text[place + length :]
    try:
        assert invitations.read_token(altered) == TOKEN
    except InvitationError:
        return


@given(st.binary(max_size=200))
def test_nonsense_with_a_right_checksum_is_refused(body: bytes) -> None:
    coded = base64.urlsafe_b64encode(body + invitations._checksum(body)).decode()
    with pytest.raises(InvitationError):
        invitations.read_token("nolocod-invite-" + coded)


@pytest.mark.parametrize(
    "text", ["", "nolocod-invite-", "nolocod-invite-A", "nolocod-invite-" + "A" * invitations.MAX_TOKEN, "ä"]
)
def test_what_never_was_a_token(text: str) -> None:
    with pytest.raises(InvitationError):
        invitations.read_token(text)


def test_a_token_with_the_key_of_another_invitation_is_refused() -> None:
    with pytest.raises(InvitationError, match="does not match its invitation"):
        invitations.read_token(invitations.print_token(replace(TOKEN, secret=bytes(32))))


# --- files --------------------------------------------------------------------------------------------


def revoked(paths: DataDir, sealed: Sealed) -> Revocations:
    return credentials.opened_revocations(credentials.stored_revocations(paths), paths, sealed)


@pytest.fixture
def paths(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path)


def a_run() -> Sealed:
    return seal(Manifest(name="private", model={"model_type": "llama"}, access="invited"), OWNER)


def test_an_owner_invites_and_a_peer_accepts(paths: DataDir, tmp_path: Path) -> None:
    sealed, theirs = a_run(), DataDir(tmp_path / "theirs")
    credentials.keep_network_key(paths, bytes(range(32)))
    note, text = credentials.issue(paths, sealed, OWNER, Grant(NOW, 60.0, bootstrap=["/ip4/192.0.2.1/tcp/1"]))
    assert credentials.issued(paths) == [note]
    assert text.encode() not in paths.invitations.read_bytes()
    token = credentials.accept(theirs, text, ANN, NOW)
    assert token.bootstrap == ("/ip4/192.0.2.1/tcp/1",)
    assert credentials.stored_network_key(theirs) == bytes(range(32))
    credentials.check_own(credentials.stored_admission(theirs), ANN, sealed)
    for path in (theirs.admission, theirs.network_key, paths.invitations):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InvitationError, match="another peer"):
        credentials.check_own(credentials.stored_admission(theirs), BOB, sealed)


def test_a_token_is_not_accepted_too_late_or_by_another(paths: DataDir) -> None:
    _, text = credentials.issue(paths, a_run(), OWNER, Grant(NOW, 60.0, peer=BOB))
    with pytest.raises(InvitationError, match="was made for"):
        credentials.accept(paths, text, ANN, NOW)
    with pytest.raises(InvitationOverError):
        credentials.accept(paths, text, BOB, NOW + 60)
    assert credentials.stored_admission(paths) == b""


def test_only_the_owner_invites_and_revokes(paths: DataDir) -> None:
    with pytest.raises(WrongRunError):
        credentials.issue(paths, a_run(), KEY, Grant(NOW, 60.0))
    with pytest.raises(WrongRunError):
        credentials.revoke(paths, a_run(), KEY, [ANN])


def test_revocations_add_up(paths: DataDir) -> None:
    sealed = a_run()
    note, _ = credentials.issue(paths, sealed, OWNER, Grant(NOW, 60.0))
    credentials.revoke(paths, sealed, OWNER, [note.id[:8]])
    credentials.revoke(paths, sealed, OWNER, [ANN])
    expected = Revocations(2, frozenset({bytes.fromhex(note.id)}), frozenset({ANN}))
    assert revoked(paths, sealed) == expected
    with pytest.raises(UsageError, match="neither a peer id nor an invitation"):
        credentials.revoke(paths, sealed, OWNER, ["abc"])
    paths.revocations.write_bytes(b"nonsense")
    with pytest.raises(DataDirError):
        revoked(paths, sealed)


def test_nothing_is_revoked_where_nobody_was_invited(paths: DataDir) -> None:
    sealed = seal(Manifest(name="open", model={"model_type": "llama"}), OWNER)
    with pytest.raises(UsageError, match="is open"):
        credentials.revoke(paths, sealed, OWNER, [ANN])
    assert not paths.revocations.exists()


def test_what_several_commands_add_at_once_is_all_kept(paths: DataDir) -> None:
    sealed, peers = a_run(), [Identity.generate().peer_id for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        notes = [note for note, _ in pool.map(lambda _: credentials.issue(paths, sealed, OWNER, Grant(NOW, 60.0)), range(8))]
        list(pool.map(lambda peer: credentials.revoke(paths, sealed, OWNER, [peer]), peers))
    assert {note.id for note in credentials.issued(paths)} == {note.id for note in notes}
    assert revoked(paths, sealed) == Revocations(8, peers=frozenset(peers))


def test_no_token_is_made_that_could_not_be_read(paths: DataDir) -> None:
    many = tuple(f"/ip4/203.0.113.7/tcp/{port}/p2p/{ANN}" for port in range(1, 100))
    with pytest.raises(UsageError, match="so many bootstrap"):
        credentials.issue(paths, a_run(), OWNER, Grant(NOW, 60.0, bootstrap=many))
    with pytest.raises(UsageError, match="--peer 'Ann'"):
        credentials.issue(paths, a_run(), OWNER, Grant(NOW, 60.0, peer="Ann"))
    assert credentials.issued(paths) == []


def test_a_network_key_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    credentials.make_network_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = credentials.read_network_key(path)
    assert len(key) == 32
    assert key not in (credentials.prologue(key) or key)
    with pytest.raises(UsageError, match="exists already"):
        credentials.make_network_key(path)
    assert credentials.read_network_key(path) == key
    assert credentials.prologue(None) is None


@pytest.mark.parametrize("text", ["", "zz" * 32, "00" * 31, "00" * 33])
def test_what_is_no_network_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(UsageError):
        credentials.read_network_key(path)
    with pytest.raises(UsageError, match="cannot be read"):
        credentials.read_network_key(tmp_path / "none")


def test_an_allow_list(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    path.write_text(f"# friends\n{ANN}  # Ann\n\n  {BOB}\n")
    assert credentials.read_allow_list(path) == {ANN, BOB}
    path.write_text(f"{ANN}\n{BOB[:-1]}\n")
    with pytest.raises(UsageError, match="allow, line 2"):
        credentials.read_allow_list(path)
    with pytest.raises(UsageError, match="cannot be read"):
        credentials.read_allow_list(tmp_path / "none")
