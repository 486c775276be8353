"""Ed25519 identities: who a node is, and how anybody checks what it signed.

The peer id is libp2p's: base58 of the identity multihash of the protobuf-wrapped public key, so the
key can be read back out of the id and a signature needs nothing but the id to be checked.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from nolocod.disk import sync_folder
from nolocod.errors import IdentityError, SignatureError

if TYPE_CHECKING:
    from pathlib import Path

PeerId = NewType("PeerId", str)

_PREFIX = bytes.fromhex("002408011220")  # identity multihash of {type: Ed25519, 32 bytes of key}


@dataclass(frozen=True)
class Identity:
    """One node's key pair. `secret` is the 32-byte Ed25519 seed; it never leaves this machine."""

    secret: bytes = field(repr=False)
    peer_id: PeerId

    @classmethod
    def from_secret(cls, secret: bytes) -> Identity:
        """Make the identity of a 32-byte Ed25519 seed."""
        public = Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        return cls(secret, peer_id_of(public))

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_secret(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def public(self) -> bytes:
        """The 32-byte public key."""
        return public_key(self.peer_id)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of `message`."""
        return Ed25519PrivateKey.from_private_bytes(self.secret).sign(message)


def short(peer_id: str) -> str:
    """The last 8 characters: how people are shown a peer id."""
    return peer_id[-8:]


def peer_id_of(public: bytes) -> PeerId:
    """The peer id of a 32-byte Ed25519 public key."""
    return PeerId(base58.b58encode(_PREFIX + public).decode())


def public_key(peer_id: str) -> bytes:
    """Return the 32-byte key inside `peer_id`; SignatureError if it holds none."""
    try:
        raw = base58.b58decode(peer_id) if len(peer_id) <= 64 else b""
    except ValueError:
        raw = b""
    if len(raw) != len(_PREFIX) + 32 or not raw.startswith(_PREFIX):
        raise SignatureError(f"{peer_id[:64]!r} is not the peer id of an Ed25519 key.")
    return raw[len(_PREFIX) :]


def verify(peer_id: str, message: bytes, signature: bytes) -> None:
    """Raise SignatureError unless `signature` is `peer_id`'s signature of `message`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key(peer_id)).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(f"a message in the name of {short(peer_id)} was not signed by it.") from error


def load_or_create(path: Path) -> Identity:
    """Read the identity at `path`, or make one there with mode 0600.

    Raises IdentityError if the file is damaged, readable by others, or cannot be read or made.
    """
    try:
        return _load(path) if path.exists() else _create(path)
    except OSError as error:
        raise IdentityError(f"{path}: {error.strerror}.", remedy="Check who owns the data directory.") from error


def load(path: Path) -> Identity:
    """Read the identity at `path`; IdentityError if there is none, and as for `load_or_create`."""
    if not path.exists():
        raise IdentityError(f"{path} does not exist.", remedy="Restore your backup, or make a new peer with `nolocod id`.")
    return load_or_create(path)


def _load(path: Path) -> Identity:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise IdentityError(f"{path} can be read by others (mode {mode:04o}).", remedy=f"Run: chmod 600 {path}")
    secret = path.read_bytes()
    if len(secret) != 32:
        raise IdentityError(f"{path} holds {len(secret)} bytes where a key has 32.")
    return Identity.from_secret(secret)


def _create(path: Path) -> Identity:
    identity = Identity.generate()
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, identity.secret)
        os.fsync(handle)
    finally:
        os.close(handle)
    partial.rename(path)
    sync_folder(path.parent)
    return identity
