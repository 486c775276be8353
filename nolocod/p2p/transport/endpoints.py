"""What a secure channel lies on: a TCP connection, or a circuit through a relay.

The rule: a read or a write moves what can be moved at once, and otherwise waits for the other side; both may be
cancelled at any time without losing a byte. During the handshake libp2p itself reads and writes (ReadWriteCloser).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream

if TYPE_CHECKING:
    from nolocod.p2p.transport.yamux_stream import YamuxStream

_LINGER = 1.0
"""Seconds that the other end of a circuit has to end it after us."""


class TcpEndpoint(TrioTCPStream):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """Straight on the socket: a system call per megabyte, no copy, no task switch unless there is need to wait.

    Failures are OSError, trio's or libp2p's own.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self._socket = stream.socket
        self._remote: tuple[str, int] | None = None

    # The descriptor is asked for anew each time: it is -1 once the socket is closed, and its old number
    # may belong to somebody else by then.

    def receive_now(self, view: memoryview) -> int | None:
        """Bytes received into `view`, 0 at the end of the connection; None if nothing is there yet."""
        try:
            return os.readv(self._socket.fileno(), [view])
        except (BlockingIOError, InterruptedError):
            return None

    async def receivable(self) -> None:
        """Wait until `receive_now` has an answer."""
        await trio.lowlevel.wait_readable(self._descriptor())

    async def send_some(self, view: memoryview, patience: float) -> int:
        """Send a part of `view`; its size. trio.TooSlowError if not a byte was taken for `patience` seconds."""
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

    def get_remote_address(self) -> tuple[str, int] | None:
        """With IPv6 too, where libp2p's own class returns None; the last known one after the connection ended."""
        try:
            host, port, *_ = self._socket.getpeername()
        except (OSError, ValueError):  # gone, or no address of the internet
            return self._remote
        self._remote = plain(host), int(port)
        return self._remote


class CircuitEndpoint(ReadWriteCloser):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """On a stream to a relay, which has joined it to the other end."""

    def __init__(self, muxed: YamuxStream) -> None:
        self._muxed = muxed
        self._arrived: memoryview | None = None
        self._ahead = 0
        """Bytes that are on their way though the call that sent them was cancelled."""

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
            self._arrived = memoryview(await self._muxed.take())

    async def send_some(self, view: memoryview, patience: float) -> int:
        if not self._ahead:
            before = self._muxed.sealed
            try:
                await self._muxed.write_some(view, patience)
            finally:
                self._ahead = self._muxed.sealed - before
        ahead, self._ahead = self._ahead, 0  # after a cancelled call, the next one comes with the same bytes
        return ahead

    async def read(self, n: int | None = None) -> bytes:
        return await self._muxed.read(n)

    async def write(self, data: bytes) -> None:
        await self._muxed.write(data)

    async def close(self) -> None:
        """End in order, as a socket does: what was sent still arrives. A reset if the other end does not end it too."""
        self._muxed.end_writing()
        try:
            with trio.move_on_after(_LINGER):
                await self._muxed.ended.wait()
        finally:
            self._muxed.give_up()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def plain(host: str) -> str:
    """An IP address without a zone, and IPv4 as IPv4 where it came in on an IPv6 socket."""
    return host.partition("%")[0].lower().removeprefix("::ffff:") if "." in host else host.partition("%")[0]
