"""The Kademlia DHT as a second way to find members: nodes of a run are providers of its id.

The rule: the DHT only suggests. Whom it names is a member when its own signed heartbeat says so; liveness
is never the DHT's matter, which keeps the dead for an hour.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from nolocod.errors import PeerTooSlowError, RemoteError
from nolocod.identity import PeerId
from nolocod.p2p.libp2p_patches import bound_dht
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.exceptions import map_exceptions
from nolocod.p2p.transport.identify import readable
from nolocod.p2p.transport.multiaddrs import dialable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from nolocod.p2p.host import Host
    from nolocod.run.manifest import RunId

_SERVERS = 4
"""Asked about providers at a time."""
_TOLD = 8
"""Servers that are told of us."""
_ENTRIES = 16
"""Contacts that are put into the routing table at a time."""
_PROVIDE_EVERY = 1800.0
"""Seconds between two records of ours; servers keep them for a day or two."""
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
async def open_dht(host: Host, run_id: RunId, mode: Callable[[], bool] = lambda: True) -> AsyncIterator[Dht]:
    """Take part in the DHT: as a server while `mode` says that others can reach us, else as a client, which asks and
    provides and is asked nothing."""
    kad = KadDHT(host.basic, DHTMode.CLIENT)
    bound_dht(kad, host.bounded(_KADEMLIA, kad.handle_stream), provider_key(run_id))
    with map_exceptions(host.own, "the DHT's mode"):
        await kad.switch_mode(DHTMode.SERVER if mode() else DHTMode.CLIENT)
    async with background_trio_service(kad):
        yield Dht(kad, host, run_id, mode)


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

    def __init__(self, kad: KadDHT, host: Host, run_id: RunId, mode: Callable[[], bool]) -> None:
        self._kad = kad
        self._host = host
        self._run_id = run_id
        self._mode = mode
        self._provided = -math.inf
        self._provided_at: tuple[str, ...] = ()

    async def refresh(self, contacts: Sequence[tuple[PeerId, Sequence[str]]]) -> None:
        """Put those of `contacts` that serve the DHT into the routing table, let it fill, and provide the run's id.

        They may be any libp2p nodes, of our run or not; only connected ones are asked, and `_ENTRIES` at most.
        """
        with map_exceptions(self._host.own, "the DHT's mode"):
            await self._kad.switch_mode(DHTMode.SERVER if self._mode() else DHTMode.CLIENT)
        connected = self._host.peers()
        with trio.move_on_after(_DEADLINE):
            async with trio.open_nursery() as nursery:
                for peer, addresses in [contact for contact in contacts if contact[0] in connected][:_ENTRIES]:
                    nursery.start_soon(self._enter_by, peer, addresses)
        with trio.move_on_after(_DEADLINE), map_exceptions(self._host.own, "refreshing the DHT"):
            await self._kad.refresh_routing_table()  # fills slowly on its own when nodes join one by one
            await self._provide()

    async def _enter_by(self, peer: PeerId, addresses: Sequence[str]) -> None:
        found, store = ID.from_string(peer), self._host.basic.get_peerstore()
        try:
            if _KADEMLIA not in (await self._host.identify(peer)).protocols:
                return  # a client
            with map_exceptions(peer, "adding to the DHT"):
                store.add_addrs(found, [Multiaddr(address) for address in addresses], _ADDRESS_LIFE)
                await self._kad.add_peer(found, skip_server_mode_check=True)  # that was our check
        except RemoteError:
            return

    async def _provide(self) -> None:
        """Tell the servers next to the key of us, at all our addresses (libp2p would leave out the circuits), unless
        that was done lately and nothing changed."""
        addresses, now = self._host.announced, trio.current_time()
        if addresses == self._provided_at and now - self._provided < _PROVIDE_EVERY:
            return
        key = provider_key(self._run_id)
        servers = await self._kad.peer_routing.find_closest_peers_network(key)
        store, here = self._kad.provider_store, [Multiaddr(text) for text in addresses]
        store.add_provider(key, PeerInfo(self._host.basic.get_id(), here))  # for those who ask us
        own = Message.Peer(id=self._host.basic.get_id().to_bytes(), addrs=[address.to_bytes() for address in here])
        told = Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[own])
        for server in [PeerId(str(server)) for server in servers][:_TOLD]:
            if server != self._host.own:
                with suppress(RemoteError):
                    await self._tell(server, told)
                    self._provided, self._provided_at = now, addresses

    async def _tell(self, server: PeerId, message: Message) -> None:
        stream = await self._host.open_stream(server, _KADEMLIA, self._addresses(server))
        try:
            with deadline(_ANSWER, "the DHT's attention", PeerTooSlowError):
                await send_message(stream, message)
            await stream.close()
        except RemoteError:
            await stream.reset()
            raise

    def _addresses(self, server: PeerId) -> tuple[str, ...]:
        """Where the DHT says that it is."""
        info = self._kad.routing_table.get_peer_info(ID.from_string(server))
        return tuple(filter(dialable, map(str, info.addrs))) if info else ()

    async def providers(self) -> dict[PeerId, tuple[str, ...]]:
        """Who is said to be in our run, ourselves excepted, with addresses: hints, of which each may be false.

        libp2p's `find_providers` would stop at its own records: so the servers next to the key are asked one by one.
        """
        found: dict[PeerId, tuple[str, ...]] = {}
        with trio.move_on_after(_DEADLINE):
            for server in self._kad.routing_table.find_local_closest_peers(provider_key(self._run_id), _SERVERS):
                with suppress(RemoteError):
                    for peer, addresses in (await look_up(self._host, PeerId(str(server)), self._run_id)).items():
                        found.setdefault(peer, tuple(filter(dialable, addresses)))
        return found
