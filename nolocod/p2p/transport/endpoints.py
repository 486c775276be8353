"""What a secure channel lies on: a TCP socket, a circuit, or any other connection of libp2p's.

The rule: a read or a write moves what can be moved at once, and otherwise waits for the other side. On a
socket and on a circuit both may be cancelled at any time without losing a byte.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from libp2p.abc import IRawConnection

    from nolocod.p2p.transport.yamux_stream import YamuxStream


_LINGER = 1.0
"""Seconds that the other end of a circuit has to end it after us."""


class End(Protocol):
    """Our end of a connection; failures are OSError, trio's or libp2p's own."""

    def receive_now(self, view: memoryview) -> int | None:
        """Bytes received into `view`, 0 at the end of the connection; None if nothing is there yet."""
        ...

    async def receivable(self) -> None:
        """Wait until `receive_now` has an answer."""
        ...

    async def send_some(self, view: memoryview, patience: float) -> int:
        """Send a part of `view`; its size. trio.TooSlowError if not a byte was taken for `patience` seconds."""
        ...


class SocketEndpoint:
    """Straight on the socket: a system call per megabyte, no copy, no task switch unless there is need to wait."""

    def __init__(self, socket: trio.socket.SocketType) -> None:
        self._socket = socket

    # The descriptor is asked for anew each time: it is -1 once the socket is closed, and its old number
    # may belong to somebody else by then.

    def receive_now(self, view: memoryview) -> int | None:
        try:
            return os.readv(self._socket.fileno(), [view])
        except (BlockingIOError, InterruptedError):
            return None

    async def receivable(self) -> None:
        await trio.lowlevel.wait_readable(self._descriptor())

    async def send_some(self, view: memoryview, patience: float) -> int:
        while True:
            try:
                return os.write(self._socket.fileno(), view)
            except (BlockingIOError, InterruptedError):
                with trio.fail_after(patience):
                    await trio.lowlevel.wait_writable(self._descriptor())

    def _descriptor(self) -> int:
        number = self._socket.fileno()
        if number < 0:
            raise trio.ClosedResourceError("the connection is closed.")
        return number


class _ReadAhead:
    """The receiving half of an end whose bytes come in pieces of the other side's choice."""

    def __init__(self, take: Callable[[], Awaitable[bytes | bytearray]]) -> None:
        self._take = take
        self._arrived: memoryview | None = None

    def receive_now(self, view: memoryview) -> int | None:
        if self._arrived is None:
            return None
        count = min(len(view), len(self._arrived))
        view[:count] = self._arrived[:count]
        if count:  # nothing taken is the end, and stays so
            self._arrived = self._arrived[count:] if count < len(self._arrived) else None
        return count

    async def receivable(self) -> None:
        if self._arrived is None:
            self._arrived = memoryview(await self._take())


class StreamEndpoint(_ReadAhead):
    """On a connection that is only known by libp2p's `read` and `write`."""

    _PIECE = 1 << 16

    def __init__(self, raw: IRawConnection) -> None:
        super().__init__(lambda: raw.read(self._PIECE))
        self._raw = raw

    async def send_some(self, view: memoryview, patience: float) -> int:
        # libp2p does not tell how much of a cancelled write was sent, so it is not cancelled.
        piece = bytes(view[: self._PIECE])
        with trio.CancelScope(deadline=trio.current_time() + patience, shield=True):
            await self._raw.write(piece)
            return len(piece)
        raise trio.TooSlowError


class Circuit:
    """A stream to a relay, as what libp2p takes for a raw connection's stream (ReadWriteCloser)."""

    def __init__(self, muxed: YamuxStream) -> None:
        self.muxed = muxed

    async def read(self, n: int | None = None) -> bytes:
        return await self.muxed.read_some(n)

    async def write(self, data: bytes) -> None:
        await self.muxed.write_all(data)

    async def close(self) -> None:
        """End in order, as a socket does: what was sent still arrives. A reset if the other end does not end it too."""
        self.muxed.end_writing()
        try:
            with trio.move_on_after(_LINGER):
                await self.muxed.ended.wait()
        finally:
            self.muxed.give_up()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class CircuitEndpoint(_ReadAhead):
    """On a stream to a relay."""

    def __init__(self, muxed: YamuxStream) -> None:
        super().__init__(muxed.take)
        self._muxed = muxed
        self._ahead = 0
        """Bytes that are on their way though the call that sent them was cancelled."""

    async def send_some(self, view: memoryview, patience: float) -> int:
        if not self._ahead:
            before = self._muxed.sealed
            try:
                await self._muxed.write_some(view, patience)
            finally:
                self._ahead = self._muxed.sealed - before
        ahead, self._ahead = self._ahead, 0  # after a cancelled call, the next one comes with the same bytes
        return ahead


def end_of(raw: IRawConnection) -> End:
    """The quickest end for `raw`."""
    if isinstance(raw, RawConnection) and isinstance(raw.stream, Circuit):
        return CircuitEndpoint(raw.stream.muxed)
    if isinstance(raw, RawConnection) and isinstance(raw.stream, TrioTCPStream):
        inner = raw.stream.stream
        if isinstance(inner, trio.SocketStream):
            return SocketEndpoint(inner.socket)
    return StreamEndpoint(raw)
