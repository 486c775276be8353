"""The secure channel: records, the handshake, and what a broken or hostile other side can do to it."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.pb import crypto_pb2
from libp2p.crypto.secp256k1 import create_new_key_pair as create_new_secp256k1_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.noise.pb import noise_pb2

from nolocod.p2p.transport.buffers import BATCH, SIZE
from nolocod.p2p.transport.exceptions import FOREIGN
from nolocod.p2p.transport.noise_records import (
    HEAD,
    LAST_NONCE,
    MOST_PLAIN,
    RECORD,
    TAG,
    Opener,
    RecordError,
    Sealer,
    pending,
    sealed_size,
)
from tests.support.wires import ENOUGH, OURS, PROGRESS, STOCK, Stack, channels, raw, socket_pair, transport

if TYPE_CHECKING:
    from trio.testing import MockClock

    from nolocod.p2p.transport.noise import SecureChannel

KEY = bytes(range(32))


# --- records --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300) | st.just(MOST_PLAIN), min_size=1, max_size=5))
def test_records_are_the_same_as_by_hand(sizes: list[int]) -> None:
    sealer, opener, cipher = Sealer(KEY), Opener(KEY), ChaCha20Poly1305(KEY)
    out = memoryview(bytearray(RECORD))
    for number, size in enumerate(sizes):
        plain = os.urandom(size)
        count = sealer.seal_into(plain, out)
        nonce = bytes(4) + number.to_bytes(8, "little")
        assert bytes(out[:HEAD]) == (size + TAG).to_bytes(2, "big")
        assert bytes(out[HEAD:count]) == cipher.encrypt(nonce, plain, None)
        assert pending(out[:count]) == size
        assert pending(out[: count - 1]) is None
        assert count == sealed_size(size) or size == 0
        opened = memoryview(bytearray(size))
        opener.open_into(out[HEAD:count], opened)
        assert opened == plain


def test_a_record_altered_repeated_or_out_of_order_does_not_open() -> None:
    sealer = Sealer(KEY)
    records = []
    for _ in range(2):
        out = memoryview(bytearray(RECORD))
        records.append(out[HEAD : sealer.seal_into(b"hello", out)])
    view = memoryview(bytearray(5))
    with pytest.raises(RecordError):
        Opener(KEY).open_into(records[1], view)
    opener = Opener(KEY)
    opener.open_into(records[0], view)
    with pytest.raises(RecordError):
        opener.open_into(records[0], view)
    altered = bytearray(records[0])
    altered[3] ^= 1
    with pytest.raises(RecordError):
        Opener(KEY).open_into(memoryview(altered), view)


def test_a_key_is_used_up_before_its_last_nonce() -> None:
    out = memoryview(bytearray(RECORD))
    sealer, opener = Sealer(KEY, LAST_NONCE), Opener(KEY, LAST_NONCE)
    count = sealer.seal_into(b"last", out)
    opener.open_into(out[HEAD:count], memoryview(bytearray(4)))
    with pytest.raises(RecordError, match="used up"):
        sealer.seal_into(b"more", out)
    with pytest.raises(RecordError, match="used up"):
        opener.open_into(out[HEAD:count], memoryview(bytearray(4)))


@given(st.binary(max_size=80))
def test_pending_takes_any_bytes(content: bytes) -> None:
    try:
        size = pending(memoryview(content))
    except RecordError:
        assert int.from_bytes(content[:2], "big") < TAG
    else:
        assert size is None or HEAD + size + TAG <= len(content)


# --- the channel ----------------------------------------------------------------------------------


async def read_exactly(channel: SecureChannel, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        parts += await channel.read(count - len(parts))
    return bytes(parts)


@pytest.mark.parametrize(("dialer", "listener"), [(OURS, OURS), (OURS, STOCK), (STOCK, OURS)], ids=str)
async def test_bytes_in_any_pieces_both_ways(dialer: Stack, listener: Stack) -> None:
    rng = random.Random(5)
    contents = [rng.randbytes(2_000_000), rng.randbytes(2_000_000)]
    ann, bob = await channels(dialer, listener)

    async def send(channel: SecureChannel, content: bytes) -> None:
        at, pieces = 0, random.Random(6)
        while at < len(content):
            size = pieces.choice([1, 1000, MOST_PLAIN, MOST_PLAIN + 1, 400_000, BATCH + 1])
            await channel.write(content[at : at + size])
            at += size

    async def check(channel: SecureChannel, content: bytes) -> None:
        at, pieces = 0, random.Random(7)
        while at < len(content):
            size = min(pieces.choice([1, 1000, 70_000]), len(content) - at)
            assert await read_exactly(channel, size) == content[at : at + size]
            at += size

    with trio.fail_after(ENOUGH):
        async with trio.open_nursery() as nursery:
            for here, there, content in ((ann, bob, contents[0]), (bob, ann, contents[1])):
                nursery.start_soon(send, here.channel, content)
                nursery.start_soon(check, there.channel, content)
    assert ann.channel.get_remote_peer() == bob.channel.get_local_peer()
    assert bob.channel.get_remote_peer() == ann.channel.get_local_peer()


async def test_a_cancelled_flush_is_continued_by_the_next() -> None:
    ann, bob = await channels()
    content = random.Random(8).randbytes(4_000_000)
    received = bytearray()
    with trio.move_on_after(0.05) as scope:
        await ann.channel.write(content)
    assert scope.cancelled_caught, "the socket holds it all"
    assert ann.channel.unsent
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ann.channel.write, b"and the end")
        while not received.endswith(b"and the end"):
            received += await bob.channel.read()
    assert content.startswith(received.removesuffix(b"and the end"))
    assert len(received) % BATCH == len(b"and the end")


async def test_a_dead_writer_is_an_error_and_not_an_end() -> None:
    ann, bob = await channels()
    await ann.channel.write(b"hello")
    await ann.channel.close()
    assert await bob.channel.read() == b"hello"
    for _ in range(2):
        with pytest.raises(ConnectionClosedError):
            await bob.channel.read()


async def test_a_frozen_peer_fails_the_flush_by_the_deadline(autojump_clock: MockClock) -> None:
    ann, _bob = await channels()
    started = trio.current_time()
    with pytest.raises(trio.TooSlowError):
        await ann.channel.write(bytes(8 << 20))
    assert PROGRESS <= trio.current_time() - started < PROGRESS + 1


async def test_half_a_record_is_waited_for_by_the_deadline(autojump_clock: MockClock) -> None:
    ann, bob = await channels()
    await ann.socket.send_all(b"\x01")
    with pytest.raises(trio.TooSlowError):
        await bob.channel.read()


async def test_a_quiet_channel_holds_no_buffer() -> None:
    ann, bob = await channels()
    pool = bob.channel._pool
    await ann.channel.write(b"hello")
    await bob.channel.read()
    with trio.move_on_after(0.01):
        await bob.channel.read()
    assert bob.channel._in is None
    assert ann.channel._out is None
    assert not pool._free, "what is small needs no large one"
    with trio.move_on_after(0.01):
        await bob.channel.fill(bulk=True)
    assert [len(buffer) for buffer in pool._free] == [SIZE]
    await ann.socket.send_all(b"\xff\xff" + bytes(70))  # the beginning of a record
    with trio.move_on_after(0.01):
        await bob.channel.read()
    assert len(bob.channel._partial) == 72
    assert len(pool._free) == 1


async def test_a_small_record_that_cannot_be_sent_holds_no_large_buffer() -> None:
    ann, _bob = await channels()
    ann.channel.seal(b"a pong for one who does not read", memoryview(b""))
    assert len(ann.channel._out) == sealed_size(32)
    await ann.channel.flush()
    assert not ann.channel._pool._free


async def test_what_waits_for_its_payment_holds_no_large_buffer_and_is_not_lost() -> None:
    meter = Counted(10_000)
    ann, bob = await channels(OURS, Stack(meter=meter))
    meter.paid = trio.Event()
    await ann.channel.write(b"hello")
    with trio.move_on_after(0.02) as scope:
        await bob.channel.fill()
    assert scope.cancelled_caught
    assert meter.received == sealed_size(5)
    await bob.channel.fill()  # returns at once: a whole record is there
    assert await read_exactly(bob.channel, 5) == b"hello"
    async with trio.open_nursery() as nursery:
        await ann.channel.write(b"world")
        nursery.start_soon(bob.channel.fill)
        await trio.testing.wait_all_tasks_blocked()
        assert bob.channel._in is None
        meter.paid.set()
    assert await read_exactly(bob.channel, 5) == b"world"


async def test_garbage_after_the_handshake_ends_the_channel() -> None:
    for content in (b"\x00\x0f" + bytes(15), b"\x00\x20" + bytes(32), os.urandom(70_000)):
        ann, bob = await channels()
        await ann.socket.send_all(content)
        await ann.channel.close()
        with pytest.raises((RecordError, ConnectionClosedError)):
            await bob.channel.read()


class Counted:
    """A meter that gives leave one piece at a time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sent = self.received = 0
        self.leave = trio.Event()
        self.paid = trio.Event()
        self.paid.set()

    def piece(self, most: int) -> int:
        return min(most, self.most)

    async def up(self, count: int) -> None:
        await self.leave.wait()
        self.sent += count

    async def down(self, count: int) -> None:
        self.received += count
        await self.paid.wait()


