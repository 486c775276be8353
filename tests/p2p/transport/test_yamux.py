"""The muxer: in all pairings with libp2p's own, under cancellation, and against peers that break the rules."""

from __future__ import annotations

import gc
import hashlib
import random
import struct
import weakref
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from nolocod.p2p.transport import buffers, yamux_limits
from nolocod.p2p.transport.buffers import SIZE, HeldMemory, Pool
from nolocod.p2p.transport.endpoints import CircuitEndpoint
from nolocod.p2p.transport.noise_records import HEAD, TAG
from nolocod.p2p.transport.yamux import A_STREAM, Yamux
from nolocod.p2p.transport.yamux_frames import (
    FIRST_WINDOW,
    HEADER_SIZE,
    MOST_WINDOW,
    Away,
    Deframer,
    Flag,
    Frame,
    FrameError,
    Kind,
    pack,
    unpack,
)
from nolocod.p2p.transport.yamux_limits import MuxLimits
from tests.support.wires import ENOUGH, OURS, PROGRESS, STOCK, Stack, against_frames, circuits, connections, until

if TYPE_CHECKING:
    from trio.testing import MockClock

    from nolocod.p2p.transport.noise import SecureChannel
    from nolocod.p2p.transport.yamux_stream import YamuxStream

MIXED = Stack("ours", "stock")
PAIRINGS = [(OURS, OURS), (OURS, STOCK), (STOCK, OURS), (OURS, MIXED), (MIXED, OURS), (MIXED, STOCK), (STOCK, MIXED)]


async def read_all(stream: Any) -> bytes:  # noqa: ANN401  # ours or libp2p's
    parts = []
    while True:
        try:
            parts.append(await stream.read(1 << 16))
        except MuxedStreamEOF:
            return b"".join(parts)


async def write_in_pieces(stream: Any, content: bytes, seed: int) -> None:  # noqa: ANN401
    rng = random.Random(seed)
    at = 0
    while at < len(content):
        size = rng.choice([1, 100, 65_507, 65_508, 65_520, 300_000, 600_000])
        await stream.write(content[at : at + size])
        at += size
    await stream.close()


async def pair_of_streams(dialer: Any, listener: Any) -> tuple[Any, Any]:  # noqa: ANN401
    stream = await dialer.open_stream()
    return stream, await listener.accept_stream()


# --- bytes arrive ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dialer", "listener"), PAIRINGS, ids=str)
async def test_every_pairing_carries_streams_both_ways_at_once(dialer: Stack, listener: Stack) -> None:
    contents = [random.Random(number).randbytes(1_500_000 if number < 2 else 5_000) for number in range(6)]
    sums = {hashlib.sha256(content).digest() for content in contents}
    answered: list[bytes] = []

    async def serve(stream: Any) -> None:  # noqa: ANN401
        await write_in_pieces(stream, await read_all(stream), seed=2)  # the other side has closed: half-close

    async def one(stream: Any, content: bytes) -> None:  # noqa: ANN401
        await write_in_pieces(stream, content, seed=1)
        answered.append(hashlib.sha256(await read_all(stream)).digest())

    with trio.fail_after(ENOUGH):
        async with connections(dialer, listener) as (ann, bob), trio.open_nursery() as nursery:
            for number, content in enumerate(contents):
                here, there = (ann, bob) if number % 2 else (bob, ann)
                stream, answering = await pair_of_streams(here, there)
                nursery.start_soon(one, stream, content)
                nursery.start_soon(serve, answering)
    assert set(answered) == sums
    assert len(answered) == len(contents)


async def test_a_large_write_is_one_call_and_lands_where_the_reader_wants_it() -> None:
    content = random.Random(3).randbytes(5_000_001)
    view = memoryview(bytearray(len(content)))
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, memoryview(content))
            for start in range(0, len(view), 1 << 20):
                await other.read_into(view[start : start + (1 << 20)])
        assert view == content


async def test_the_window_grows_and_all_windows_together_have_a_limit() -> None:
    limits = MuxLimits(windows=3 * FIRST_WINDOW)
    async with connections(OURS, Stack(limits=limits)) as (ann, bob):
        first = await pair_of_streams(ann, bob)
        second = await pair_of_streams(ann, bob)
        for sending, receiving in (first, second):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sending.write, bytes(3 << 20))
                await receiving.read_into(memoryview(bytearray(3 << 20)))
        assert (first[1].window, second[1].window) == (4 * FIRST_WINDOW, FIRST_WINDOW)
        await first[1].reset()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second[0].write, bytes(3 << 20))
            await second[1].read_into(memoryview(bytearray(3 << 20)))
        assert second[1].window == 4 * FIRST_WINDOW, "what a stream no longer needs is free for others"


