"""Frames over a stream: what every driver of the protocol shares.

The rule: one frame at a time on a stream; who cancels one waits a moment for its end. One that was cut short makes the stream
useless, and then it is reset, never closed as if all had been said. A chunk goes from its place to its place.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from nolocod.errors import PeerUnavailableError, RemoteError
from nolocod.p2p.transport.deadlines import shielded, to_the_end
from nolocod.proto.framing import HEAD_SIZE, ChunkHead, EnvelopeHead, chunk_head, envelope_head, parse_head
from nolocod.proto.limits import FIRST

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.limits import Limits

_PIECE = 512 << 10
"""Bytes of a chunk after which its progress is told."""


class Channel:
    """Frames on one stream."""

    def __init__(self, stream: Stream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._lock = trio.Lock()
        self._torn = False
        self.spoke_at = trio.current_time()
        """When the last frame of ours was sent (trio's time)."""

    @property
    def remote(self) -> PeerId:
        return self._stream.remote

    async def send_envelope(self, raw: bytes) -> None:
        await self._send(envelope_head(len(raw)) + raw)

    async def send_chunk(self, index: int, content: memoryview, moved: Callable[[int], None] = lambda _: None) -> None:
        """`moved` is told of bytes as they go."""
        await self._send(chunk_head(index, len(content)), *_pieces(content), moved=moved)

    async def receive(self, most: Callable[[], int] = lambda: FIRST) -> bytes | ChunkHead:
        """Wait for a frame: an envelope is returned whole, of a chunk the head; the caller reads its content.

        `most` is asked once the head is here: bytes of the largest envelope that may come then.
        """
        raw = await self._stream.read_exactly(HEAD_SIZE)
        head = parse_head(raw, most(), self._limits.chunk_bytes)
        return await self._stream.read_exactly(head.length) if isinstance(head, EnvelopeHead) else head

    async def receive_envelope(self, most: Callable[[], int] = lambda: FIRST) -> bytes:
        """ProtocolError if a chunk comes, or more bytes than `most` tells once the head is here."""
        raw = await self._stream.read_exactly(HEAD_SIZE)
        return await self._stream.read_exactly(parse_head(raw, most()).length)

    async def read_into(self, view: memoryview, moved: Callable[[int], None] = lambda _: None) -> None:
        """Fill `view`; `moved` is told of bytes as they come."""
        for piece in _pieces(view):
            await self._stream.read_into(piece)
            moved(len(piece))

    async def close(self) -> None:
        """Let go of the stream: in order if that is possible at once, or else by reset."""
        with self._moment() as scope, suppress(RemoteError):
            await (self._stream.reset() if self._torn else self._stream.close())
        if scope.cancelled_caught:
            await self.reset()

    async def reset(self) -> None:
        with self._moment(), suppress(RemoteError):
            await self._stream.reset()

    async def last_words(self, raw: bytes) -> None:
        """Send an envelope if that is possible within a moment, and close."""
        with self._moment(), suppress(RemoteError):
            await self.send_envelope(raw)
        await self.close()

    def _moment(self) -> trio.CancelScope:
        """For what is still to be done when all else is cancelled."""
        return shielded(self._limits.abort_seconds)

    async def _send(self, *parts: bytes | memoryview, moved: Callable[[int], None] = lambda _: None) -> None:
        async def write() -> None:
            self._torn = True
            for part in parts:
                await self._stream.write(part)
                moved(len(part))
            self._torn = False
            self.spoke_at = trio.current_time()

        async with self._lock:
            if self._torn:
                raise PeerUnavailableError("the stream was given up in the middle of a frame.")
            await to_the_end(write, self._limits.abort_seconds)


def _pieces(view: memoryview) -> list[memoryview]:
    return [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]


async def send_working(channel: Channel, working: Callable[[], bytes], every: float) -> None:
    """Send `working()` whenever nothing else was said for `every` seconds."""
    while True:
        due = channel.spoke_at + every  # one sum: a difference may leave a wait too short for the clock to move on
        if trio.current_time() >= due:
            await channel.send_envelope(working())
        else:
            await trio.sleep_until(due)
