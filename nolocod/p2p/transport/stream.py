"""The one shape of a stream that the protocol drivers know, so that none of them sees libp2p."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from nolocod.identity import PeerId


class Stream(Protocol):
    """An authenticated byte stream to one peer.

    Every call raises PeerUnavailableError when the stream or the peer is gone, and PeerTooSlowError
    when no byte moved for the progress deadline. A clean end where bytes were due is
    PeerUnavailableError too: an end of stream proves nothing.
    """

    @property
    def remote(self) -> PeerId: ...

    async def read_exactly(self, count: int) -> bytes:
        """The next `count` bytes; memory is taken for those that have arrived."""
        ...

    async def read_into(self, view: memoryview) -> None:
        """Fill `view`."""
        ...

    async def write(self, data: bytes | memoryview) -> None:
        """Send all of `data`. A cancelled write leaves no half record: it finishes, or ends the connection."""
        ...

    async def close(self) -> None:
        """Say that no more is sent."""
        ...

    async def reset(self) -> None:
        """Give the stream up at once."""
        ...


Dial = Callable[[PeerId, str], Awaitable[Stream]]
"""Open a stream to a member for a protocol id; PeerUnavailableError if it cannot be had."""
Handler = Callable[[Stream], Awaitable[None]]

INFO = "/nolocod/info"
GOSSIP = "/nolocod/gossip"
EXCHANGE = "/nolocod/exchange"
SNAPSHOT = "/nolocod/snapshot"
REGISTRY = "/nolocod/registry"
RECEIPTS = "/nolocod/receipts"
PING = "/ipfs/ping/1.0.0"
# The version is not in the protocol id: it is in every envelope, so that a node of another major
# version is told so by name instead of failing to negotiate.
