"""A throughput probe: how fast the line to a peer is, measured with a few megabytes that it grants.

The rule: whoever is asked decides how much. A peer gets a few megabytes in ten minutes, all peers together a
bounded multiple of that, one at a time; what is asked for beyond is refused at once, with a grant of zero.
All of it goes by the meter of the node, as everything does that is on the wire.

A question is one byte, `_DOWN` or `_UP`, and four of a count (big endian); the answer four bytes of how many
are granted. Then the one who is to send sends so many zeros, and on the way up four bytes of their count come
back as the receipt.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from nolocod.errors import PeerBusyError, ProtocolError
from nolocod.identity import short
from nolocod.p2p.transport.deadlines import deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.p2p.transport.stream import Dial, Stream

THROUGHPUT = "/nolocod/sample"
Way = Literal["down", "up"]

_DOWN, _UP = 0, 1
_QUESTION = struct.Struct(">BI")
_COUNT = struct.Struct(">I")
_PIECE = bytes(64 << 10)
_FIRST = 128 << 10
"""Bytes of the first probe, from which the second is reckoned."""
_MOST = 1408 << 10
"""Bytes of the second: both, both ways, are 3 MB."""
_ENOUGH = 2.0
"""Seconds that the second probe is to take."""


@dataclass(frozen=True)
class ProbeLimits:
    """What is given away. Bytes both ways together, seconds."""

    per_peer: int = 4 << 20
    total: int = 64 << 20
    span: float = 600.0
    least: int = 16 << 10
    """Less is not granted: it bounds how many grants are remembered."""
    answer: float = 20.0
    """For one probe."""


class ThroughputProbes:
    """The side that is asked. `clock` in seconds."""

    def __init__(self, limits: ProbeLimits | None = None, clock: Callable[[], float] = trio.current_time) -> None:
        self._limits = limits or ProbeLimits()
        self._clock = clock
        self._given: deque[tuple[float, PeerId, int]] = deque()
        self._busy = False

    async def handle(self, stream: Stream) -> None:
        """Answer one stream. Raises RemoteError for a peer's fault."""
        with deadline(self._limits.answer, f"a throughput probe of {short(stream.remote)}"):
            way, asked = _QUESTION.unpack(await stream.read_exactly(_QUESTION.size))
            if way not in (_DOWN, _UP):
                raise ProtocolError(f"{short(stream.remote)} asks for a throughput probe in a direction that does not exist.")
            if self._busy:
                await stream.write(_COUNT.pack(0))
                return
            self._busy = True
            try:
                granted = self.grant(stream.remote, asked)
                await stream.write(_COUNT.pack(granted))
                if granted and way == _DOWN:
                    await _send(stream, granted)
                elif granted:
                    await _take(stream, granted)
                    await stream.write(_COUNT.pack(granted))
            finally:
                self._busy = False

    def grant(self, peer: PeerId, asked: int) -> int:
        """How many of `asked` bytes `peer` gets now; they count from now on."""
        now, limits = self._clock(), self._limits
        while self._given and self._given[0][0] <= now - limits.span:
            self._given.popleft()
        left = limits.total - sum(count for _, _, count in self._given)
        own = limits.per_peer - sum(count for _, other, count in self._given if other == peer)
        granted = min(asked, left, own)
        if granted < limits.least:
            return 0
        self._given.append((now, peer, granted))
        return granted


async def measure(dial: Dial, peer: PeerId, way: Way) -> float:
    """Bytes per second between us and `peer`, from at most 1.5 MB.

    Raises PeerBusyError if it grants none now, RefusedError if it does not know the protocol, or another RemoteError.
    """
    first = await _probe(dial, peer, way, _FIRST)
    count = min(_MOST, int(first * _ENOUGH))
    if count <= _FIRST:
        return first
    try:
        return await _probe(dial, peer, way, count)
    except PeerBusyError:
        return first  # its share for us is used up, by an earlier look


async def _probe(dial: Dial, peer: PeerId, way: Way, count: int) -> float:
    stream = await dial(peer, THROUGHPUT)
    try:
        await stream.write(_QUESTION.pack(_UP if way == "up" else _DOWN, count))
        (granted,) = _COUNT.unpack(await stream.read_exactly(_COUNT.size))
        if granted > count:
            raise ProtocolError(f"{short(peer)} sends more than it was asked for.")
        if not granted:
            raise PeerBusyError(f"{short(peer)} grants no throughput probe now.", retry_after=ProbeLimits.span)
        began = trio.current_time()
        if way == "down":
            await _take(stream, granted)
        else:
            await _send(stream, granted)
            await stream.read_exactly(_COUNT.size)
        seconds = trio.current_time() - began
    finally:
        await stream.reset()
    return granted / seconds if seconds > 0 else math.inf


async def _send(stream: Stream, count: int) -> None:
    for start in range(0, count, len(_PIECE)):
        await stream.write(_PIECE[: count - start])


async def _take(stream: Stream, count: int) -> None:
    piece = memoryview(bytearray(min(count, len(_PIECE))))
    for start in range(0, count, len(piece)):
        await stream.read_into(piece[: count - start])
