"""Invitations, admissions, revocations and tokens, as bytes that anybody can check.

The rule: every right comes from the key that signed the manifest. Its owner signs an invitation, which carries the
public half of a key of its own; whoever holds the other half signs with it that one peer is admitted. So members need
nothing but the manifest to check each other. No clock, no files (credentials.py), no randomness in here.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TypeVar

import blake3
from google.protobuf.message import DecodeError, Message

from nolocod.errors import AdmissionError, InvitationError, PeerInvitationOverError, PeerNotInvitedError, SignatureError
from nolocod.identity import Identity, PeerId, peer_id_of, public_key, short, verify
from nolocod.proto import nolocod_pb2 as pb

M = TypeVar("M", bound=Message)

ID_SIZE = 16
MAX_ADMISSION = 1024
"""Bytes of one admission."""
MAX_REVOCATIONS = 64 << 10
"""Bytes of all that a run's owner has ever revoked: about 3000 invitations."""
MAX_TOKEN = 8192
"""Characters of a token."""

_KEY_SIZE = 32
_PREFIX = "nolocod-invite-"
_CHECK_SIZE = 4
_INVITATION = b"nolocod invitation 1\0"
_ADMISSION = b"nolocod admission 1\0"
_REVOCATIONS = b"nolocod revocations 1\0"
_TOKEN = b"nolocod token 1\0"


@dataclass(frozen=True)
class Invitation:
    """What the owner of run `run_id` grants to whoever holds the secret of `key`, or to `peer` alone if that is set.

    `expires` is a time of day in seconds since 1970.
    """

    run_id: str
    id: bytes
    expires: float
    key: bytes
    peer: PeerId | None = None


@dataclass(frozen=True)
class Token:
    """What an invited person is given: `invitation` is sealed, `secret` the seed of its key."""

    invitation: bytes
    secret: bytes
    bootstrap: tuple[str, ...] = ()
    network_key: bytes | None = None


@dataclass(frozen=True)
class Revocations:
    """All that an owner has revoked; of two the one with the higher version counts."""

    version: int = 0
    invitations: frozenset[bytes] = frozenset()
    peers: frozenset[PeerId] = frozenset()

    def over(self, invitation: Invitation, peer: PeerId, wall: float) -> PeerInvitationOverError | None:
        """Why `peer`'s admission by `invitation` counts no more at the time of day `wall`; None while it does."""
        if peer in self.peers:
            return PeerInvitationOverError(f"the run's owner has revoked the membership of {short(peer)}.")
        if invitation.id in self.invitations:
            return PeerInvitationOverError(f"the invitation of {short(peer)} was revoked by the run's owner.")
        if wall >= invitation.expires:
            return PeerInvitationOverError(f"the invitation of {short(peer)} has expired.")
        return None


# --- the owner's side ---------------------------------------------------------------------------------


def seal_invitation(invitation: Invitation, owner: Identity) -> bytes:
    body = pb.Invitation(
        run_id=invitation.run_id,
        id=invitation.id,
        expires_ms=int(invitation.expires * 1000),
        key=invitation.key,
        peer=invitation.peer or "",
    )
    return _seal(_INVITATION, body.SerializeToString(deterministic=True), owner)


def seal_revocations(revocations: Revocations, run_id: str, owner: Identity) -> bytes:
    body = pb.Revocations(
        run_id=run_id, version=revocations.version, invitations=sorted(revocations.invitations), peers=sorted(revocations.peers)
    )
    return _seal(_REVOCATIONS, body.SerializeToString(deterministic=True), owner)


def _seal(domain: bytes, body: bytes, owner: Identity) -> bytes:
    return pb.Sealed(body=body, signature=owner.sign(domain + body)).SerializeToString()


# --- the member's side --------------------------------------------------------------------------------


def sign_admission(token: Token, peer: PeerId) -> bytes:
    """What `peer` shows to be let in."""
    key = Identity.from_secret(token.secret)
    signature = key.sign(_admission_message(unchecked(token).run_id, peer))
    return pb.Admission(invitation=token.invitation, peer=peer, signature=signature).SerializeToString()


def _admission_message(run_id: str, peer: PeerId) -> bytes:
    return _ADMISSION + run_id.encode() + b"\0" + peer.encode()


def unchecked(token: Token) -> Invitation:
    """The invitation inside a token, before anybody knows who owns the run; InvitationError if it is none."""
    try:
        return _invitation(_parse(pb.Sealed(), token.invitation).body)
    except AdmissionError as error:
        raise InvitationError(error.cause) from error


