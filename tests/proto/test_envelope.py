"""Envelopes: nothing altered, misdirected, replayed or foreign is believed, and nothing but our errors comes out."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import blake3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nolocod.errors import OtherRunError, PeerVersionError, ProtocolError, RemoteError, SignatureError
from nolocod.identity import Identity
from nolocod.proto import envelope
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import check_chunk, describe_from_wire, describe_to_wire
from nolocod.proto.envelope import Dialogue, open_envelope, readable, seal
from nolocod.proto.limits import Limits
from nolocod.proto.types import Describing, Description, describe

ALICE, BOB, EVE = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2, 3))


def letter(**content: object) -> pb.Body:
    content = content or {"offer": pb.Offer(codec="float32", size=7)}
    return pb.Body(run_id="run", receiver=BOB.peer_id, **content)  # type: ignore[arg-type]  # one field by its name


def opened(raw: bytes, run_id: str | None = "run", remote: str | None = ALICE.peer_id) -> pb.Body:
    return open_envelope(raw, run_id=run_id, receiver=BOB.peer_id, remote=remote)


def test_what_was_sealed_is_opened() -> None:
    body = opened(seal(letter(), ALICE))
    assert (body.sender, body.offer.size) == (ALICE.peer_id, 7)
    assert opened(seal(letter(), ALICE), run_id=None, remote=None) == body


RAW = seal(letter(), ALICE)


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
def test_no_altered_byte_is_taken_for_the_senders(position: int, flip: int) -> None:
    altered = bytearray(RAW)
    altered[position] ^= flip
    with suppress(RemoteError):
        # the minor version is outside the signature: it is told, and never trusted
        assert opened(bytes(altered)) == opened(RAW)


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_our_errors(raw: bytes) -> None:
    with pytest.raises(RemoteError):
        opened(raw)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_no_signed_bytes_raise_anything_but_our_errors(raw: bytes) -> None:
    sealed = pb.Envelope(major=1, body=raw, signature=ALICE.sign(b"nolocod envelope 1\0" + raw))
    with pytest.raises(RemoteError):
        opened(sealed.SerializeToString())


def test_another_major_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "MAJOR", 2)
    raw = seal(letter(), ALICE)
    monkeypatch.undo()
    with pytest.raises(PeerVersionError, match=r"version 2\.0 .* this node 1\.0"):
        opened(raw)


def test_another_run_is_named_with_the_users_code() -> None:
    with pytest.raises(OtherRunError, match=r"'run'.*'other'") as caught:
        opened(seal(letter(), ALICE), run_id="other")
    assert caught.value.code == "NLC-104"


def test_the_sender_must_be_the_streams_peer() -> None:
    with pytest.raises(ProtocolError, match="in the name of"):
        opened(seal(letter(), ALICE), remote=EVE.peer_id)


def test_a_signature_for_another_purpose_does_not_fit() -> None:
    raw = letter().SerializeToString()
    body = pb.Body.FromString(raw)
    body.sender = ALICE.peer_id
    raw = body.SerializeToString()
    sealed = pb.Envelope(major=1, body=raw, signature=ALICE.sign(raw))
    with pytest.raises(SignatureError):
        opened(sealed.SerializeToString())


def test_only_a_heartbeat_is_for_everybody() -> None:
    beat = pb.Body(run_id="run", heartbeat=pb.Heartbeat(count=3))
    assert opened(seal(beat, ALICE), remote=None).heartbeat.count == 3
    with pytest.raises(ProtocolError, match="meant for another"):
        opened(seal(pb.Body(run_id="run", offer=pb.Offer()), ALICE))
    with pytest.raises(ProtocolError, match="meant for another"):
        opened(seal(pb.Body(run_id="run", receiver=EVE.peer_id, heartbeat=pb.Heartbeat()), ALICE), remote=None)


def test_unknown_fields_are_ignored() -> None:
    raw = letter()
    raw.sender = ALICE.peer_id
    extended = raw.SerializeToString() + bytes([0xFA, 0x7F, 2]) + b"hi"  # field 2047, of a later minor version
    sealed = pb.Envelope(major=1, minor=9, body=extended, signature=ALICE.sign(b"nolocod envelope 1\0" + extended))
    assert opened(sealed.SerializeToString()).offer.size == 7


def test_a_dialogue_refuses_what_is_old_or_of_another_session() -> None:
    alice = Dialogue(ALICE, "run", BOB.peer_id, b"s" * 16)
    bob = Dialogue(BOB, "run", ALICE.peer_id, b"s" * 16)
    first, second = alice.seal(pb.Body(working=pb.Working())), alice.seal(pb.Body(working=pb.Working()))
    bob.open(second)
    for old in (first, second):
        with pytest.raises(ProtocolError, match="after message 2"):
            bob.open(old)
    with pytest.raises(ProtocolError, match="another session"):
        bob.open(Dialogue(ALICE, "run", BOB.peer_id, b"t" * 16, 9).seal(pb.Body(working=pb.Working())))


def test_a_peers_text_is_made_fit_for_a_log() -> None:
    assert readable("a\x1b[31m\nb" + "x" * 300) == "a?[31m?b" + "x" * 192


@given(st.binary(max_size=300), st.integers(1, 100), st.lists(st.integers(0, 300), max_size=5))
def test_what_comes_in_pieces_is_described_chunk_by_chunk(content: bytes, chunk_size: int, cuts: list[int]) -> None:
    whole = Describing(chunk_size)
    ends = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    for start, end in pairwise(ends):
        whole.update(memoryview(content)[start:end])
    chunks = [content[start : start + chunk_size] for start in range(0, len(content), chunk_size)]
    assert whole.description() == Description(len(content), chunk_size, tuple(blake3.blake3(one).digest() for one in chunks))


@given(st.binary(min_size=1, max_size=500), st.integers(1, 600))
def test_a_description_survives_the_wire(content: bytes, chunk_size: int) -> None:
    told = describe(memoryview(content), chunk_size)
    assert describe_from_wire(describe_to_wire(told), Limits()) == told
    for index in range(len(told.hashes)):
        start, length = told.span(index)
        check_chunk(told, index, memoryview(content)[start : start + length])


@pytest.mark.parametrize(
    "wire",
    [
        pb.Describe(),
        pb.Describe(size=10, chunk_size=5, hashes=[bytes(32)]),
        pb.Describe(size=10, chunk_size=5, hashes=[bytes(32), bytes(31)]),
        pb.Describe(size=10, chunk_size=0, hashes=[]),
        pb.Describe(size=0, chunk_size=5, hashes=[]),
        pb.Describe(size=2**63, chunk_size=1 << 20, hashes=[]),
        pb.Describe(size=10, chunk_size=2**32 - 1, hashes=[bytes(32)]),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(wire: pb.Describe) -> None:
    with pytest.raises(ProtocolError):
        describe_from_wire(wire, Limits())
