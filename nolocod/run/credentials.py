"""The files about who may talk to whom: network key, allow list, invitations, our admission, revocations.

The rule: what is secret has mode 0600; what a person writes by hand is refused with its line. The daemon and the owner's
commands share the data directory: each file is replaced whole, whoever needs the latest reads it again, and of the
commands that add to a file one works at a time (`_alone`).
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import blake3
import msgspec
from msgspec import Meta

from nolocod.disk import disk_errors, write_private
from nolocod.errors import (
    AdmissionError,
    DataDirError,
    InvitationError,
    InvitationOverError,
    SignatureError,
    UsageError,
    WrongRunError,
)
from nolocod.identity import Identity, PeerId, public_key
from nolocod.run import invitations
from nolocod.run.invitations import Invitation, Revocations, Token
from nolocod.run.manifest import stored_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from nolocod.paths import DataDir
    from nolocod.run.manifest import Sealed

KEY_SIZE = 32
_NETWORK = b"nolocod network 1\0"
_MOST_ALLOWED = 100_000


# --- the network key ----------------------------------------------------------------------------------


def make_network_key(path: Path) -> None:
    """Write a new key, 32 random bytes in hex; UsageError if the file is there already."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already.", remedy="Choose another name: a key in use must not be lost.") from error
    except OSError as error:
        raise DataDirError(f"{path}: {error.strerror}.") from error
    with disk_errors(path), os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(KEY_SIZE) + "\n")


def read_network_key(path: Path) -> bytes:
    """The 32 bytes in a key file; UsageError if it holds something else."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise UsageError(f"the network key {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UsageError(f"{path} holds no network key.", remedy="`nolocod network-key FILE` makes one.") from error
    if len(key) != KEY_SIZE:
        raise UsageError(f"{path} holds {len(key)} bytes, and a network key has {KEY_SIZE}.")
    return key


def prologue(key: bytes | None) -> bytes | None:
    """What both ends of a handshake must have mixed in (Noise, section 6): a hash, so that the key goes nowhere."""
    return None if key is None else blake3.blake3(_NETWORK + key).digest()


# --- the allow list -----------------------------------------------------------------------------------


def read_allow_list(path: Path) -> frozenset[PeerId]:
    """Peer ids, one a line; what follows a # is a comment. UsageError names the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the allow list {path} cannot be read ({error}).") from error
    found: set[PeerId] = set()
    for number, line in enumerate(lines, 1):
        peer = line.split("#", 1)[0].strip()
        if not peer:
            continue
        found.add(_peer_id(peer, f"{path}, line {number}: {peer[:64]!r} is no peer id."))
        if len(found) > _MOST_ALLOWED:
            raise UsageError(f"{path} has more than {_MOST_ALLOWED} peer ids.")
    return frozenset(found)


# --- invitations: the owner's side --------------------------------------------------------------------


