"""One stream of a multiplexed connection.

The rule: nothing here moves bytes; the connection's reader puts them where they are wanted, in the waiting
caller's own memory if it can, and its writer takes them from there. Reads and writes may be cancelled
without harm to the connection. A stream without a FIN from the other side never ends cleanly.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from nolocod.p2p.transport.yamux_frames import FIRST_WINDOW, Flag, FrameError, Kind, pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_MOST_CREDIT = 2**32 - 1
_FOREVER = float("inf")
_QUICK = 0.5
"""A window of which half lasts for so many seconds is longer than most round trips, and grows no more ..."""
_SMALL, _QUICK_IF_SMALL = 1 << 20, 0.75
"""... but for one that is smaller than this. Behind what both sides send on a slow line, credit takes longer; and half of the
first window in that time is a line of 1.4 Mbit/s."""


class Multiplexer(Protocol):
    """What a stream asks of its connection (yamux.Yamux)."""

    woke: bool
    """A reader was woken since the last task switch."""

    def control(self, frame: bytes) -> None: ...
    async def send(self, stream: YamuxStream, view: memoryview) -> int: ...
    def grant(self, window: int) -> int: ...
    def hold(self, stream: YamuxStream, count: int) -> None: ...
    def forget(self, stream: YamuxStream) -> None: ...
    def get_remote_address(self) -> tuple[str, int] | None: ...


class YamuxStream(IMuxedStream):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """Made by its connection. `patience` below: seconds in which at least one byte has to move, or trio.TooSlowError."""

    def __init__(self, conn: Multiplexer, number: int) -> None:
        self.muxed_conn = conn
        self.stream_id = number
        self.credit = FIRST_WINDOW
        """Bytes that we may send."""
        self.window = FIRST_WINDOW
        """Bytes that the other side may send before we read any."""
        self.sealed = 0
        """Bytes that will be sent, whoever is cancelled now."""
        self.send_closed = False
        self.recv_closed = False
        self.ended = trio.Event()
        """Set when the other side will send no more, in whatever way that came."""
        self._allowed = FIRST_WINDOW
        self._read = 0
        """Bytes that were read and for which no credit was given back."""
        self._credited = trio.current_time()
        self._buffer = bytearray()
        self._target: memoryview | None = None
        """Where a waiting reader wants its bytes."""
        self._moved = 0.0
        self._sending = 0
        """Bytes that a write was given and that are not all sent."""
        self._reading = False
        self._readable = trio.Event()
        self._writable = trio.Event()
        self._broken: Exception | None = None

    # --- reading ----------------------------------------------------------------------------------

    async def read(self, n: int | None = None) -> bytes:
        """At most `n` bytes, at least one. MuxedStreamEOF at the end, MuxedStreamReset if there is none."""
        await trio.lowlevel.checkpoint()
        if n == 0:
            return b""
        await self._something()
        view = memoryview(bytearray(len(self._buffer) if n is None or n < 0 else min(n, len(self._buffer))))
        self._take(view)
        return bytes(view)

    async def take(self) -> bytearray:
        """All that has arrived, at least one byte, without a copy; empty at the clean end of the stream."""
        await trio.lowlevel.checkpoint()
        try:
            await self._something()
        except MuxedStreamEOF:
            return bytearray()
        taken, self._buffer = self._buffer, bytearray()
        self.muxed_conn.hold(self, -len(taken))
        self._give_back(len(taken))
        return taken

    async def read_into(self, view: memoryview, patience: float = _FOREVER) -> None:
        """Fill `view` (of bytes). MuxedStreamEOF if the stream ends before."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._reader():
            rest = view[self._take(view) :]
            if not len(rest):
                return
            self._check_readable()
            self._target = rest
            while len(self._target):
                await self._arrival(patience)
                if len(self._target):
                    self._check_readable()

    async def gather(self, count: int, patience: float = _FOREVER) -> bytes:
        """The next `count` bytes, in memory that grows as they arrive; until all are here they count as unread."""
        await trio.lowlevel.checkpoint_if_cancelled()
        credited = 0
        try:
            with self._reader():
                while True:
                    arrived = min(len(self._buffer), count)
                    self._give_back(arrived - credited)  # they may be more than a window
                    credited = arrived
                    if arrived == count:
                        break
                    self._check_readable()
                    await self._arrival(patience)
        except BaseException:
            self._read -= credited  # whoever takes them in our stead counts them again
            raise
        with memoryview(self._buffer) as whole:
            taken = bytes(whole[:count])
        del self._buffer[:count]
        self.muxed_conn.hold(self, -count)
        return taken

    @contextmanager
    def _reader(self) -> Iterator[None]:
        if self._reading:
            raise trio.BusyResourceError("another task reads this stream.")
        self._reading = True
        try:
            yield
        finally:
            self._target = None
            self._reading = False

    def _take(self, view: memoryview) -> int:
        """Move bytes that have arrived into `view`; how many."""
        count = min(len(view), len(self._buffer))
        if count:
            with memoryview(self._buffer) as whole:
                view[:count] = whole[:count]
            del self._buffer[:count]
            self.muxed_conn.hold(self, -count)
            self._give_back(count)
        return count

    async def _something(self) -> None:
        """Wait until there is something to read."""
        with self._reader():
            while not self._buffer:
                self._check_readable()
                await self._arrival(_FOREVER)

    async def _arrival(self, patience: float) -> None:
        """Wait until the reader is woken; TooSlowError if nothing at all arrived for `patience` seconds."""
        self._readable = trio.Event()
        self._moved = trio.current_time()
        while True:
            with trio.move_on_at(self._moved + patience):
                await self._readable.wait()
                return
            if trio.current_time() >= self._moved + patience:
                raise trio.TooSlowError

    def _check_readable(self) -> None:
        if self._broken is not None:
            raise MuxedStreamReset(str(self._broken)) from self._broken
        if self.recv_closed:
            raise MuxedStreamEOF("the other side has said all.")

    def _give_back(self, count: int) -> None:
        """Count what was read; credit is returned for half a window at once, and the window grows if that went quickly."""
        self._read += count
        if self._read * 2 < self.window or self.ended.is_set():
            return
        now = trio.current_time()
        quick = _QUICK if self.window >= _SMALL else _QUICK_IF_SMALL
        grown = self.muxed_conn.grant(self.window) if now - self._credited < quick else 0
        self._credited = now
        self.window += grown
        delta, self._read = self._read + grown, 0
        self._allowed += delta
        self.muxed_conn.control(pack(Kind.WINDOW, Flag.NONE, self.stream_id, delta))

    # --- writing ----------------------------------------------------------------------------------

    async def write(self, data: bytes | memoryview, patience: float = _FOREVER) -> None:
        """Send all of `data`. MuxedStreamClosed after our `close`, MuxedStreamReset if the stream is gone."""
        view = memoryview(data).cast("B")
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check_writable()
        size = len(view)
        self._sending += size
        self.muxed_conn.hold(self, size)
        try:
            while len(view):
                view = view[await self.write_some(view, patience) :]
        finally:
            self._sending -= size
            self.muxed_conn.hold(self, -size)

    async def write_some(self, view: memoryview, patience: float = _FOREVER) -> int:
        """Send a part of `view`; its size. `sealed` tells of it also where this is cancelled."""
        await self._more_credit(patience)
        return await self.muxed_conn.send(self, view)

    async def _more_credit(self, patience: float) -> None:
        while not self.credit:
            self.check_writable()
            if self._writable.is_set():
                self._writable = trio.Event()
            with trio.fail_after(patience):
                await self._writable.wait()

    def check_writable(self) -> None:
        if self._broken is not None:
            raise MuxedStreamReset(str(self._broken)) from self._broken
        if self.send_closed:
            raise MuxedStreamClosed("the stream is closed for writing.")

    # --- ending -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Say that no more is sent; what comes can still be read. Never waits."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.end_writing()

    def end_writing(self) -> None:
        if self.send_closed or self._broken is not None:
            return
        self.send_closed = True
        self._writable.set()
        self.muxed_conn.control(pack(Kind.WINDOW, Flag.FIN, self.stream_id, 0))
        self._forget_if_over()

    async def reset(self) -> None:
        """Give the stream up, both ways. Never waits."""
        self.give_up()

    def give_up(self) -> None:
        if self._broken is None:
            if not (self.send_closed and self.recv_closed):
                self.muxed_conn.control(pack(Kind.WINDOW, Flag.RST, self.stream_id, 0))
            self.break_off(MuxedStreamReset("the stream was reset here."))

    @property
    def held(self) -> int:
        """Bytes that have arrived and wait to be read, or wait to be sent."""
        return len(self._buffer) + self._sending

    @property
    def closed(self) -> bool:
        return self._broken is not None or (self.send_closed and self.recv_closed)

    def _forget_if_over(self) -> None:
        if self.send_closed and self.recv_closed:
            self.muxed_conn.forget(self)

    # --- what the connection's reader tells -------------------------------------------------------

    def announce(self, length: int) -> None:
        """`length` bytes will come; FrameError if that is more than the other side may send."""
        if length > self._allowed or self.recv_closed:
            raise FrameError(f"{length} bytes on stream {self.stream_id} where {self._allowed} are allowed.")
        self._allowed -= length

    def place(self, size: int) -> memoryview | None:
        """Where the next `size` bytes may be put directly; `placed` says when they are there."""
        return self._target[:size] if self._target is not None and len(self._target) >= size else None

    def placed(self, size: int) -> None:
        assert self._target is not None
        self._target = self._target[size:]
        self._moved = trio.current_time()
        self._give_back(size)
        if not len(self._target):
            self._wake_reader()

    def deliver(self, piece: memoryview) -> None:
        """Take a copy of `piece`."""
        if self._broken is not None:
            return
        if self._target is not None and len(self._target):
            direct = min(len(piece), len(self._target))
            self._target[:direct] = piece[:direct]
            self.placed(direct)
            piece = piece[direct:]
        if len(piece):
            self._buffer += piece
            self.muxed_conn.hold(self, len(piece))
            if self._target is None:
                self._wake_reader()

    def add_credit(self, count: int) -> None:
        """The other side can take `count` bytes more."""
        self.credit += count
        if self.credit > _MOST_CREDIT:
            raise FrameError(f"a window of {self.credit} bytes on stream {self.stream_id}.")
        if count:
            self._writable.set()

    def finish(self) -> None:
        """The other side has sent all."""
        self.recv_closed = True
        self.ended.set()
        self._wake_reader()
        self._forget_if_over()

    def break_off(self, cause: Exception) -> None:
        """The stream or its connection is gone. What has arrived can be read if that was not the peer's wish."""
        if self._broken is not None:
            return
        self._broken = cause
        if isinstance(cause, MuxedStreamReset):
            self.muxed_conn.hold(self, -len(self._buffer))
            self._buffer.clear()
        self.ended.set()
        self._writable.set()
        self._wake_reader()
        self.muxed_conn.forget(self)

    def _wake_reader(self) -> None:
        if self._reading:
            self._readable.set()
            self.muxed_conn.woke = True

    # --- the rest of libp2p's interface -----------------------------------------------------------

    def set_deadline(self, ttl: int) -> None:
        """Nobody in libp2p calls it; deadlines here are `patience`."""
        raise NotImplementedError

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()