@pytest.mark.parametrize(("seconds", "times"), [(0.3, 4), (0.7, 2), (0.8, 1)])
async def test_a_small_window_grows_where_credit_is_slow_but_the_line_is_not(
    autojump_clock: MockClock, seconds: float, times: int
) -> None:
    """Half of it in 0.7 s is 1.5 Mbit/s: a credit that takes so long behind other data would keep any line at that."""
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(4 << 20))
            for _ in range(32):
                await trio.sleep(seconds)
                await other.read_into(memoryview(bytearray(FIRST_WINDOW // 2)))
        assert other.window == times * FIRST_WINDOW


async def test_the_window_of_a_slow_reader_stays_small(autojump_clock: MockClock) -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(4 << 20))
            for _ in range(32):
                await other.read_into(memoryview(bytearray(4 << 15)))
                await trio.sleep(1)
        assert other.window <= 2 * FIRST_WINDOW, "what comes behind it on its connection would wait for it"


def streams_of(*connections: Yamux) -> int:
    return A_STREAM * sum(len(one.streams) for one in connections)


async def test_the_connection_that_holds_most_ends_when_all_together_hold_too_much() -> None:
    memory = HeldMemory(most=300_000, most_of_strangers=300_000)
    stack = Stack(memory=memory)
    async with connections(OURS, stack) as (hoarder, held), connections(OURS, stack) as (honest, kept):
        for sender, receiver, size in ((hoarder, held, 190_000), (honest, kept, 90_000)):
            stream, other = await pair_of_streams(sender, receiver)
            await stream.write(bytes(size))
            while len(other._buffer) < size:
                await trio.lowlevel.checkpoint()
        assert memory.total == 280_000 + streams_of(held, kept)
        await stream.write(bytes(20_000))
        await hoarder.event_closed.wait()
        assert held.is_closed
        assert memory.total <= 110_000 + streams_of(kept)
        await both_work(honest, kept)
        await other.read_into(memoryview(bytearray(110_000)))
        assert memory.total == streams_of(kept)


@pytest.mark.parametrize("how", ["read", "taken", "reset here", "reset there", "both closed", "connection closed"])
async def test_what_is_no_longer_held_is_no_longer_counted(how: str) -> None:
    memory = HeldMemory()
    async with connections(OURS, Stack(memory=memory)) as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        await stream.write(bytes(1000))
        while not other._buffer:
            await trio.lowlevel.checkpoint()
        assert memory.total == 1000 + streams_of(bob)
        match how:
            case "read":
                await other.read(400)
                await other.read_into(memoryview(bytearray(600)))
            case "taken":
                await other.take()
            case "reset here":
                await other.reset()
            case "reset there":
                await stream.reset()
                await other.ended.wait()
            case "both closed":
                await stream.close()
                await other.close()
                await other.ended.wait()
                assert len(await other.read()) == 1000
            case "connection closed":
                await bob.close()
                assert len(await other.read()) == 1000
        assert memory.total == (0 if bob.is_closed else streams_of(bob))


async def test_a_message_larger_than_a_window_is_gathered_and_counts_as_unread_until_it_is_whole() -> None:
    memory = HeldMemory()
    size = 4 * FIRST_WINDOW
    async with connections(OURS, Stack(memory=memory)) as (ann, bob), trio.open_nursery() as nursery:
        stream, other = await pair_of_streams(ann, bob)
        content = random.Random(1).randbytes(size + 5)
        found: list[bytes] = []

        async def gather() -> None:
            found.append(await other.gather(size))

        nursery.start_soon(gather)
        await stream.write(content[: size - 1])
        while len(other._buffer) < size - 1:
            await trio.lowlevel.checkpoint()
        assert not found
        assert memory.total == size - 1 + streams_of(bob)
        await stream.write(content[size - 1 :])
        while not found:
            await trio.lowlevel.checkpoint()
        assert found == [content[:size]]
        assert await other.gather(5) == content[size:]
        assert memory.total == streams_of(bob)


async def test_a_cancelled_gathering_loses_no_byte_and_no_credit() -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        await stream.write(bytes(FIRST_WINDOW))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.gather, FIRST_WINDOW + 1)
            await until(lambda: len(other._buffer) == FIRST_WINDOW)
            nursery.cancel_scope.cancel()
        assert len(other._buffer) == FIRST_WINDOW
        await other.read_into(memoryview(bytearray(FIRST_WINDOW)))
        with trio.fail_after(ENOUGH):
            await both_work(ann, bob)
        assert other._allowed + other._read == other.window


async def test_windows_grow_no_more_once_memory_is_scarce() -> None:
    memory = HeldMemory(most_of_strangers=8 * FIRST_WINDOW)
    async with connections(OURS, Stack(memory=memory)) as (ann, bob), trio.open_nursery() as nursery:
        held = [await pair_of_streams(ann, bob) for _ in range(5)]
        for stream, _ in held:
            await stream.write(bytes(FIRST_WINDOW))
        while not memory.scarce:
            await trio.lowlevel.checkpoint()
        stream, other = await pair_of_streams(ann, bob)
        nursery.start_soon(stream.write, bytes(4 * FIRST_WINDOW))
        await other.read_into(memoryview(bytearray(4 * FIRST_WINDOW)))
        assert other.window == FIRST_WINDOW


async def test_a_part_of_a_record_is_held() -> None:
    memory = HeldMemory()
    async with connections(OURS, Stack(memory=memory)) as (ann, bob):
        channel = ann.secured_conn
        channel.seal(b"", memoryview(bytes(60_000)))
        sent = await channel._end.send_some(channel._out[:30_000], 1.0)
        while memory.total < sent:
            await trio.lowlevel.checkpoint()
        assert memory.total == sent == len(bob.secured_conn._partial)


async def test_what_is_sent_and_not_taken_is_held() -> None:
    memory = HeldMemory()
    async with connections(Stack(memory=memory), OURS) as (ann, bob), trio.open_nursery() as nursery:
        stream, other = await pair_of_streams(ann, bob)
        nursery.start_soon(stream.write, bytes(FIRST_WINDOW + 1000))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert memory.total == FIRST_WINDOW + 1000 + streams_of(ann)
        await other.read_into(memoryview(bytearray(FIRST_WINDOW + 1000)))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert memory.total == streams_of(ann)


async def test_others_have_their_turn_within_a_record_full_of_headers() -> None:
    async with against_frames() as (ours, other):
        await other.write(pack(Kind.DATA, Flag.SYN, 1, 0))
        stream = await ours.accept_stream()
        turns = 0
        async with trio.open_nursery() as nursery:
            await other.write(pack(Kind.WINDOW, Flag.NONE, 1, 1) * 5000)
            nursery.start_soon(trio.sleep, 0)
            while stream.credit < FIRST_WINDOW + 5000:
                await trio.lowlevel.checkpoint()
                turns += stream.credit > FIRST_WINDOW
        assert turns >= 5000 // 256


def records(channel: SecureChannel, plain: bytes, count: int) -> bytes:
    """`plain` sealed as many times, in records of their own."""
    sealed, at = memoryview(bytearray(count * (len(plain) + HEAD + TAG))), 0
    for _ in range(count):
        at += channel._sealer.seal_into(plain, sealed[at:])
    return bytes(sealed)


@pytest.mark.parametrize("body", [b"", b"x"], ids=["empty", "of a byte"])
async def test_others_have_their_turn_within_a_buffer_full_of_tiny_records(body: bytes) -> None:
    async with against_frames() as (ours, other):
        await other.write(pack(Kind.DATA, Flag.SYN, 1, 1 << 17))
        await ours.accept_stream()
        turns, read = 0, ours.secured_conn._opener._nonce
        raw = records(other, body, 3000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other._end.send_some, memoryview(raw), PROGRESS)
            while ours.secured_conn._opener._nonce < read + 3000:
                await trio.lowlevel.checkpoint()
                turns += ours.secured_conn._opener._nonce > read
        assert turns >= 3000 // 256
        assert not ours.is_closed


async def test_frames_that_carry_nothing_are_read_at_a_thousand_a_second(
    autojump_clock: MockClock,
) -> None:
    count = 3 * 4096
    async with against_frames() as (ours, other):
        await other.write(pack(Kind.DATA, Flag.SYN, 1, 0))
        stream = await ours.accept_stream()
        began = trio.current_time()
        for _ in range(count // 256):
            await other.write(pack(Kind.WINDOW, Flag.NONE, 1, 1) * 256)
        await until(lambda: stream.credit == FIRST_WINDOW + count)
        assert trio.current_time() - began == pytest.approx((count - 4096) / 1000, rel=0.1)


@pytest.mark.parametrize("receives", [True, False])
async def test_content_pays_for_its_frames(receives: bool, autojump_clock: MockClock) -> None:
    """Of 8 KiB each, or of credit for as much."""
    async with against_frames() as (ours, other), trio.open_nursery() as nursery:
        await other.write(pack(Kind.DATA, Flag.SYN, 1, 0))
        stream, count, began = await ours.accept_stream(), 8000, trio.current_time()
        if receives:
            nursery.start_soon(read_all, stream)
            for _ in range(count):
                await other.write(pack(Kind.DATA, Flag.NONE, 1, 8192) + bytes(8192))
            await other.write(pack(Kind.DATA, Flag.FIN, 1, 0))
            await stream.ended.wait()
        else:
            nursery.start_soon(drop, other)
            for _ in range(count):
                await other.write(pack(Kind.WINDOW, Flag.NONE, 1, 8192))
                await stream.write(bytes(8192))
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began < 0.1


async def drop(other: SecureChannel) -> None:
    while True:
        await other.read()


async def test_what_still_comes_for_a_stream_that_was_reset_is_dropped() -> None:
    async with against_frames() as (ours, other):
        await other.write(pack(Kind.DATA, Flag.SYN, 1, 100) + bytes(50))
        stream = await ours.accept_stream()
        await stream.reset()
        await other.write(bytes(50) + pack(Kind.PING, Flag.SYN, 0, 7))
        while unpack((await other.read())[-HEADER_SIZE:]).kind != Kind.PING:
            pass
        assert not stream._buffer
        with pytest.raises(MuxedStreamReset):
            await stream.read()


async def test_a_reader_that_does_not_read_stalls_its_own_stream_only(autojump_clock: MockClock) -> None:
    async with connections() as (ann, bob):
        stuck, unread = await pair_of_streams(ann, bob)
        live, other = await pair_of_streams(ann, bob)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stuck.write, bytes(2 << 20))
            await trio.sleep(60)  # libp2p's own gives up after 5
            await live.write(b"hello")
            assert await other.read(5) == b"hello"
            assert not stuck.credit
            await unread.read_into(memoryview(bytearray(2 << 20)))
        with pytest.raises(trio.TooSlowError):
            await live.write(bytes(1 << 20), patience=3.0)
        with pytest.raises(trio.TooSlowError):
            await stuck.read_into(memoryview(bytearray(1)), patience=3.0)
        assert not ann.is_closed


async def test_patience_counts_from_the_last_byte(autojump_clock: MockClock) -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)

        async def drip() -> None:
            for _ in range(10):
                await trio.sleep(2)
                await stream.write(b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            await other.read_into(memoryview(bytearray(10)), patience=3.0)


async def test_connections_that_receive_at_once_take_turns_with_one_buffer() -> None:
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(connections()) for _ in range(5)]
        await trio.testing.wait_all_tasks_blocked()
        pool = Pool()
        for _, receiver in pairs:
            receiver.secured_conn._pool = pool
        streams = [await pair_of_streams(sender, receiver) for sender, receiver in pairs]
        for sender, _ in streams:  # straight into the sockets, before any receiver runs
            channel = sender.muxed_conn.secured_conn
            channel.seal(pack(Kind.DATA, Flag.NONE, sender.stream_id, FIRST_WINDOW), memoryview(bytes(FIRST_WINDOW - 1)))
            await channel._end.send_some(channel._out, 1.0)
            channel._sent = channel._sealed
        await trio.testing.wait_all_tasks_blocked()
        assert len(pool._free) == 1


