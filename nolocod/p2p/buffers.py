"""Large buffers, shared by a host's connections, so that an idle connection has none.

The rule: a connection takes a buffer when there is something to move and gives it back when it is empty.
"""

from __future__ import annotations

from nolocod.p2p.records import MOST_PLAIN, RECORD

BATCH = 1 << 20
"""Bytes of content that are sealed and sent at once: a chunk of the usual size. Halves cost a tenth more time."""
SIZE = (-(-BATCH // MOST_PLAIN) + 1) * RECORD
"""One record more for what is small: headers, credit, pings."""
_SPARE = 4


class Pool:
    """Buffers of SIZE bytes."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self.scratch = memoryview(bytearray(MOST_PLAIN))
        """For one opened record, until the next task switch."""

    def take(self) -> memoryview:
        return self._free.pop() if self._free else memoryview(bytearray(SIZE))

    def give(self, buffer: memoryview) -> None:
        if len(self._free) < _SPARE:
            self._free.append(buffer)
