"""Finds connections whose other end is gone without a word, and has those closed that nobody needs.

The rule: a peer of which any byte came in lately is not pinged; one that was not heard answers a ping within
the deadline, or its connection is closed. Neither TCP nor libp2p would notice for more than a minute.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RemoteError
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.stream import PING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.p2p.host import Host
    from nolocod.p2p.timing import Timing


async def keep_alive(
    host: Host, timing: Timing, gossiped_at: Callable[[PeerId], float], lost: Callable[[PeerId], None]
) -> None:
    """Check all connections until cancelled. `gossiped_at`: when gossip last heard a peer (trio's time); `lost` is told of
    those that fell silent."""
    heard: dict[PeerId, float] = {}

    async def check(peer: PeerId) -> None:
        if await fell_silent(host, peer, timing.pong):
            lost(peer)
            await host.disconnect(peer)

    while True:
        await trio.sleep(timing.ping / 3)
        host.dialer.connection_manager.trim(trio.current_time())
        now, connected = trio.current_time(), host.peers()
        # a new connection counts as a sign of life
        heard = {peer: max(heard.get(peer, now), gossiped_at(peer), host.heard_at(peer)) for peer in connected}
        async with trio.open_nursery() as nursery:
            for peer, at in heard.items():
                if now - at >= timing.ping:
                    nursery.start_soon(check, peer)


async def drop_the_dead(host: Host, seconds: float) -> None:
    """Ping all connected peers now, and close the connections of those that do not answer within `seconds`."""

    async def check(peer: PeerId) -> None:
        if not await _answers(host, peer, seconds):
            await host.disconnect(peer)

    async with trio.open_nursery() as nursery:
        for peer in host.peers():
            nursery.start_soon(check, peer)


async def fell_silent(host: Host, peer: PeerId, seconds: float) -> bool:
    """Whether no ping is answered within `seconds`, and nothing came in their latter half: a pong may wait behind bulk."""
    return not await _answers(host, peer, seconds) and trio.current_time() - host.heard_at(peer) >= seconds / 2


async def _answers(host: Host, peer: PeerId, seconds: float) -> bool:
    """Whether 32 random bytes, sent on a stream of their own, come back in time."""
    sent = secrets.token_bytes(32)
    with suppress(RemoteError), deadline(seconds, "a ping"):
        stream = await host.open_stream(peer, PING)
        try:
            await stream.write(sent)
            return await stream.read_exactly(len(sent)) == sent
        finally:
            await stream.reset()  # libp2p's answering side would wait for the next ping
    return False