# --- ends -----------------------------------------------------------------------------------------


async def test_half_close_and_the_books() -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        await stream.write(b"question")
        await stream.close()
        await stream.close()
        with pytest.raises(MuxedStreamClosed):
            await stream.write(b"more")
        assert await read_all(other) == b"question"
        await other.write(b"answer")
        await other.close()
        assert await read_all(stream) == b"answer"
        assert stream.closed
        assert other.closed
        assert not ann.streams
        assert not bob.streams


async def test_a_reset_is_an_error_on_both_sides_and_never_an_end() -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        await stream.write(b"half of what")
        await other.read(1)
        await stream.reset()
        with pytest.raises(MuxedStreamReset):
            await stream.write(b"x")
        await other.ended.wait()
        for call in (other.read(5), other.write(b"x"), other.read_into(memoryview(bytearray(1)))):
            with pytest.raises(MuxedStreamReset):
                await call
        assert not ann.streams
        assert not bob.streams


async def test_a_lost_connection_is_no_end_of_a_stream() -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        await stream.write(b"arrived")
        while not other._buffer:
            await trio.lowlevel.checkpoint()
        ann.secured_conn._end._socket.close()  # the process dies: no FIN, no goodbye
        await bob.event_closed.wait()
        assert await other.read(7) == b"arrived"
        with pytest.raises(MuxedStreamReset):
            await other.read(1)
        with pytest.raises(MuxedConnUnavailable):
            await bob.accept_stream()
        with pytest.raises(MuxedConnUnavailable):
            await bob.open_stream()
        assert not bob.streams


