"""Announcements as bytes: signed, bounded, ended; and the links that name a run and one of its nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import NoSuchRunError, ProtocolError, RemoteError, SignatureError, UsageError
from nolocod.identity import Identity
from nolocod.proto import nolocod_pb2 as pb
from nolocod.run.announcements import LONGEST, MAX_ANNOUNCEMENT, Announcement, link, read, read_link, sign

WALL = 1_700_000_000.0
OWNER = Identity.from_secret(bytes([3]) * 32)
HERE = f"/ip4/203.0.113.7/tcp/4001/p2p/{OWNER.peer_id}"
SAID = Announcement(
    run_id="ab" * 32,
    owner=OWNER.peer_id,
    version=WALL,
    expires=WALL + 86400,
    addresses=(HERE,),
    name="verse",
    description="small",
    model="llama",
    parameters=10**6,
    memory=10**9,
    rounds=500,
    data="text",
    access="open",
    licence="Apache-2.0",
    contact="me@example.org",
)


def test_what_was_signed_is_read() -> None:
    signed = sign(SAID, OWNER)
    assert len(signed.raw) < 600
    assert read(signed.raw) == signed
    assert replace(signed, raw=b"") == SAID


def test_whoever_signs_is_the_owner() -> None:
    other = Identity.generate()
    assert read(sign(SAID, other).raw).owner == other.peer_id


@given(st.integers(0, 400), st.integers(1, 255))
def test_an_altered_byte_is_found(at: int, flip: int) -> None:
    raw = bytearray(sign(SAID, OWNER).raw)
    raw[at % len(raw)] ^= flip
    with pytest.raises(RemoteError):
        read(bytes(raw))


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_raise_an_error_of_ours(raw: bytes) -> None:
    with pytest.raises((ProtocolError, SignatureError)):
        read(raw)


def forged(**changes: object) -> bytes:
    """Signed in order, of what `sign` would refuse."""
    sealed, body = pb.Sealed(), pb.Announcement()
    sealed.ParseFromString(sign(SAID, OWNER).raw)
    body.ParseFromString(sealed.body)
    for name, value in changes.items():
        if name == "addresses":
            body.addresses[:] = value  # type: ignore[assignment]  # a list of texts
        else:
            setattr(body, name, value)
    raw = body.SerializeToString()
    signature = OWNER.sign(b"nolocod announcement 1\0" + raw)
    return pb.Sealed(body=raw, signature=signature).SerializeToString()


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "verse"},
        {"addresses": []},
        {"addresses": [HERE] * 5},
        {"name": "x" * 65},
        {"description": "x" * 401},
        {"parameters": 1 << 60},
        {"expires_ms": int(WALL * 1000)},
        {"expires_ms": int((WALL + LONGEST + 1) * 1000)},
        {"description": "x" * 400, "addresses": [HERE + "x" * 500] * 4},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_what_no_owner_says_is_refused(changes: dict[str, object]) -> None:
    assert read(forged())
    with pytest.raises(ProtocolError):
        read(forged(**changes))


def test_an_announcement_counts_from_now_to_its_end() -> None:
    assert SAID.lasts(WALL)
    assert SAID.lasts(SAID.expires - 1)
    assert not SAID.lasts(SAID.expires)
    assert SAID.lasts(WALL - 3600), "the owner's clock may be ahead"
    assert not SAID.lasts(WALL - 3601)


def test_text_for_people_is_one_line() -> None:
    assert read(forged(description="one\ntwo\x1b[31m")).description == "one?two?[31m"


def test_an_owner_is_told_what_is_too_long() -> None:
    for changes in (
        {"name": "x" * 65},
        {"addresses": ()},
        {"addresses": (HERE,) * 5},
        {"addresses": ("x" * MAX_ANNOUNCEMENT,)},
    ):
        with pytest.raises(UsageError):
            sign(replace(SAID, **changes), OWNER)  # type: ignore[arg-type]  # as given


@pytest.mark.parametrize("host", ["ip4/203.0.113.7", "ip6/2001:db8::7", "dns/run.example.org"])
def test_a_link_leads_back(host: str) -> None:
    address = f"/{host}/tcp/4001/p2p/{OWNER.peer_id}"
    text = link(SAID.run_id, address)
    assert len(text) < 120
    assert read_link(f" {text}.\n") == (SAID.run_id[:16], address), "as a chat shows it"


def test_addresses_of_other_kinds_have_no_link() -> None:
    assert link(SAID.run_id, f"{HERE}/p2p-circuit/p2p/{OWNER.peer_id}") == ""
    assert link(SAID.run_id, "/ip4/1.2.3.4/udp/1/p2p/x") == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nolocod:",
        "nolocod:abcdef@1.2.3.4:1/x",
        f"nolocod:{'ab' * 8}@1.2.3.4:99999/{OWNER.peer_id}",
        f"nolocod:{'ab' * 8}@1.2.3.4:4001/{OWNER.peer_id[:-1]}",
        f"nolocod:{'ab' * 8}@1.2.3.4:4001/{'x' * 52}",
        f"http://{'ab' * 8}@1.2.3.4:4001/{OWNER.peer_id}",
    ],
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(NoSuchRunError):
        read_link(text)
