"""A copy of an identity in one file, which a passphrase protects: scrypt makes the key, ChaCha20-Poly1305 seals.

The rule: nothing is ever overwritten, and nothing is put in place before it is known to be whole: an opened backup
must give the very peer id that the file names. The cost of the key is this module's, never the file's, so that a
foreign file cannot have us work or allocate at its will.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from msgspec import Meta

from nolocod.disk import write_private
from nolocod.errors import BackupError
from nolocod.identity import Identity, PeerId

if TYPE_CHECKING:
    from pathlib import Path

_MOST_BYTES = 4096
_SALT, _NONCE = 16, 12
_COST = {"n": 1 << 16, "r": 8, "p": 1}
"""64 MiB and a fifth of a second for each guess (RFC 7914)."""


class Backup(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a backup file holds: the secret, or `salt`, `nonce` and the secret that a passphrase seals."""

    format: Literal["nolocod identity 1"]
    peer_id: PeerId
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)] | None = None
    salt: Annotated[bytes, Meta(min_length=_SALT, max_length=_SALT)] = b""
    nonce: Annotated[bytes, Meta(min_length=_NONCE, max_length=_NONCE)] = b""
    sealed: Annotated[bytes, Meta(min_length=48, max_length=48)] = b""

    def __post_init__(self) -> None:
        if self.secret is None and not (self.salt and self.nonce and self.sealed):
            raise ValueError("it holds no secret")

    def __repr__(self) -> str:
        return f"Backup of {self.peer_id}"  # the secret is not shown

    @property
    def encrypted(self) -> bool:
        return self.secret is None

    def open(self, passphrase: str | None) -> Identity:
        """The identity inside; BackupError for a wrong passphrase, or if it is not that of `peer_id`."""
        secret = self.secret
        if secret is None:
            try:
                secret = _cipher(passphrase or "", self.salt).decrypt(self.nonce, self.sealed, self.peer_id.encode())
            except InvalidTag as error:
                raise BackupError("the passphrase is wrong, or the file is damaged.") from error
        identity = Identity.from_secret(secret)
        if identity.peer_id != self.peer_id:
            raise BackupError("the file is damaged: its key is not that of the peer id that it names.")
        return identity


def write(path: Path, identity: Identity, passphrase: str | None) -> None:
    """Write a backup, mode 0600; without a passphrase the key is readable to whoever can read the file."""
    must_be_new(path)
    if passphrase is None:
        backup = Backup(format="nolocod identity 1", peer_id=identity.peer_id, secret=identity.secret)
    else:
        salt, nonce = os.urandom(_SALT), os.urandom(_NONCE)
        sealed = _cipher(passphrase, salt).encrypt(nonce, identity.secret, identity.peer_id.encode())
        backup = Backup(format="nolocod identity 1", peer_id=identity.peer_id, salt=salt, nonce=nonce, sealed=sealed)
    write_private(path, msgspec.json.format(msgspec.json.encode(backup), indent=1) + b"\n")


def read(path: Path) -> Backup:
    """Read a backup, not yet opened; BackupError if the file is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise BackupError(f"{path}: {error.strerror}.") from error
    try:
        return msgspec.json.decode(raw if len(raw) <= _MOST_BYTES else b"", type=Backup)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BackupError(f"{path} is not a backup of an identity, or it is damaged.") from error


def put_back(identity: Identity, path: Path) -> None:
    """Make `identity` the one at `path`; BackupError if there is one already."""
    must_be_free(path)
    write_private(path, identity.secret)


def must_be_new(path: Path) -> None:
    if path.exists():
        raise BackupError(f"{path} exists already.", remedy="Choose another name: nothing is overwritten.")


def must_be_free(path: Path) -> None:
    """BackupError if there is an identity at `path`."""
    if path.exists():
        raise BackupError(
            f"{path} is there already: this node has an identity.",
            remedy="Restore into another --data-dir; nothing was changed.",
        )


def _cipher(passphrase: str, salt: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(Scrypt(salt=salt, length=32, **_COST).derive(passphrase.encode("utf-8", "surrogateescape")))