# --- everybody's side ---------------------------------------------------------------------------------


def open_admission(raw: bytes, peer: PeerId, owner: PeerId, run_id: str) -> Invitation:
    """Check what `peer` shows, but neither the time nor revocations: those are `Revocations.over`'s.

    Raises PeerNotInvitedError for nothing at all, AdmissionError for what no honest peer shows.
    """
    if not raw:
        raise PeerNotInvitedError(f"{short(peer)} shows no invitation, and this run needs one.")
    if len(raw) > MAX_ADMISSION:
        raise AdmissionError(f"an admission of {len(raw)} bytes is above the limit of {MAX_ADMISSION}.")
    admission = _parse(pb.Admission(), raw)
    invitation = _invitation(_open(_INVITATION, admission.invitation, owner))
    if invitation.run_id != run_id:
        raise AdmissionError(f"the invitation is for run {invitation.run_id[:12]!r}, not for {run_id[:12]!r}.")
    if admission.peer != peer or invitation.peer not in (None, peer):
        raise AdmissionError(f"{short(peer)} shows the admission of another peer.")
    try:
        verify(peer_id_of(invitation.key), _admission_message(run_id, peer), admission.signature)
    except SignatureError as error:
        raise AdmissionError(f"the admission of {short(peer)} is not signed by the invitation's key.") from error
    return invitation


def open_revocations(raw: bytes, owner: PeerId, run_id: str) -> Revocations:
    """AdmissionError unless `owner` signed them for run `run_id`."""
    if len(raw) > MAX_REVOCATIONS:
        raise AdmissionError(f"revocations of {len(raw)} bytes are above the limit of {MAX_REVOCATIONS}.")
    body = _parse(pb.Revocations(), _open(_REVOCATIONS, raw, owner))
    if body.run_id != run_id:
        raise AdmissionError("revocations are of another run.")
    return Revocations(body.version, frozenset(body.invitations), frozenset(PeerId(peer) for peer in body.peers))


def _open(domain: bytes, raw: bytes, owner: PeerId) -> bytes:
    sealed = _parse(pb.Sealed(), raw)
    try:
        verify(owner, domain + sealed.body, sealed.signature)
    except SignatureError as error:
        raise AdmissionError("the signature is not the run owner's.") from error
    return sealed.body


def _invitation(body: bytes) -> Invitation:
    told = _parse(pb.Invitation(), body)
    if len(told.id) != ID_SIZE or len(told.key) != _KEY_SIZE or not told.run_id or len(told.run_id) > 128:
        raise AdmissionError("an invitation lacks some of its parts.")
    return Invitation(told.run_id, told.id, told.expires_ms / 1000, told.key, PeerId(told.peer) if told.peer else None)


def _parse(message: M, raw: bytes) -> M:
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise AdmissionError("an invitation or admission cannot be parsed.") from error
    return message


# --- tokens -------------------------------------------------------------------------------------------


def print_token(token: Token) -> str:
    """One word that can be pasted: base64url of the token and a checksum of it (BLAKE3, 4 bytes)."""
    body = pb.Token(
        invitation=token.invitation, secret=token.secret, bootstrap=token.bootstrap, network_key=token.network_key or b""
    ).SerializeToString(deterministic=True)
    return _PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def read_token(text: str) -> Token:
    """The reverse; InvitationError for what was cut, mistyped or never a token."""
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > MAX_TOKEN:
        raise InvitationError(f"the token does not begin with {_PREFIX} or is too long.")
    coded = text.removeprefix(_PREFIX)
    try:
        raw = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvitationError("the token is malformed: part of it is missing.") from error
    body, checksum = raw[:-_CHECK_SIZE], raw[-_CHECK_SIZE:]
    if checksum != _checksum(body):
        raise InvitationError("the token's checksum does not match: part of it is missing or altered.")
    try:
        told = _parse(pb.Token(), body)
    except AdmissionError as error:
        raise InvitationError(error.cause) from error
    if len(told.secret) != _KEY_SIZE or len(told.network_key) not in (0, _KEY_SIZE):
        raise InvitationError("the token's keys have the wrong length.")
    token = Token(told.invitation, told.secret, tuple(told.bootstrap), told.network_key or None)
    if unchecked(token).key != public_key(Identity.from_secret(token.secret).peer_id):
        raise InvitationError("the token's key does not match its invitation.")
    return token


def _checksum(body: bytes) -> bytes:
    return blake3.blake3(_TOKEN + body).digest()[:_CHECK_SIZE]
