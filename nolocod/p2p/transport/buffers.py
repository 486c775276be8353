"""Memory that a host's connections share: large buffers, and a bound on what peers make it hold.

The rule: a connection takes a buffer when there is something to move and gives it back when it is empty, so that
an idle one has none.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from nolocod.identity import PeerId
from nolocod.p2p.limits.address_groups import customer
from nolocod.p2p.transport.noise_records import MOST_PLAIN, RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from libp2p.peer.id import ID

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


class Connection(Protocol):
    """What holds memory of the host (yamux.Yamux)."""

    peer_id: ID

    def get_remote_address(self) -> tuple[str, int] | None: ...
    def end(self, why: str) -> None: ...


class HeldMemory:
    """What a host holds for its peers, by connection: what arrived and is not read, messages of which only a part has come,
    what is sent and not taken, open streams. All peers together have `most` bytes of it, strangers `most_of_strangers`.

    One connection's share is not much, that of all that peers may open is more than a machine has. The connection that is
    ended is of the customer who holds most, so that one with many connections does not push out others.
    """

    def __init__(self, most: int = 64 << 20, most_of_strangers: int = 32 << 20) -> None:
        self.total = 0
        self.is_partner: Callable[[PeerId], bool] = lambda _: False
        """Whether exchanges with a peer were committed; all others are strangers."""
        self._most, self._most_of_strangers = most, most_of_strangers
        self._held = Counter[Connection]()

    @property
    def scarce(self) -> bool:
        """Nobody is to be promised more."""
        return self.total * 2 > self._most_of_strangers

    def add(self, holder: Connection, count: int) -> None:
        """Count `count` bytes more of `holder`, or less."""
        self.total += count
        self._held[holder] += count
        if count <= 0 or self.total <= self._most_of_strangers:
            return
        strangers = {one: held for one, held in self._held.items() if not self.is_partner(PeerId(str(one.peer_id)))}
        if sum(strangers.values()) > self._most_of_strangers:
            _worst(strangers).end("strangers hold too much memory here, and this connection most of it")
        elif self.total > self._most:
            _worst(self._held).end("too much of what it sent, or was sent, is not taken")

    def drop(self, holder: Connection) -> None:
        self.total -= self._held.pop(holder, 0)


def _worst(held: Mapping[Connection, int]) -> Connection:
    address = {one: customer((one.get_remote_address() or ("",))[0]) for one in held}  # through relays they all are one
    customers = Counter[str]()
    for one, count in held.items():
        customers[address[one]] += count
    return max(held, key=lambda one: (customers[address[one]], held[one]))