class Counted(bytearray):
    """A buffer that tells whether it is still there."""

    __hash__ = object.__hash__


async def test_a_lost_connection_gives_up_its_buffers_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: weakref.WeakSet[Counted] = weakref.WeakSet()
    made = 0

    def counted(size: int) -> bytearray:
        nonlocal made
        buffer = Counted(size)
        if size == SIZE:
            made += 1
            taken.add(buffer)
        return buffer

    monkeypatch.setattr(buffers, "bytearray", counted, raising=False)
    gc.disable()
    try:
        async with connections() as (ann, bob), trio.open_nursery() as nursery:
            stream, other = await pair_of_streams(ann, bob)

            async def send() -> None:
                with suppress(MuxedStreamReset, MuxedConnUnavailable):
                    for _ in range(4):
                        await other.write(bytes(MOST_WINDOW))

            nursery.start_soon(send)
            await stream.read_into(memoryview(bytearray(MOST_WINDOW)))
            for muxed in (ann, bob):
                muxed.secured_conn._pool._free.clear()
            assert made, "large buffers were in use, and some may be"
            ann.secured_conn._end._socket.close()  # the process dies: no FIN, no goodbye
            for muxed in (ann, bob):
                await muxed.event_closed.wait()
            await trio.testing.wait_all_tasks_blocked()
            spare = [buffer for muxed in (ann, bob) for buffer in muxed.secured_conn._pool._free]
            assert len(taken) == len(spare), "though both connections, and how they ended, are still known"
    finally:
        gc.enable()