async def test_every_sealed_byte_is_metered_on_both_sides() -> None:
    meters = Counted(10_000), Counted(10_000)
    ann, bob = await channels(Stack(meter=meters[0]), Stack(meter=meters[1]))
    with trio.move_on_after(0.01) as scope:
        await ann.channel.write(b"not yet")
    assert scope.cancelled_caught
    assert meters[0].sent == 0, "what was cancelled while it waited for leave is not counted"
    meters[0].leave.set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ann.channel.write, bytes(2_000_000))
        assert await read_exactly(bob.channel, 2_000_000) == bytes(2_000_000)
    assert meters[0].sent == meters[1].received == sealed_size(BATCH) + sealed_size(2_000_000 - BATCH)


# --- the handshake --------------------------------------------------------------------------------


async def test_another_peer_than_the_dialled_one_is_refused() -> None:
    left, right = await socket_pair()
    stranger = ID.from_pubkey(create_new_key_pair().public_key)

    async def listen() -> None:
        with suppress(*FOREIGN):  # the dialer may be gone by then
            await transport(OURS, create_new_key_pair()).secure_inbound(raw(right, False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        with pytest.raises(HandshakeFailure):
            await transport(OURS, create_new_key_pair()).secure_outbound(raw(left, True), stranger)
        await left.aclose()


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=120), max_size=4), st.booleans(), st.booleans())
def test_garbage_instead_of_a_handshake_is_a_failure_of_the_other_side(parts: list[bytes], dial: bool, framed: bool) -> None:
    async def main() -> None:
        left, right = await socket_pair()
        for part in parts:
            await left.send_all((len(part).to_bytes(2, "big") if framed else b"") + part)
        await left.send_eof()
        keys = create_new_key_pair()
        way, us = transport(OURS, keys), ID.from_pubkey(keys.public_key)
        with pytest.raises(FOREIGN):
            await (way.secure_outbound(raw(right, True), us) if dial else way.secure_inbound(raw(right, False)))
        await left.aclose()
        await right.aclose()

    trio.run(main)


