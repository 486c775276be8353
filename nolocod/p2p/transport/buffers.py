"""Memory that a host's connections share: large buffers, and a bound on what nobody reads.

The rule: a connection takes a buffer when there is something to move and gives it back when it is empty, so that
an idle one has none.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from nolocod.p2p.transport.noise_records import MOST_PLAIN, RECORD

Holder = TypeVar("Holder", bound=Hashable)

BATCH = 1 << 20
"""Bytes of content that are sealed and sent at once: half a chunk. Half as much costs a tenth more time."""
SIZE = (-(-BATCH // MOST_PLAIN) + 1) * RECORD
"""One record more for what is small: headers, credit, pings."""
_SPARE = 4


class Pool:
    """Buffers of SIZE bytes; smaller ones for a record at most, so that those who make many wait hold little."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self.scratch = memoryview(bytearray(MOST_PLAIN))
        """For one opened record, until the next task switch."""

    def take(self, size: int = SIZE) -> memoryview:
        if size <= RECORD:
            return memoryview(bytearray(size))
        return self._free.pop() if self._free else memoryview(bytearray(SIZE))

    def give(self, buffer: memoryview) -> None:
        if len(buffer) == SIZE and len(self._free) < _SPARE:
            self._free.append(buffer)


class Unread(Generic[Holder]):
    """Bytes that arrived and nobody has read, of all connections of a host; at most `most`.

    One connection's windows are not much, those of all that peers may open are more than a machine has.
    """

    def __init__(self, most: int = 64 << 20) -> None:
        self.total = 0
        self._held: dict[Holder, int] = {}
        self._most = most

    def add(self, holder: Holder, count: int) -> Holder | None:
        """Count `count` bytes more of `holder`, or less. Above the limit: who holds most, and is to be ended."""
        self.total += count
        self._held[holder] = self._held.get(holder, 0) + count
        return max(self._held, key=self._held.__getitem__) if count > 0 and self.total > self._most else None

    def drop(self, holder: Holder) -> None:
        self.total -= self._held.pop(holder, 0)