async def test_a_peer_that_freezes_ends_the_connection_by_the_deadline(autojump_clock: MockClock) -> None:
    async with against_frames() as (ours, frozen):
        await frozen.write(pack(Kind.WINDOW, Flag.SYN, 1, MOST_WINDOW))
        stream = await ours.accept_stream()
        started = trio.current_time()
        with pytest.raises((MuxedConnUnavailable, MuxedStreamReset)) as caught:
            await stream.write(bytes(8 << 20))  # more than the socket holds
        assert isinstance(caught.value.__cause__, trio.TooSlowError)
        assert PROGRESS <= trio.current_time() - started < 2 * PROGRESS
        await ours.event_closed.wait()


@pytest.mark.parametrize("cut", [3, HEADER_SIZE, HEADER_SIZE + 5])
async def test_a_frame_that_is_never_completed_ends_the_connection(cut: int, autojump_clock: MockClock) -> None:
    async with against_frames() as (ours, other):
        await other.write((pack(Kind.DATA, Flag.SYN, 1, 10) + bytes(10))[:cut])
        with trio.fail_after(PROGRESS + 0.1):
            await ours.event_closed.wait()


async def test_an_idle_connection_stays(autojump_clock: MockClock) -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        await trio.sleep(3600)
        await stream.write(b"still here")
        assert await other.read() == b"still here"


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("pair", [connections, circuits], ids=["straight", "circuit"])
async def test_cancelled_writes_and_reads_leave_the_connection_whole(pair: Any, seed: int) -> None:  # noqa: ANN401
    rng = random.Random(seed)
    async with pair() as (ann, bob), trio.open_nursery() as nursery:
        whole, whole_other = await pair_of_streams(ann, bob)
        content = rng.randbytes(3_000_000)
        received = memoryview(bytearray(len(content)))
        nursery.start_soon(whole.write, content)
        nursery.start_soon(whole_other.read_into, received)
        for _ in range(12):  # cancel after any number of task switches
            stream, other = await pair_of_streams(ann, bob)
            switches = rng.randrange(25)
            async with trio.open_nursery() as cancelled:
                cancelled.start_soon(stream.write, bytes(900_000))
                cancelled.start_soon(other.read_into, memoryview(bytearray(900_000)))
                for _ in range(switches):
                    await trio.lowlevel.checkpoint()
                cancelled.cancel_scope.cancel()
            await stream.reset()
            await other.reset()
        nursery.start_soon(both_work, ann, bob)
    assert received == content


