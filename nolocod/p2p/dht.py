"""The Kademlia DHT as a second way to find members: nodes of a run are providers of its id.

The rule: the DHT only suggests. Whom it names is a member when its own signed heartbeat says so; liveness
is never the DHT's matter, which keeps the dead for an hour.
"""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from nolocod.errors import PeerTooSlowError, RemoteError
from nolocod.identity import PeerId
from nolocod.p2p.delimited import receive_message, send_message
from nolocod.p2p.identify import readable
from nolocod.p2p.libp2p_streams import map_exceptions
from nolocod.p2p.wire import deadline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from nolocod.manifest import RunId
    from nolocod.p2p.host import Host

_SERVERS = 4
"""Asked about providers at a time."""
_DEADLINE = 20.0
_KADEMLIA = "/ipfs/kad/1.0.0"
_ANSWER = 5.0
"""Seconds for one server's answer to a look-up."""
_MOST_BYTES = 256 << 10
_MOST_PROVIDERS = 64
_SHA2_256 = b"\x12\x20"
"""The multihash's code and length (https://multiformats.io/multihash)."""
_ADDRESS_LIFE = 3600
"""Seconds for which libp2p may use an address that we gave it."""


@asynccontextmanager
async def open_dht(host: Host, run_id: RunId) -> AsyncIterator[Dht]:
    """Take part in the DHT as a server."""
    kad = KadDHT(host.basic, DHTMode.SERVER)
    async with background_trio_service(kad):
        yield Dht(kad, host, run_id)


def provider_key(run_id: RunId) -> bytes:
    """What members of a run are providers of: the sha2-256 multihash of its id.

    Other implementations take nothing else: js-libp2p refuses keys that are no sha2-256 multihash, and searches by CID.
    """
    return _SHA2_256 + hashlib.sha256(bytes.fromhex(run_id)).digest()


async def look_up(host: Host, server: PeerId, run_id: RunId) -> dict[PeerId, tuple[str, ...]]:
    """Who is in the run by the word of `server`, with addresses, without taking part ourselves. Raises RemoteError."""
    stream = await host.open_stream(server, _KADEMLIA)
    try:
        with deadline(_ANSWER, "the DHT's answer", PeerTooSlowError):
            await send_message(stream, Message(type=Message.GET_PROVIDERS, key=provider_key(run_id)))
            answer = await receive_message(stream, Message, _MOST_BYTES)
    finally:
        await stream.reset()
    found = {
        PeerId(str(ID(told.id))): tuple(filter(None, map(readable, told.addrs)))
        for told in answer.providerPeers[:_MOST_PROVIDERS]
    }
    found.pop(host.own, None)
    return found


class Dht:
    """Our side of the DHT. Made by `open_dht`."""

    def __init__(self, kad: KadDHT, host: Host, run_id: RunId) -> None:
        self._kad = kad
        self._host = host
        self._key = provider_key(run_id)

    async def refresh(self, members: Iterable[tuple[PeerId, Sequence[str]]]) -> None:
        """Put connected members into the routing table, let it fill, and provide the run's id."""
        store = self._host.basic.get_peerstore()
        for peer, addresses in members:
            found = ID.from_string(peer)
            with map_exceptions(peer, "adding to the DHT"):
                store.add_addrs(found, [Multiaddr(address) for address in addresses], _ADDRESS_LIFE)
                await self._kad.add_peer(found, skip_server_mode_check=True)  # all nodes are servers
        with trio.move_on_after(_DEADLINE), map_exceptions(self._host.own, "refreshing the DHT"):
            await self._kad.refresh_routing_table()  # fills slowly on its own when nodes join one by one
            await self._kad.provider_store.provide(self._key)

    async def providers(self) -> dict[PeerId, tuple[str, ...]]:
        """Who is said to be in our run, ourselves excepted, with addresses.

        `find_providers` would stop at its own records, and we are always one of them: so the servers next
        to the key are asked one by one.
        """
        found: dict[PeerId, tuple[str, ...]] = {}
        with trio.move_on_after(_DEADLINE):
            for server in self._kad.routing_table.find_local_closest_peers(self._key, _SERVERS):
                try:
                    with map_exceptions(PeerId(str(server)), "asking the DHT"):
                        infos, _ = await self._kad.provider_store._get_providers_from_peer_with_closers(server, self._key)
                except RemoteError:
                    continue
                for info in infos:
                    found.setdefault(PeerId(str(info.peer_id)), tuple(str(address) for address in info.addrs))
        found.pop(self._host.own, None)
        return found
