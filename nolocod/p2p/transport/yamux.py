"""The muxer: many streams on one secure channel, /yamux/1.0.0, with libp2p's interface.

The rule: one task reads and never waits for a write or for a stream's reader; what it has to answer it
leaves to the writers as control frames. Writers take turns, a batch each, and are not cancelled between a
nonce and its record, as the channel keeps what is not sent yet. Any fault of the other side ends the
connection, and every stream of it with an error, never with a clean end.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, cast

import trio
from libp2p.abc import IMuxedConn
from libp2p.custom_types import TProtocol
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError, MuxedStreamReset

from nolocod.p2p.transport.buffers import BATCH, HeldMemory
from nolocod.p2p.transport.deadlines import shielded
from nolocod.p2p.transport.exceptions import FOREIGN, already_gone, without_frames
from nolocod.p2p.transport.noise_records import RECORD, sealed_size
from nolocod.p2p.transport.yamux_frames import (
    FIRST_WINDOW,
    HEADER_SIZE,
    LAST_STREAM,
    MOST_WINDOW,
    Away,
    Deframer,
    Flag,
    Frame,
    FrameError,
    Kind,
    pack,
)
from nolocod.p2p.transport.yamux_limits import TURN, MuxLimits, Overhead
from nolocod.p2p.transport.yamux_stream import YamuxStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from libp2p.connection_types import ConnectionType
    from libp2p.peer.id import ID
    from multiaddr import Multiaddr

    from nolocod.p2p.transport.noise import SecureChannel

PROTOCOL = TProtocol("/yamux/1.0.0")
_MOST_CONTROL = 32 << 10
"""Bytes of control frames that wait to be sent; a peer that makes us owe more does not read."""
_GOODBYE = 0.5
"""Seconds to get a last frame out."""
A_STREAM = 8 << 10
"""Bytes that an open stream counts for: its books, and the task that serves it."""
_NOTHING = memoryview(b"")


class Yamux(IMuxedConn):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """One connection. `start` runs it until it ends; every other call may come from any task."""

    def __init__(
        self, channel: SecureChannel, peer_id: ID, limits: MuxLimits | None = None, memory: HeldMemory | None = None
    ) -> None:
        self.peer_id = peer_id
        self.secured_conn = channel
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.streams: dict[int, YamuxStream] = {}
        self.may_open: Callable[[], bool] = lambda: True  # whether the other side may open one more stream
        self.woke = False
        """A reader was woken since the last task switch."""
        self._channel = channel
        self._limits = limits or MuxLimits()
        self._memory = memory or HeldMemory()
        self._next = 1 if channel.is_initiator else 2
        self._highest = 0
        """The highest stream number of the other side."""
        self._growth = self._limits.windows
        self._accepted, self._inbound = trio.open_memory_channel[YamuxStream](self._limits.backlog)
        self._overhead = Overhead()
        self._deframer = Deframer()
        self._body_of: YamuxStream | None = None
        self._fin_follows = False
        self._control = bytearray()
        self._wake = trio.Event()
        self._lock = trio.Lock()
        self._away = False
        self._cause: Exception | None = None
        self._scope = trio.CancelScope()
        self._shutting = False

    # --- its life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    nursery.start_soon(self._write_control)
                    self.event_started.set()
        finally:
            self._fail(MuxedConnUnavailable("this host is closing."))
            await self._shut()

    async def close(self) -> None:
        self._fail(MuxedConnUnavailable("the connection was closed here."))
        await self._shut()

    def end(self, why: str) -> None:
        """End it without waiting for that, and let go of what has arrived."""
        self._fail(MuxedStreamReset(f"{why}."))

    def _fail(self, cause: Exception) -> None:
        """End everything because of `cause`; the first one counts."""
        if self._cause is not None:
            return
        self._cause = without_frames(cause)
        self._accepted.close()
        for stream in list(self.streams.values()):
            stream.break_off(cause)
        self._memory.drop(self)
        self._scope.cancel()

    async def _shut(self) -> None:
        """Say goodbye if that is possible at once, and close the channel."""
        if self._shutting:
            return
        self._shutting = True
        try:
            with shielded(_GOODBYE), already_gone():
                await self._say_goodbye()
        finally:
            with shielded(_GOODBYE), already_gone():
                await self._channel.close()
            self.event_closed.set()

    async def _say_goodbye(self) -> None:
        reason = Away.PROTOCOL if isinstance(self._cause, FrameError) else Away.NORMAL
        async with self._lock:
            await self._channel.flush()
            self._channel.seal(self._taken_control() + pack(Kind.GO_AWAY, Flag.NONE, 0, reason), _NOTHING)
            await self._channel.flush()

    # --- streams ----------------------------------------------------------------------------------

    async def open_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        self._check_open()
        if self._away or self._next > LAST_STREAM:
            raise MuxedConnUnavailable("the other side takes no more streams.")
        stream = self._enter(YamuxStream(self, self._next))
        self._next += 2
        self.control(pack(Kind.WINDOW, Flag.SYN, stream.stream_id, 0))
        return stream

    async def accept_stream(self) -> YamuxStream:
        try:
            return await self._inbound.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("the connection ended.") from self._cause

    def _enter(self, stream: YamuxStream) -> YamuxStream:
        self.streams[stream.stream_id] = stream
        self._count(A_STREAM)
        return stream

    def forget(self, stream: YamuxStream) -> None:
        """The stream is over."""
        if self.streams.pop(stream.stream_id, None) is not None:
            self._growth += stream.window - FIRST_WINDOW
            self._count(-stream.held - A_STREAM)
            self._leave_if_asked()

    def hold(self, stream: YamuxStream, count: int) -> None:
        """`count` bytes more of `stream`, or less, wait to be read or sent; what is left of one that is over is its owner's."""
        if self.streams.get(stream.stream_id) is stream:
            self._count(count)

    def _count(self, count: int) -> None:
        if self._cause is None:
            self._memory.add(self, count)

    def grant(self, window: int) -> int:
        """By how much a receive window of `window` bytes may grow now: it doubles, within the limits."""
        grown = 0 if self._memory.scarce else min(window, MOST_WINDOW - window, self._growth)
        self._growth -= grown
        return grown

    # --- writing ----------------------------------------------------------------------------------

    def control(self, frame: bytes) -> None:
        """Send a header soon, after all that was written before."""
        if self._cause is not None:
            return
        self._control += frame
        self._wake.set()
        if len(self._control) > _MOST_CONTROL:
            self._fail(FrameError("the peer makes us answer, but does not read the answers."))

    async def send(self, stream: YamuxStream, view: memoryview) -> int:
        """Send a part of `view`, as much as credit and the meter allow at once; its size."""
        async with self._turn():
            size = min(len(view), stream.credit, self._channel.meter.piece(BATCH), BATCH)
            if not size:
                return 0  # another writer of the stream was quicker
            await self._channel.meter.up(sealed_size(len(self._control) + HEADER_SIZE) + sealed_size(size))
            stream.check_writable()
            size = min(size, stream.credit)
            stream.credit -= size
            stream.sealed += size
            self._overhead.pay(size)
            self._channel.seal(self._taken_control() + pack(Kind.DATA, Flag.NONE, stream.stream_id, size), view[:size])
        return size

    async def _write_control(self) -> None:
        """Send control frames that no writer takes along, and what cancelled writers left."""
        while self._cause is None:
            await self._wake.wait()
            self._wake = trio.Event()
            try:
                async with self._turn():
                    if self._control:
                        await self._channel.meter.up(sealed_size(len(self._control)))
                        self._channel.seal(self._taken_control(), _NOTHING)
            except MuxedConnUnavailable:
                return

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the turn to seal, and send what was sealed. MuxedConnUnavailable if that fails."""
        async with self._lock:
            self._check_open()
            try:
                await self._channel.flush()  # what a cancelled writer left
                yield
                await self._channel.flush()
            except MuxedStreamError:
                raise  # found out before anything was sealed
            except FOREIGN as error:
                self._fail(error)
                raise MuxedConnUnavailable(f"the connection was lost: {error}") from error
            finally:
                if self._channel.unsent:
                    self._wake.set()

    def _taken_control(self) -> bytes:
        taken = bytes(self._control)
        self._control.clear()
        return taken

    @property
    def heard_at(self) -> float:
        """When bytes last came in (trio's time)."""
        return self._channel.heard_at

    def _check_open(self) -> None:
        if self._cause is not None:
            raise MuxedConnUnavailable("the connection is closed.") from self._cause

    # --- reading ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._handle(self._channel.leftover())
            while self._cause is None:
                await self._read_records()
                partial = self._channel.release()
                self._count(partial)
                await self._overhead.settle()
                await self._channel.fill(due=self._deframer.inside, bulk=self._deframer.body > RECORD)
                self._count(-partial)
        except FOREIGN as error:
            self._fail(error)

    async def _read_records(self) -> None:
        """Open the records that have arrived, each where its bytes belong: all, or as many as may be now."""
        channel, deframer = self._channel, self._deframer
        while not self._overhead.due and (size := channel.pending()) is not None:
            self._overhead.charge()
            self._overhead.pay(size)
            stream = self._body_of
            place = stream.place(size) if stream is not None and 0 < size <= deframer.body else None
            if stream is not None and place is not None:
                channel.open_into(place)
                deframer.body -= size
                stream.placed(size)
                if not deframer.body:
                    self._body_ends()
            else:
                await self._handle(channel.open(size))
            if self.woke:  # let it ask for its next bytes before these come
                self.woke = False
                await trio.lowlevel.checkpoint()

    async def _handle(self, plain: memoryview) -> None:
        """Follow all frames in `plain`; others have their turn after so many."""
        while self._cause is None:
            for item in islice(self._deframer.feed(plain), TURN):
                if isinstance(item, Frame):
                    self._overhead.charge()
                    self._handle_frame(item)
                    continue
                if self._body_of is not None:
                    self._body_of.deliver(item)
                if not self._deframer.body:
                    self._body_ends()
            if self._deframer.at == len(plain):
                return
            plain = memoryview(bytes(plain[self._deframer.at :]))  # others use its memory meanwhile
            await trio.lowlevel.checkpoint()

    def _body_ends(self) -> None:
        stream, self._body_of = self._body_of, None
        if stream is not None and self._fin_follows:
            stream.finish()

    def _handle_frame(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.PING:
                if frame.flags & Flag.SYN:
                    self.control(pack(Kind.PING, Flag.ACK, 0, frame.length))
            case Kind.GO_AWAY:
                self._away = True
                self._leave_if_asked()
            case _:
                self._handle_stream_frame(frame)

    def _handle_stream_frame(self, frame: Frame) -> None:
        stream = self._inbound_stream(frame.stream) if frame.flags & Flag.SYN else self.streams.get(frame.stream)
        if stream is None:
            self._check_known(frame.stream)
        elif frame.flags & Flag.RST:
            stream.break_off(MuxedStreamReset("the other side reset the stream."))
            stream = None
        elif frame.kind == Kind.DATA:
            stream.announce(frame.length)
        else:
            stream.add_credit(frame.length)
        if frame.kind == Kind.DATA and frame.length:
            self._body_of = stream  # None: the body is dropped
            self._fin_follows = bool(frame.flags & Flag.FIN)
        elif frame.flags & Flag.FIN and stream is not None:
            stream.finish()

    def _inbound_stream(self, number: int) -> YamuxStream | None:
        """A stream that the other side opens; None if there are too many, before anything is made of it."""
        if number % 2 == self._next % 2 or number in self.streams:
            raise FrameError(f"the other side opens stream {number}, which is not free.")
        self._highest = max(self._highest, number)
        try:
            inbound = sum(1 for known in self.streams if known % 2 == number % 2)
            if self._away or inbound >= self._limits.streams or not self.may_open():
                raise trio.WouldBlock
            self._accepted.send_nowait(stream := YamuxStream(self, number))
        except (trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
            self.control(pack(Kind.WINDOW, Flag.RST, number, 0))
            return None
        self.control(pack(Kind.WINDOW, Flag.ACK, number, 0))
        return self._enter(stream)

    def _check_known(self, number: int) -> None:
        """Frames may still come for a stream that is over here, but not for one that never was."""
        if number > self._highest if number % 2 != self._next % 2 else number >= self._next:
            raise FrameError(f"a frame for stream {number}, which was never opened.")

    def _leave_if_asked(self) -> None:
        if self._away and not self.streams:
            self._fail(MuxedConnUnavailable("the other side closed the connection."))

    # --- the rest of libp2p's interface -----------------------------------------------------------

    @property
    def is_initiator(self) -> bool:
        return bool(self._channel.is_initiator)

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and self._cause is None

    @property
    def is_closed(self) -> bool:
        return self._cause is not None

    def get_remote_address(self) -> tuple[str, int] | None:
        return cast("tuple[str, int] | None", self._channel.get_remote_address())

    def get_transport_addresses(self) -> list[Multiaddr]:
        return cast("list[Multiaddr]", self._channel.get_transport_addresses())

    def get_connection_type(self) -> ConnectionType:
        return self._channel.get_connection_type()