async def both_work(ann: Yamux, bob: Yamux) -> None:
    stream, other = await pair_of_streams(ann, bob)
    await stream.write(b"ping")
    assert await other.read(4) == b"ping"
    await other.write(b"pong")
    assert await stream.read(4) == b"pong"


async def test_a_write_cancelled_when_the_socket_is_full_is_finished_by_others() -> None:
    async with against_frames() as (ours, other):
        await other.write(pack(Kind.WINDOW, Flag.SYN, 1, MOST_WINDOW))
        stream = await ours.accept_stream()
        with trio.move_on_after(0.05):
            await stream.write(bytes(8 << 20))
        assert ours.secured_conn.unsent, "the socket was not full"
        await other.write(pack(Kind.PING, Flag.SYN, 0, 7))
        deframer = Deframer()
        sizes = []
        pong = None
        with trio.fail_after(ENOUGH):
            while pong is None:
                for item in deframer.feed(memoryview(await other.read())):
                    if isinstance(item, Frame) and item.kind == Kind.DATA:
                        sizes.append(item.length)
                    elif isinstance(item, Frame) and item.kind == Kind.PING:
                        pong = item.length
        assert pong == 7
        assert deframer.body == 0
        assert FIRST_WINDOW + MOST_WINDOW - sum(sizes) == stream.credit


# --- on a circuit ---------------------------------------------------------------------------------


class Gate:
    """A meter that opens; `taken` counts what was paid for."""

    def __init__(self) -> None:
        self.open = trio.Event()
        self.open.set()
        self.taken = 0

    def piece(self, most: int) -> int:
        return min(most, 20_000)

    async def up(self, count: int) -> None:
        await self.open.wait()
        self.taken += count

    async def down(self, count: int) -> None:
        self.taken += count


async def test_what_a_circuit_carries_is_paid_for_once_and_in_pieces() -> None:
    meter = Gate()
    async with circuits(Stack(meter=meter)) as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        before = meter.taken
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, bytes(200_000))
            await other.read_into(memoryview(bytearray(200_000)))
        assert 200_000 < meter.taken - before < 210_000
        assert ann.secured_conn.meter.piece(1 << 20) == 20_000, "others on the circuit wait for no more than that"


async def test_a_write_to_a_circuit_that_waits_for_the_meter_can_be_cancelled(autojump_clock: MockClock) -> None:
    meter = Gate()
    async with circuits(Stack(meter=meter)) as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        await stream.write(b"x")
        await other.read(1)
        meter.open = trio.Event()
        began = trio.current_time()
        with trio.move_on_after(1):
            await stream.write(bytes(100_000))
        assert trio.current_time() - began < 1.1
        meter.open.set()
        await both_work(ann, bob)


async def test_what_was_said_before_a_circuit_was_closed_arrives() -> None:
    async with connections() as (ann, bob), trio.open_nursery() as nursery:
        stream, other = await pair_of_streams(ann, bob)
        await stream.write(b"last words")
        nursery.start_soon(CircuitEndpoint(stream).close)
        await other.ended.wait()
        assert await other.take() == b"last words"
        assert await other.take() == b""
        await other.close()
    assert not ann.streams


@pytest.mark.parametrize("cancel_after", [0.05, 60])
async def test_a_circuit_whose_other_end_stays_silent_is_closed_all_the_same(
    cancel_after: float, autojump_clock: MockClock
) -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        began = trio.current_time()
        with trio.move_on_after(cancel_after):
            await CircuitEndpoint(stream).close()
        assert trio.current_time() - began < 5
        assert not ann.streams
        with pytest.raises(MuxedStreamReset):
            await other.write(bytes(FIRST_WINDOW + 1))


# --- a peer that breaks the rules -----------------------------------------------------------------


async def expect_away(other: SecureChannel, reason: Away) -> None:
    deframer = Deframer()
    with trio.fail_after(ENOUGH):
        while True:
            for item in deframer.feed(memoryview(await other.read())):
                if isinstance(item, Frame) and item.kind == Kind.GO_AWAY:
                    assert item.length == reason
                    return