class Issued(msgspec.Struct, frozen=True):
    """One invitation that was given out. Times are of day, in seconds since 1970."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    made: float
    expires: float
    peer: str = ""


def issue(paths: DataDir, sealed: Sealed, owner: Identity, grant: Grant) -> tuple[Issued, str]:
    """Make an invitation, note it in the data directory, and return it with its token.

    WrongRunError unless `owner` signed the manifest; UsageError for a peer that is none, or too many bootstraps.
    """
    _must_own(sealed, owner)
    secret, name = secrets.token_bytes(KEY_SIZE), secrets.token_bytes(invitations.ID_SIZE)
    if grant.peer:
        _peer_id(grant.peer, f"--peer {grant.peer[:64]!r} is no peer id.")
    key = public_key(Identity.from_secret(secret).peer_id)
    invitation = Invitation(sealed.run_id, name, grant.now + grant.lasts, key, PeerId(grant.peer) if grant.peer else None)
    raw = invitations.seal_invitation(invitation, owner)
    text = invitations.print_token(Token(raw, secret, tuple(grant.bootstrap), stored_network_key(paths)))
    if len(text) > invitations.MAX_TOKEN:
        raise UsageError("the token has no room for so many bootstrap addresses.", remedy="Give a few with --bootstrap.")
    note = Issued(name.hex(), grant.now, invitation.expires, grant.peer)
    with _alone(paths):
        write_private(paths.invitations, msgspec.json.encode([*issued(paths), note]))
    return note, text


class Grant(msgspec.Struct, frozen=True):
    """What an invitation is to say: for how many seconds from `now` on, to whom, and how the run is found."""

    now: float
    lasts: float
    peer: str = ""
    bootstrap: Sequence[str] = ()


def issued(paths: DataDir) -> list[Issued]:
    """What was given out from this data directory, oldest first."""
    raw = _read(paths.invitations)
    try:
        return msgspec.json.decode(raw, type=list[Issued]) if raw else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataDirError(f"{paths.invitations} is damaged ({error}).") from error


def revoke(paths: DataDir, sealed: Sealed, owner: Identity, names: Iterable[str]) -> Revocations:
    """Add invitations (their ids, or the beginning of one) and peers to what is revoked, and store it.

    UsageError for a name that is neither, and for a run in which nothing can be revoked.
    """
    _must_own(sealed, owner)
    if sealed.manifest.access != "invited":
        raise UsageError(
            f"run {sealed.manifest.name} is open: its members need no invitation, and none can be put out.",
            remedy='Create a run with access = "invited", or keep them out with --allow or another --network-key.',
        )
    with _alone(paths):
        before = opened_revocations(stored_revocations(paths), paths, sealed)
        after = _with(before, names, [note.id for note in issued(paths)])
        raw = invitations.seal_revocations(after, sealed.run_id, owner)
        if len(raw) > invitations.MAX_REVOCATIONS:
            raise UsageError("the run's list of revocations is full.", remedy="Create a new run, and invite to it.")
        write_private(paths.revocations, raw)
    return after


def _with(before: Revocations, names: Iterable[str], known: Sequence[str]) -> Revocations:
    """`before` and what `names` mean, `known` being the ids of our invitations."""
    invitations, peers = set(before.invitations), set(before.peers)
    for name in names:
        fitting = [one for one in known if len(name) >= 6 and one.startswith(name.lower())]
        if len(fitting) == 1:
            invitations.add(bytes.fromhex(fitting[0]))
        else:
            cause = f"{name[:64]!r} is neither a peer id nor an invitation of this node."
            peers.add(_peer_id(name, cause, "`nolocod invite --list` names the invitations."))
    return Revocations(before.version + 1, frozenset(invitations), frozenset(peers))


@contextmanager
def _alone(paths: DataDir) -> Iterator[None]:
    """Wait for other commands that add to a file: of two that read, add and write, one would lose what it added."""
    with disk_errors(paths.owner_lock):
        handle = os.open(paths.owner_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with disk_errors(paths.owner_lock):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _must_own(sealed: Sealed, owner: Identity) -> None:
    if sealed.manifest.owner != owner.peer_id:
        raise WrongRunError(
            f"run {sealed.manifest.name} belongs to {sealed.manifest.owner}, this data directory to {owner.peer_id}.",
            remedy="Only the node that created the run can invite and revoke: use its --data-dir.",
        )


def _peer_id(name: str, cause: str, remedy: str = "`nolocod id` prints one.") -> PeerId:
    """`name` as a peer id; UsageError if it is none."""
    try:
        public_key(name)
    except SignatureError as error:
        raise UsageError(cause, remedy=remedy) from error
    return PeerId(name)


# --- invitations: the joiner's side -------------------------------------------------------------------


def accept(paths: DataDir, text: str, peer: PeerId, now: float) -> Token:
    """Bind a token to `peer` and keep what comes with it.

    Raises InvitationError, InvitationOverError, or WrongRunError if the directory belongs to another run.
    """
    token = invitations.read_token(text)
    invitation, sealed = invitations.unchecked(token), stored_manifest(paths)
    if sealed is not None and sealed.run_id != invitation.run_id:
        raise WrongRunError(f"{paths.root} belongs to run {sealed.manifest.name} ({sealed.run_id[:12]}), the token to another.")
    if invitation.peer not in (None, peer):
        raise InvitationError(f"it was made for {invitation.peer}, and this node is {peer}.")
    if now >= invitation.expires:
        raise InvitationOverError("the invitation has expired.")
    admission = invitations.sign_admission(token, peer)
    if sealed is not None:
        check_own(admission, peer, sealed)
    write_private(paths.admission, admission)
    if token.network_key is not None:
        keep_network_key(paths, token.network_key)
    return token


def stored_admission(paths: DataDir) -> bytes:
    """What this node shows to others; empty if it was never invited."""
    return _read(paths.admission)


def check_own(raw: bytes, peer: PeerId, sealed: Sealed) -> Invitation:
    """InvitationError if this node's admission is not good in this run, whatever the time."""
    try:
        return invitations.open_admission(raw, peer, PeerId(sealed.manifest.owner), sealed.run_id)
    except AdmissionError as error:
        raise InvitationError(error.cause) from error


# --- both ---------------------------------------------------------------------------------------------


def keep_network_key(paths: DataDir, key: bytes) -> None:
    write_private(paths.network_key, key.hex().encode() + b"\n")


def network_key(paths: DataDir, named: Path | None) -> bytes | None:
    """The one in the file `named`, which is then kept, else the one that was kept or came with the invitation.

    UsageError for a file that holds none.
    """
    if named is not None:
        keep_network_key(paths, read_network_key(named))
    return stored_network_key(paths)


def stored_network_key(paths: DataDir) -> bytes | None:
    return read_network_key(paths.network_key) if paths.network_key.exists() else None


def stored_revocations(paths: DataDir) -> bytes:
    """What is revoked, as the owner sealed it and as far as this node knows; empty if nothing is."""
    return _read(paths.revocations)


def stored_announcement(paths: DataDir) -> bytes:
    """What the run's owner announces of it, sealed; empty if nothing."""
    return _read(paths.announcement)


def opened_revocations(raw: bytes, paths: DataDir, sealed: Sealed) -> Revocations:
    """What `stored_revocations` gave, read; DataDirError if the owner did not sign it."""
    try:
        return invitations.open_revocations(raw, PeerId(sealed.manifest.owner), sealed.run_id) if raw else Revocations()
    except AdmissionError as error:
        raise DataDirError(f"{paths.revocations}: {error.cause}", remedy="Remove it: peers send it again.") from error


def _read(path: Path) -> bytes:
    """The content of a file; empty if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise DataDirError(f"{path}: {error.strerror}.") from error
