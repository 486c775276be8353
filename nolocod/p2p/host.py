"""The libp2p host: the only `new_host` call, and everything that libp2p needs to be told or talked out of.

The rule: above this module nobody sees libp2p. Connections are dialled by us, address by address, because
libp2p tries only one TCP address of a peer and remembers a failure for a minute. Handlers of inbound
streams run in this host's nursery: a RemoteError there costs the peer its stream, anything else is ours
and stops the node.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.rcmgr.metrics import Direction
from multiaddr import Multiaddr

from nolocod.config import Address
from nolocod.errors import PeerTooSlowError, PeerUnavailableError, RemoteError
from nolocod.events import Emit, PeerConnected, PeerDisconnected, Reach
from nolocod.identity import PeerId, short
from nolocod.p2p.addresses import announced, claim, dialable, transport, with_peer
from nolocod.p2p.libp2p_streams import FOREIGN, LibStream, already_gone, map_exceptions, shielded
from nolocod.p2p.metering import Unmetered
from nolocod.p2p.noise import NOISE_PROTOCOL, NoiseTransport
from nolocod.p2p.wire_ends import Circuit
from nolocod.p2p.yamux import MuxLimits, YamuxMultistream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from libp2p.abc import INetConn, INetStream, INetwork
    from libp2p.host.basic_host import BasicHost
    from libp2p.io.abc import ReadWriteCloser
    from libp2p.network.swarm import Swarm

    from nolocod.identity import Identity
    from nolocod.p2p.metering import Meter
    from nolocod.p2p.streams import Handler, Stream

logger = logging.getLogger(__name__)

_STAGGER = 0.25
"""Seconds after which the next address of a peer is tried beside the one before (RFC 8305)."""
_MOST_ADDRESSES = 6


@dataclass(frozen=True)
class HostLimits:
    """Deadlines in seconds; counts of what strangers may have of us at once."""

    connect: float = 6.0
    negotiate: float = 10.0
    progress: float = 15.0
    linger: float = 5.0
    """How long a served stream waits for the peer to close its side too."""
    connections: int = 256
    streams_per_peer: int = 32
    """Of one of our protocols, being served."""
    streams_per_connection: int = 128
    """Opened by a peer and not yet ended, libp2p's own protocols included."""


