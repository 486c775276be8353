"""What a connection asks before it moves bytes, so that budgets hold for everything on the wire.

The rule: the secure channel is the one place that asks; it counts sealed bytes, so that the DHT, gossip and
chunks are all in. What goes over a circuit is paid for by the connection to the relay, once.
"""

from __future__ import annotations

from typing import Protocol


class Meter(Protocol):
    """One per node, shared by its connections."""

    def piece(self, most: int) -> int:
        """How many bytes (at most `most`) may be moved at once without making others wait noticeably."""
        ...

    async def up(self, count: int) -> None:
        """Return when `count` bytes may be sent, and count them. May be cancelled: then they are not counted."""
        ...

    async def down(self, count: int) -> None:
        """Count `count` bytes that were received, and return when more may be read."""
        ...


class Unmetered:
    """Counts nothing and waits for nothing. `pieces`: the meter of whoever pays, which still says in what pieces."""

    def __init__(self, pieces: Meter | None = None) -> None:
        self._pieces = pieces

    def piece(self, most: int) -> int:
        return self._pieces.piece(most) if self._pieces else most

    async def up(self, count: int) -> None:
        return

    async def down(self, count: int) -> None:
        return
