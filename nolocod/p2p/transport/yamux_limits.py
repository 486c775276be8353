"""What a connection may hold here, and what it may cost beside its content.

The rule: a record and a frame cost one each, since it takes the loop's time to open and follow them, and every 4 KiB of
content, received or sent, pay for one. What nobody paid for comes out of an allowance of a thousand a second. Once that is
used up, the connection is read no faster: the peer's own line backs up, and no other connection waits. Nobody is blamed.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

PER_SECOND, BURST, PAYS = 1000, 4096, 4096
TURN = 128
"""Records, frames and pieces of bodies that are followed before others have their turn; 5461 frames, a record, take 20 ms."""


@dataclass(frozen=True)
class MuxLimits:
    """What a connection may hold."""

    streams: int = 256
    """Open at once, of those that the other side opened."""
    backlog: int = 64
    """Of these, how many may wait to be accepted."""
    windows: int = 48 << 20
    """Bytes by which all receive windows together may grow beyond their first size."""


class Overhead:
    """Of one connection."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at = trio.current_time()
        self._turn = 0

    def pay(self, content: int) -> None:
        """So many bytes were received or sent."""
        self._left += content / PAYS

    def charge(self, count: int = 1) -> None:
        """So many records or frames were followed."""
        self._left -= count
        self._turn += count

    @property
    def due(self) -> bool:
        """Whether to `settle` before anything more is followed."""
        return self._left < 0 or self._turn >= TURN

    async def settle(self) -> None:
        """Give others their turn, and wait until there is something of the allowance again."""
        now = trio.current_time()
        self._left = min(BURST, self._left + (now - self._at) * PER_SECOND)
        self._at, self._turn = now, 0
        await trio.sleep((1 - self._left) / PER_SECOND if self._left < 0 else 0)