def quiet_libraries() -> None:
    """Silence libp2p's loggers: it reports every peer's failure as an error of ours, at hundreds a minute."""
    for name in ("libp2p", "multiaddr", "async_service"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    root = logging.getLogger()
    if _not_from_libp2p not in root.filters:
        root.addFilter(_not_from_libp2p)


def _not_from_libp2p(record: logging.LogRecord) -> bool:
    # swarm_connection.py logs with the root logger itself
    return "/libp2p/" not in record.pathname


@asynccontextmanager
async def open_host(
    identity: Identity,
    listen: Address,
    announce: Sequence[str],
    emit: Emit,
    limits: HostLimits | None = None,
    meter: Meter | None = None,
) -> AsyncIterator[Host]:
    """Listen on `listen` and be reachable as `identity`; `announce` replaces what others are told.

    All connections together keep to `meter`'s budgets.

    Raises PortTakenError, or UsageError for an address that this machine does not have.
    """
    quiet_libraries()
    claim(listen)
    limits = limits or HostLimits()
    basic = _basic_host(identity, limits, meter or Unmetered())
    address = Multiaddr(transport(listen))
    async with basic.run([address]), trio.open_nursery() as nursery:
        await cast("Swarm", basic.get_network()).auto_connector.stop()  # it would dial whom it likes
        host = Host(basic, identity.peer_id, nursery, emit, limits)
        host.announce(announce)
        try:
            yield host
        finally:
            with shielded(2.0):
                await host.close()
            nursery.cancel_scope.cancel()


def _basic_host(identity: Identity, limits: HostLimits, meter: Meter) -> BasicHost:
    keys = create_new_key_pair(identity.secret)
    config = ConnectionConfig(
        max_connections=limits.connections,
        min_connections=0,
        low_watermark=limits.connections,  # no pruning: `max_connections` refuses before it comes to that
        high_watermark=limits.connections,
        # ours end first, and then close the connection
        outbound_stream_protocol_negotiation_timeout=limits.negotiate * 3,
        auto_connect_interval=3600.0,
    )
    manager = ResourceManager(
        ResourceLimits(max_connections=limits.connections * 2, max_streams=limits.connections * limits.streams_per_peer),
        enable_metrics=False,
        enable_memory_limits=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
        enable_rate_limiting=False,  # it counts all nodes behind one address as one
    )
    basic = new_host(
        key_pair=keys,
        sec_opt={NOISE_PROTOCOL: NoiseTransport(keys, limits.progress, meter)},
        resource_manager=manager,
        connection_config=config,
        disable_identify_address_discovery=True,
    )
    swarm = cast("Swarm", basic.get_network())
    swarm.retry_config = RetryConfig(max_retries=0)
    # `muxer_opt` is ignored for yamux
    swarm.upgrader.muxer_multistream = YamuxMultistream(MuxLimits(streams=limits.streams_per_connection))
    _free_finished_connections(swarm, limits.connections)
    return cast("BasicHost", basic)


def _free_finished_connections(swarm: Swarm, most: int) -> None:
    """Let an inbound connection's task and slot end with the connection.

    libp2p 0.8.1 keeps both until the host stops: after `max_connections` inbound connections in its whole
    life, a node would accept no more.
    """

    async def accept(stream: ReadWriteCloser, maddr: Multiaddr) -> None:
        if swarm.get_total_connections() >= most:
            await stream.close()
            return
        raw = RawConnection(stream, False)
        try:
            muxed = await swarm.upgrade_inbound_raw_conn(raw, maddr)
            await muxed.event_closed.wait()
        except FOREIGN as error:
            logger.debug("an inbound connection failed: %s", error)
        finally:
            with shielded(1.0), already_gone():
                await raw.close()

    swarm._handle_inbound_connection = accept


class Host:
    """Connections and streams to peers. Made by `open_host`."""

    def __init__(self, basic: BasicHost, own: PeerId, nursery: trio.Nursery, emit: Emit, limits: HostLimits) -> None:
        self.basic = basic
        self.own = own
        self.limits = limits
        self.faults = 0
        """Inbound streams that ended with a fault of the peer."""
        self._swarm = cast("Swarm", basic.get_network())
        self._nursery = nursery
        self._emit = emit
        self.announced: tuple[str, ...] = ()
        """Transport multiaddrs that others are told, best first."""
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._inbound: Counter[PeerId] = Counter()
        self._known: set[PeerId] = set()
        self._swarm.register_notifee(_Watch(self._connected, self._disconnected))

    # --- addresses --------------------------------------------------------------------------------

    def announce(self, override: Sequence[str] = ()) -> None:
        """Work out anew which addresses others are told."""
        bound = [_address(found) for found in self.basic.get_transport_addrs()]
        self.announced = announced(bound, override)
        told = [Multiaddr(text) for text in self.announced]
        self.basic._addrs_factory = lambda _: told  # the port is known only now

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs with /p2p/ID, best first."""
        return tuple(with_peer(address, self.own) for address in self.announced)

    # --- connections ------------------------------------------------------------------------------

    def peers(self) -> dict[PeerId, Reach]:
        """Who is connected, and how: we dialled ("direct"), they did ("inbound"), or only through a relay ("relayed")."""
        found: dict[PeerId, Reach] = {}
        for peer, connections in self._swarm.connections.items():
            live = [connection for connection in connections if not connection.is_closed]
            if live:
                straight = [connection for connection in live if not _relayed(connection)]
                ours = any(connection.direction == Direction.OUTBOUND for connection in straight)
                found[PeerId(str(peer))] = "relayed" if not straight else "direct" if ours else "inbound"
        return found

    def connected(self, peer: PeerId) -> bool:
        return any(not connection.is_closed for connection in self._swarm.get_connections(_id(peer)))

    def heard_at(self, peer: PeerId) -> float:
        """When bytes of `peer` last came in (trio's time); minus infinity without a connection."""
        connections = self._swarm.get_connections(_id(peer))
        return max((connection.muxed_conn.heard_at for connection in connections), default=-math.inf)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Have a connection to `peer`; PeerUnavailableError (with each address's cause) or PeerTooSlowError."""
        if self.connected(peer):
            return
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                if not self.connected(peer):
                    await self._dial(peer, addresses)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dialling.pop(peer, None)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Try the addresses, each a little after the one before, until one answers."""
        usable = [address for address in dict.fromkeys(addresses) if dialable(address)][:_MOST_ADDRESSES]
        if not usable or peer == self.own:
            raise PeerUnavailableError(f"no address is known of {short(peer)}." if not usable else "that is ourselves.")
        causes: list[RemoteError] = []

        async def attempt(address: str, failed: trio.Event) -> None:
            try:
                with map_exceptions(peer, f"dialling {address}", stranger=True), trio.fail_after(self.limits.connect):
                    await self._swarm.dial_addr(Multiaddr(address), _id(peer))
            except RemoteError as error:
                causes.append(error)
                failed.set()
            else:
                everything.cancel()

        with trio.CancelScope() as everything:
            async with trio.open_nursery() as nursery:
                for address in usable:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed)
                    with trio.move_on_after(_STAGGER):
                        await failed.wait()
        if not self.connected(peer):
            kind = PeerTooSlowError if all(isinstance(cause, PeerTooSlowError) for cause in causes) else PeerUnavailableError
            raise kind(" ".join(cause.cause for cause in causes) or f"{short(peer)} hung up.")
        self._swarm.unblock_peer(_id(peer))  # the DHT's dials go by libp2p's own memory of failures

    async def adopt_circuit(self, stream: Stream, target: PeerId) -> None:
        """Have a connection to `target` over `stream`, which a relay has joined to it."""
        address = _circuit(stream.remote, target)
        raw = RawConnection(Circuit(cast("LibStream", stream).muxed), True, ConnectionType.RELAYED, [address])
        try:
            with map_exceptions(target, f"dialling through {short(stream.remote)}"), trio.fail_after(self.limits.connect):
                await self._swarm.upgrade_outbound_raw_conn(raw, _id(target))
        except BaseException:
            await stream.reset()
            raise

    async def accept_circuit(self, stream: Stream, source: PeerId) -> None:
        """Serve a connection from `source` over `stream`, until it ends."""
        address = _circuit(stream.remote, source)
        raw = RawConnection(Circuit(cast("LibStream", stream).muxed), False, ConnectionType.RELAYED, [address])
        with map_exceptions(source, f"answering through {short(stream.remote)}"):
            with trio.fail_after(self.limits.connect):
                muxed = await self._swarm.upgrade_inbound_raw_conn(raw, address)
            await muxed.event_closed.wait()

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer`."""
        for connection in self._swarm.get_connections(_id(peer)):
            with trio.move_on_after(2.0), already_gone():
                await connection.close()

    async def close(self) -> None:
        """Stop listening, then close all connections: libp2p left to itself keeps late ones open."""
        for listener in list(self._swarm.listeners.values()):
            await listener.close()
        async with trio.open_nursery() as nursery:
            for peer in list(self._swarm.connections):
                nursery.start_soon(self.disconnect, PeerId(str(peer)))

    # --- streams ----------------------------------------------------------------------------------

    async def open_stream(self, peer: PeerId, protocol: str, addresses: Sequence[str] = ()) -> Stream:
        """Open a stream, connecting first where needed.

        Raises PeerUnavailableError, PeerTooSlowError, or RefusedError for a protocol it does not speak.
        """
        await self.connect(peer, addresses)
        with map_exceptions(peer, f"opening {protocol}"), trio.fail_after(self.limits.negotiate):
            raw = await self.basic.new_stream(_id(peer), [TProtocol(protocol)])
        return self._wrap(raw)

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer inbound streams of `protocol`; the stream is closed when `handler` returns."""

        async def accept(raw: INetStream) -> None:
            stream = self._wrap(raw)
            if self._inbound[stream.remote] >= self.limits.streams_per_peer:
                self.faults += 1
                await stream.reset()
                return
            done = trio.Event()
            self._nursery.start_soon(self._handle, handler, stream, done)
            await done.wait()  # libp2p forgets the stream when this returns

        self.basic.set_stream_handler(TProtocol(protocol), accept)

    async def _handle(self, handler: Handler, stream: LibStream, done: trio.Event) -> None:
        self._inbound[stream.remote] += 1
        try:
            await handler(stream)
            await stream.finish(self.limits.linger)
        except RemoteError as error:
            self.faults += 1
            logger.debug("a stream of %s ended: %s", short(stream.remote), error)
            await stream.reset()
        finally:
            done.set()
            self._inbound[stream.remote] -= 1
            if not self._inbound[stream.remote]:
                del self._inbound[stream.remote]

    def _wrap(self, raw: INetStream) -> LibStream:
        remote = PeerId(str(raw.muxed_conn.peer_id))
        return LibStream(raw, remote, self.limits.progress)

    # --- what libp2p tells us ---------------------------------------------------------------------

    def _connected(self, peer: PeerId) -> None:
        if peer not in self._known:
            self._known.add(peer)
            self._emit(PeerConnected(peer, self.peers().get(peer, "inbound")))

    def _disconnected(self, peer: PeerId) -> None:
        if peer in self._known and not self.connected(peer):
            self._known.discard(peer)
            self._emit(PeerDisconnected(peer))


class _Watch(INotifee):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """libp2p's connection events, as two calls."""

    def __init__(self, connected: Callable[[PeerId], None], disconnected: Callable[[PeerId], None]) -> None:
        self._connected = connected
        self._disconnected = disconnected

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._connected(PeerId(str(conn.muxed_conn.peer_id)))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._disconnected(PeerId(str(conn.muxed_conn.peer_id)))

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def _id(peer: PeerId) -> ID:
    return ID.from_string(peer)


def _relayed(connection: INetConn) -> bool:
    return bool(connection.muxed_conn.get_connection_type() == ConnectionType.RELAYED)


def _circuit(relay: PeerId, peer: PeerId) -> Multiaddr:
    return Multiaddr(f"/p2p/{relay}/p2p-circuit/p2p/{peer}")


def _address(found: Multiaddr) -> Address:
    """A bound socket's address out of its multiaddr."""
    host = found.value_for_protocol(found.protocols()[0].name)
    return Address(str(host), int(found.value_for_protocol("tcp")))
