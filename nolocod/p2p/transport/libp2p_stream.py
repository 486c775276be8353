"""A stream of libp2p's as a `stream.Stream`.

The rule: what is read and written goes past libp2p's own stream to our muxer, which can be cancelled at any
time; opening, closing and the books are libp2p's.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from nolocod.identity import PeerId
from nolocod.p2p.transport.connection import origin_of
from nolocod.p2p.transport.deadlines import shielded
from nolocod.p2p.transport.exceptions import already_gone, map_exceptions
from nolocod.p2p.transport.multiaddrs import multiaddr_of
from nolocod.units import Address

if TYPE_CHECKING:
    from libp2p.network.stream.net_stream import NetStream

    from nolocod.p2p.transport.connection import Origin
    from nolocod.p2p.transport.yamux_stream import YamuxStream

_RESET = 1.0
"""Seconds for libp2p's books; a reset itself waits for nothing."""


class LibStream:
    """`progress` is the deadline in seconds for any byte to move."""

    def __init__(self, raw: NetStream, progress: float) -> None:
        self._raw = raw
        # Past NetStream, which knows no deadlines and copies what it reads.
        self.muxed: YamuxStream = raw.muxed_stream
        self.remote = PeerId(str(raw.muxed_conn.peer_id))
        self._progress = progress

    @property
    def origin(self) -> Origin:
        """How the connection came about that the stream is on."""
        return origin_of(self._raw)

    @property
    def remote_address(self) -> str | None:
        """The multiaddr that the peer comes from; None through a relay."""
        found = None if self.origin.reach == "relayed" else self._raw.muxed_conn.secured_conn.get_remote_address()
        return multiaddr_of(Address(*found)) if found else None

    async def read_exactly(self, count: int) -> bytes:
        with map_exceptions(self.remote, "reading"):
            return await self.muxed.gather(count, self._progress)

    async def read_into(self, view: memoryview) -> None:
        with map_exceptions(self.remote, "reading"):
            await self.muxed.read_into(view.cast("B"), self._progress)

    async def arrived(self, most: int | None) -> bytes | bytearray:
        """What has arrived, at most `most` bytes; empty at the clean end. Without a deadline on progress."""
        with map_exceptions(self.remote, "reading"), suppress(MuxedStreamEOF):
            return await (self.muxed.take() if most is None else self.muxed.read(most))
        return b""

    async def write(self, data: bytes | memoryview) -> None:
        with map_exceptions(self.remote, "writing"):
            await self.muxed.write(data, self._progress)

    async def close(self) -> None:
        # NetStream.close only ends our side of a yamux stream; close_write would leave the stream in the
        # swarm's books for the connection's lifetime.
        with map_exceptions(self.remote, "closing"):
            await self._raw.close()

    async def reset(self) -> None:
        # Cancelled on its way, libp2p would keep the stream in its books for the connection's lifetime.
        with shielded(_RESET), already_gone():
            await self._raw.reset()

    async def finish(self, patience: float) -> None:
        """End a stream that was served: close our side and wait up to `patience` seconds for the other's.

        A stream that only one side closed stays in the muxer's books for the connection's lifetime.
        """
        await self.close()
        with trio.move_on_after(patience):
            await self.muxed.ended.wait()
        if not self.muxed.closed:
            await self.reset()
