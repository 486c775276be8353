"""The Kademlia DHT as a second way to find members: nodes of a run are providers of its id.

The rule: the DHT only suggests. Whom it names is a member when its own signed heartbeat says so. It tells nothing of
who is alive: it keeps the dead for an hour. It is a DHT of our own, not the public one, and holds providers only, no values.
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
from libp2p.records.validator import NamespacedValidator
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from nolocod.errors import PeerTooSlowError, RemoteError
from nolocod.identity import PeerId
from nolocod.p2p.libp2p_patches import bound_dht, own_dht
from nolocod.p2p.limits.rate_limits import RARE
from nolocod.p2p.transport.deadlines import deadline, reset_unless_done
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.exceptions import map_exceptions
from nolocod.p2p.transport.identify import texts_of
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
PROTOCOL = "/nolocod/kad/1.0.0"
_ANSWER = 5.0
"""Seconds for one server's answer to a look-up."""
_MOST_BYTES = 64 << 10
"""Of an answer: 20 providers and 20 servers, each with a record that it signed, take half of it."""
_MOST_OF_QUESTION = 4 << 10
"""One node's addresses, twice: in a provider's record and in one that it signed."""
_MOST_PROVIDERS = 64
_MOST_ADDRESSES = 16
_SHA2_256 = b"\x12\x20"
"""The multihash's code and length (https://multiformats.io/multihash)."""
_ADDRESS_LIFE = 3600
"""Seconds for which libp2p may use an address that we gave it."""


@asynccontextmanager
async def open_dht(host: Host, run_id: RunId, serves: Callable[[], bool] = lambda: True) -> AsyncIterator[Dht]:
    """Take part in the DHT: as a server while `serves` says that others can reach us, else as a client, which asks and
    provides and is asked nothing."""
    own_dht(PROTOCOL, _MOST_BYTES, _MOST_OF_QUESTION)
    dht = Dht(host, run_id, serves)
    await dht.switch_mode()
    async with background_trio_service(dht.kad):
        yield dht


def provider_key(run_id: RunId) -> bytes:
    """What members of a run are providers of: the sha2-256 multihash of its id.

    Other implementations take nothing else: js-libp2p refuses keys that are no sha2-256 multihash, and searches by CID.
    """
    return _SHA2_256 + hashlib.sha256(bytes.fromhex(run_id)).digest()


async def look_up(host: Host, server: PeerId, run_id: RunId) -> dict[PeerId, tuple[str, ...]]:
    """Who is in the run as `server` has it, with addresses, without taking part ourselves. Raises RemoteError."""
    stream = await host.open_stream(server, PROTOCOL)
    try:
        with deadline(_ANSWER, "the DHT's answer", PeerTooSlowError):
            await send_message(stream, Message(type=Message.GET_PROVIDERS, key=provider_key(run_id)))
            answer = await receive_message(stream, Message, _MOST_BYTES)
    finally:
        await stream.reset()
    with map_exceptions(server, "reading what the DHT tells"):
        told = {PeerId(str(ID(one.id))): one.addrs[:_MOST_ADDRESSES] for one in answer.providerPeers[:_MOST_PROVIDERS]}
        texts = {peer: await texts_of(addresses) for peer, addresses in told.items() if peer != host.own}
        return {peer: tuple(text for text in known if dialable(text)) for peer, known in texts.items()}


class Dht:
    """Our side of the DHT. Made by `open_dht`."""

    def __init__(self, host: Host, run_id: RunId, serves: Callable[[], bool]) -> None:
        nothing = NamespacedValidator({}, strict_validation=True)
        self.kad = KadDHT(host.basic, DHTMode.CLIENT, validator=nothing, validator_changed=True, strict_validation=True)
        bound_dht(self.kad, host.bounded(PROTOCOL, self.kad.handle_stream, RARE), provider_key(run_id))
        self._host = host
        self._run_id = run_id
        self._serves = serves
        self._provided = -math.inf
        self._provided_at: tuple[str, ...] = ()

    async def switch_mode(self) -> None:
        """Be a server or a client, as others can reach us now."""
        with map_exceptions(self._host.own, "the DHT's mode"):
            await self.kad.switch_mode(DHTMode.SERVER if self._serves() else DHTMode.CLIENT)

    async def refresh(self, contacts: Sequence[tuple[PeerId, Sequence[str]]]) -> None:
        """Put those of `contacts` that serve the DHT into the routing table, let it fill, and provide the run's id.

        They may be any libp2p nodes, of our run or not; only connected ones are asked, and `_ENTRIES` at most.
        """
        connected = self._host.peers()
        with trio.move_on_after(_DEADLINE):
            async with trio.open_nursery() as nursery:
                for peer, addresses in [contact for contact in contacts if contact[0] in connected][:_ENTRIES]:
                    nursery.start_soon(self._enter_by, peer, addresses)
        with trio.move_on_after(_DEADLINE), map_exceptions(self._host.own, "refreshing the DHT"):
            await self.kad.refresh_routing_table()  # fills slowly on its own when nodes join one by one
            await self._provide()

    async def _enter_by(self, peer: PeerId, addresses: Sequence[str]) -> None:
        server, store = ID.from_string(peer), self._host.basic.get_peerstore()
        with suppress(RemoteError), map_exceptions(peer, "adding to the DHT"):
            if PROTOCOL in (await self._host.identify(peer)).protocols:  # no client
                store.add_addrs(server, [Multiaddr(address) for address in addresses], _ADDRESS_LIFE)
                await self.kad.add_peer(server, skip_server_mode_check=True)  # that was our check

    async def _provide(self) -> None:
        """Tell the servers next to the key of us, at all our addresses (libp2p would leave out the circuits), unless
        that was done lately and nothing changed."""
        addresses, now = self._host.announced, trio.current_time()
        if addresses == self._provided_at and now - self._provided < _PROVIDE_EVERY:
            return
        key = provider_key(self._run_id)
        servers = await self.kad.peer_routing.find_closest_peers_network(key)
        store, here = self.kad.provider_store, [Multiaddr(text) for text in addresses]
        store.add_provider(key, PeerInfo(self._host.basic.get_id(), here))  # for those who ask us
        own = Message.Peer(id=ID.from_string(self._host.own).to_bytes(), addrs=[address.to_bytes() for address in here])
        told = Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[own])
        for server in [PeerId(str(server)) for server in servers][:_TOLD]:
            if server != self._host.own:
                with suppress(RemoteError):
                    await self._tell(server, told)
                    self._provided, self._provided_at = now, addresses

    async def _tell(self, server: PeerId, message: Message) -> None:
        info = self.kad.routing_table.get_peer_info(ID.from_string(server))
        addresses = tuple(filter(dialable, map(str, info.addrs))) if info else ()
        stream = await self._host.open_stream(server, PROTOCOL, addresses)
        async with reset_unless_done(stream.reset):
            with deadline(_ANSWER, "the DHT's attention", PeerTooSlowError):
                await send_message(stream, message)
            await stream.close()

    async def providers(self) -> dict[PeerId, tuple[str, ...]]:
        """Who is said to be in our run, ourselves excepted, with addresses: hints, of which each may be false.

        libp2p's `find_providers` would stop at its own records: so the servers next to the key are asked one by one.
        """
        found: dict[PeerId, tuple[str, ...]] = {}
        with trio.move_on_after(_DEADLINE):
            for server in self.kad.routing_table.find_local_closest_peers(provider_key(self._run_id), _SERVERS):
                with suppress(RemoteError):
                    found = {**await look_up(self._host, PeerId(str(server)), self._run_id), **found}
        return found