SYN = pack(Kind.WINDOW, Flag.SYN, 1, 0)


@pytest.mark.parametrize(
    "frames",
    [
        struct.pack("!BBHII", 1, 0, 0, 1, 0),
        struct.pack("!BBHII", 0, 4, 0, 1, 0),
        struct.pack("!BBHII", 0, 1, 16, 1, 0),
        pack(Kind.DATA, 0, 0, 1),
        pack(Kind.PING, Flag.SYN, 1, 1),
        pack(Kind.DATA, 0, 1, 5) + b"hello",
        pack(Kind.WINDOW, 0, 2, 5),
        pack(Kind.WINDOW, Flag.SYN, 2, 0),
        SYN + SYN,
        SYN + pack(Kind.DATA, 0, 1, FIRST_WINDOW + 1),
        SYN + pack(Kind.DATA, 0, 1, 1) + b"x" + pack(Kind.DATA, 0, 1, FIRST_WINDOW),
        SYN + pack(Kind.DATA, 0, 1, MOST_WINDOW + 1),
        SYN + pack(Kind.WINDOW, 0, 1, 2**32 - 1),
        SYN + pack(Kind.WINDOW, Flag.FIN, 1, 0) + pack(Kind.DATA, 0, 1, 1) + b"x",
    ],
    ids=[
        "version",
        "type",
        "flags",
        "data without a stream",
        "ping on a stream",
        "data on an unopened stream",
        "credit for a stream of ours that we never opened",
        "a number that is ours",
        "opened twice",
        "more than the window",
        "more than what is left of the window",
        "more than any window",
        "credit without end",
        "data after the end",
    ],
)
async def test_what_the_protocol_forbids_ends_the_connection(frames: bytes) -> None:
    async with against_frames() as (ours, other):
        await other.write(frames)
        await expect_away(other, Away.PROTOCOL)
        await ours.event_closed.wait()
        with pytest.raises(MuxedConnUnavailable) as caught:
            await ours.open_stream()
        assert isinstance(caught.value.__cause__, FrameError)


async def test_a_flood_of_streams_is_refused_and_harms_no_other() -> None:
    limits = MuxLimits(streams=20, backlog=5)
    async with against_frames(Stack(limits=limits)) as (ours, other):
        count = 1000
        await other.write(b"".join(pack(Kind.WINDOW, Flag.SYN, 2 * number + 1, 0) for number in range(count)))
        deframer, refused, taken = Deframer(), set[int](), set[int]()
        with trio.fail_after(ENOUGH):
            while len(refused) + len(taken) < count:
                for item in deframer.feed(memoryview(await other.read())):
                    assert isinstance(item, Frame)
                    (refused if item.flags & Flag.RST else taken).add(item.stream)
        assert (len(taken), len(ours.streams)) == (5, 5)
        # The bytes already sent on a refused stream are dropped; those on an accepted one arrive.
        await other.write(pack(Kind.DATA, 0, max(refused), 5) + b"never" + pack(Kind.DATA, 0, 1, 4) + b"here")
        stream = await ours.accept_stream()
        assert await stream.read() == b"here"
        for _ in range(4):
            await ours.accept_stream()
        await other.write(b"".join(pack(Kind.WINDOW, Flag.SYN, 2 * number + 1, 0) for number in range(count, count + 5)))
        for _ in range(5):
            await ours.accept_stream()
        assert len(ours.streams) == 10


async def test_streams_open_at_once_have_a_limit() -> None:
    async with connections(OURS, Stack(limits=MuxLimits(streams=3))) as (ann, bob):
        held = [await pair_of_streams(ann, bob) for _ in range(3)]
        refused = await ann.open_stream()
        with pytest.raises(MuxedStreamReset):
            await refused.read(1)
        await held[0][0].reset()
        await held[0][1].ended.wait()
        await pair_of_streams(ann, bob)


@pytest.mark.parametrize("at_once", [1000, 5460, 20_000])
async def test_a_peer_that_asks_and_never_reads_the_answers_is_cut_off(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux_limits, "PER_SECOND", 1e9)
    async with against_frames() as (ours, other):
        ping = pack(Kind.PING, Flag.SYN, 0, 1) * at_once
        with trio.fail_after(ENOUGH), suppress(OSError):
            while True:
                await other.write(ping)
        await ours.event_closed.wait()
        with pytest.raises(MuxedConnUnavailable) as caught:
            await ours.accept_stream()
        assert isinstance(caught.value.__cause__, FrameError)


