"""Identities: the file, the peer id, signatures."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from nolocod.errors import IdentityError, SignatureError
from nolocod.identity import Identity, load_or_create, public_key, short, verify

if TYPE_CHECKING:
    from pathlib import Path

SEED = bytes(range(32))


def test_a_new_identity_is_kept_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create(path) == made


def test_two_new_identities_differ(tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "a.key").peer_id != load_or_create(tmp_path / "b.key").peer_id


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused_with_the_command_that_helps(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="can be read by others") as caught:
        load_or_create(path)
    assert caught.value.remedy == f"Run: chmod 600 {path}"
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("content", [b"", SEED[:-1], SEED + b"\n"])
def test_a_damaged_key_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=f"{len(content)} bytes"):
        load_or_create(path)
    assert path.read_bytes() == content


def test_the_peer_id_is_libp2ps() -> None:
    identity = Identity.from_secret(SEED)
    pair = create_new_key_pair(SEED)
    assert identity.peer_id == str(ID.from_pubkey(pair.public_key))
    assert identity.public == pair.public_key.to_bytes()


def test_signatures_are_libp2ps() -> None:
    assert Identity.from_secret(SEED).sign(b"message") == create_new_key_pair(SEED).private_key.sign(b"message")


def test_a_signature_fits_its_signer_and_message_only() -> None:
    alice, bob = Identity.from_secret(SEED), Identity.generate()
    signature = alice.sign(b"message")
    verify(alice.peer_id, b"message", signature)
    for signer, message, given in (
        (bob.peer_id, b"message", signature),
        (alice.peer_id, b"massage", signature),
        (alice.peer_id, b"message", signature[:-1]),
        (alice.peer_id, b"message", b""),
        ("not a peer", b"message", signature),
    ):
        with pytest.raises(SignatureError):
            verify(signer, message, given)


@pytest.mark.parametrize("peer_id", ["", "0OIl", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "1" * 65, "é"])
def test_what_is_no_peer_id_of_a_key_is_refused(peer_id: str) -> None:
    with pytest.raises(SignatureError, match="not the peer id"):
        public_key(peer_id)


def test_the_secret_is_not_shown() -> None:
    assert SEED.hex() not in repr(Identity.from_secret(SEED))
    assert repr(SEED) not in repr(Identity.from_secret(SEED))


def test_short_is_the_last_eight_characters() -> None:
    assert short("12D3KooWabcdefgh") == "abcdefgh"


@pytest.mark.parametrize("broken", ["write", "fsync"])
def test_a_death_while_writing_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "identity.key"

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, die)
        with pytest.raises(Killed):
            load_or_create(path)
    assert not path.exists()
    assert load_or_create(path) == load_or_create(path)
    assert os.listdir(tmp_path) == ["identity.key"]


def test_a_key_that_cannot_be_read_or_made_has_a_code(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "none" / "key", tmp_path / "file" / "key"):
        with pytest.raises(IdentityError):
            load_or_create(path)