def _claims(kind: int, key: bytes) -> bytes:
    """A payload with an identity key of type `kind`."""
    return noise_pb2.NoiseHandshakePayload(
        identity_key=crypto_pb2.PublicKey(key_type=kind, data=key).SerializeToString(), identity_sig=b"none"
    ).SerializeToString()


NONSENSE = {
    "no protobuf": b"\xff\xff\xff",
    "nothing": b"",
    "no key": noise_pb2.NoiseHandshakePayload(identity_key=b"\xff\xff", identity_sig=b"x").SerializeToString(),
    "unknown key type": noise_pb2.NoiseHandshakePayload(identity_key=b"\x08\x63\x12\x01x").SerializeToString(),
    **{f"key type {kind}, {len(key)} bytes": _claims(kind, key) for kind in range(5) for key in (b"", bytes(33), b"\x04" * 65)},
    **{
        f"{name}, a signature of {size} bytes": noise_pb2.NoiseHandshakePayload(
            identity_key=make().public_key.serialize(), identity_sig=bytes(size)
        ).SerializeToString()
        for name, make in {"ed25519": create_new_key_pair, "secp256k1": create_new_secp256k1_key_pair}.items()
        for size in (1, 64, 70, 2000)
    },
}


@pytest.mark.parametrize("dial", [True, False], ids=["dialled", "inbound"])
@pytest.mark.parametrize("payload", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_within_a_handshake_is_a_failure_of_the_other_side(payload: bytes, dial: bool) -> None:
    class Hostile(PatternXX):
        def make_handshake_payload(self, extensions: object = None) -> Hostile:
            return self

        def serialize(self) -> bytes:
            return payload

    left, right = await socket_pair()
    keys, theirs = create_new_key_pair(), create_new_key_pair()
    way, us = transport(OURS, keys), ID.from_pubkey(keys.public_key)
    hostile = Hostile(ID.from_pubkey(theirs.public_key), theirs.private_key, create_new_x25519_key_pair().private_key)

    async def attack() -> None:
        with suppress(*FOREIGN):
            await (hostile.handshake_inbound(raw(left, False)) if dial else hostile.handshake_outbound(raw(left, True), us))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attack)
        with pytest.raises(HandshakeFailure):
            await (way.secure_outbound(raw(right, True), hostile.local_peer) if dial else way.secure_inbound(raw(right, False)))
        nursery.cancel_scope.cancel()
    await left.aclose()
    await right.aclose()