async def test_pings_are_answered_and_go_away_is_kept_to() -> None:
    async with against_frames() as (ours, other):
        await other.write(pack(Kind.PING, Flag.SYN, 0, 77))
        assert unpack(await other.read()) == Frame(Kind.PING, Flag.ACK, 0, 77)
        await other.write(SYN)
        stream = await ours.accept_stream()
        assert unpack(await other.read()) == Frame(Kind.WINDOW, Flag.ACK, 1, 0)
        await other.write(pack(Kind.GO_AWAY, 0, 0, Away.NORMAL) + pack(Kind.DATA, Flag.FIN, 1, 4) + b"last")
        assert await read_all(stream) == b"last"
        with pytest.raises(MuxedConnUnavailable):
            await ours.open_stream()
        assert not ours.is_closed, "the last stream is still ours to answer"
        await stream.write(b"bye")
        await stream.close()
        await ours.event_closed.wait()


async def test_flags_that_come_with_data() -> None:
    async with against_frames() as (ours, other):
        await other.write(pack(Kind.DATA, Flag.SYN | Flag.FIN, 1, 5) + b"hello")
        assert await read_all(await ours.accept_stream()) == b"hello"
        await other.write(pack(Kind.DATA, Flag.SYN | Flag.RST, 3, 5) + b"hello" + pack(Kind.WINDOW, Flag.SYN, 5, 10))
        with pytest.raises(MuxedStreamReset):
            await (await ours.accept_stream()).read()
        assert (await ours.accept_stream()).credit == FIRST_WINDOW + 10


async def test_two_tasks_may_not_read_one_stream() -> None:
    async with connections() as (ann, bob):
        stream, _ = await pair_of_streams(ann, bob)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.read, 1)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await stream.read(1)
            nursery.cancel_scope.cancel()


async def test_closing_ends_everything_at_once() -> None:
    async with connections() as (ann, bob):
        stream, other = await pair_of_streams(ann, bob)
        failed: list[Exception] = []

        async def reading(of: YamuxStream) -> None:
            try:
                await of.read(1)
            except MuxedStreamError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reading, stream)
            nursery.start_soon(reading, other)
            await trio.testing.wait_all_tasks_blocked()
            await ann.close()
        await bob.event_closed.wait()
        assert len(failed) == 2
        assert ann.is_closed
        assert bob.is_closed
        await ann.close()


# --- the frame parser under garbage ---------------------------------------------------------------

FRAMES = st.builds(
    pack, st.sampled_from(list(Kind)), st.integers(0, 15), st.integers(0, 9), st.integers(0, 40) | st.integers(0, 2**32 - 1)
)


@given(st.lists(FRAMES | st.binary(max_size=60), max_size=12), st.randoms(use_true_random=False))
def test_the_parser_takes_any_bytes_in_any_pieces(parts: list[bytes], rng: random.Random) -> None:
    content = b"".join(parts)

    def cut(sizes: list[int]) -> tuple[list[Frame], bytes, str]:
        deframer, frames, body, at = Deframer(), list[Frame](), bytearray(), 0
        try:
            for size in sizes:
                for item in deframer.feed(memoryview(content)[at : at + size]):
                    if isinstance(item, Frame):
                        frames.append(item)
                    else:
                        body += item
                at += size
        except FrameError as error:
            return frames, bytes(body), str(error)
        return frames, bytes(body), ""

    pieces = []
    while sum(pieces) < len(content):
        pieces.append(rng.randint(1, 30))
    whole = cut([len(content)])
    assert cut(pieces) == whole
    assert len(whole[0]) * HEADER_SIZE + len(whole[1]) <= len(content)


@settings(max_examples=30)
@given(st.lists(FRAMES | st.binary(max_size=60), min_size=1, max_size=20))
def test_any_frames_end_in_order(parts: list[bytes]) -> None:
    """Whatever a peer sends, the connection works or is closed, holds little, and nothing else happens."""

    async def main() -> None:
        async with against_frames(Stack(limits=MuxLimits(streams=4, backlog=2))) as (ours, other):
            await other.write(b"".join(parts))
            await SecureSession.close(other)  # the end of what it has to say
            await ours.event_closed.wait()
            assert not ours.streams

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
