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


class Prepaid:
    """In pieces as `meter` wants them; somebody else pays."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def piece(self, most: int) -> int:
        return self._meter.piece(most)

    async def up(self, count: int) -> None:
        return

    async def down(self, count: int) -> None:
        return


class Unmetered:
    """No limit, no count."""

    def piece(self, most: int) -> int:
        return most

    async def up(self, count: int) -> None:
        return

    async def down(self, count: int) -> None:
        return
