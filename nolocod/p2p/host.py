"""The libp2p host: the only `new_host` call, and everything that libp2p needs to be told or talked out of.

The rule: above this module nobody sees libp2p. A peer may have several connections; what is opened goes over a
straight one if there is one, and a relayed one is given up once it is not needed any more. Handlers of inbound
streams run in this host's nursery: a RemoteError there costs the peer its stream, anything else is ours
and stops the node.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from multiaddr import Multiaddr

from nolocod.errors import (
    PeerNetworkKeyError,
    PeerNotAllowedError,
    PeerTooSlowError,
    PeerUnavailableError,
    PortTakenError,
    RemoteError,
    UsageError,
)
from nolocod.identity import PeerId, short
from nolocod.observe.events import Emit, PeerConnected, PeerDisconnected, Reach
from nolocod.p2p.limits.peerstore import BoundedStore
from nolocod.p2p.limits.rate_limits import ConnectionLimiter, ConnectionLimits, Rate, StreamLimiter
from nolocod.p2p.transport.connection import Connection, Origin, origin_of, relayed
from nolocod.p2p.transport.deadlines import deadline, shielded
from nolocod.p2p.transport.dialer import Dialler
from nolocod.p2p.transport.endpoints import CircuitEndpoint
from nolocod.p2p.transport.exceptions import already_gone, map_exceptions
from nolocod.p2p.transport.identify import IDENTIFY, Identified, Observation, Self, answer, ask
from nolocod.p2p.transport.libp2p_stream import LibStream
from nolocod.p2p.transport.listen_addresses import announced, claim
from nolocod.p2p.transport.multiaddrs import dialable, endpoint, interleave, multiaddr_of, near, straight, via, with_peer
from nolocod.p2p.transport.multistream import Negotiation
from nolocod.p2p.transport.noise import NOISE_PROTOCOL, NoiseTransport
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, INFO, SNAPSHOT
from nolocod.p2p.transport.yamux import MuxLimits, YamuxMultistream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from libp2p.abc import INetConn, INetStream, INetwork
    from libp2p.crypto.keys import KeyPair
    from libp2p.host.basic_host import BasicHost
    from libp2p.network.swarm import Swarm

    from nolocod.identity import Identity
    from nolocod.p2p.limits.connection_gater import ConnectionGater
    from nolocod.p2p.limits.metering import Meter
    from nolocod.p2p.transport.stream import Handler, Stream
    from nolocod.units import Address

logger = logging.getLogger(__name__)

RawHandler = Callable[["INetStream"], Awaitable[None]]

_STAGGER = 0.25
"""Seconds after which the next address of a peer is tried beside the one before (RFC 8305)."""
_MOST_ADDRESSES = 6
_MOST_CIRCUITS = 4
_HEAD_START = 2.0
"""Seconds after which circuits are tried beside straight addresses that have not answered."""
_TIDY = 1.0
"""Seconds between two looks at relayed connections that are not needed."""
_RANKS: tuple[Reach, ...] = ("direct", "punched", "inbound", "relayed")
_TOLD = frozenset({EXCHANGE, GOSSIP, INFO, SNAPSHOT, IDENTIFY})
"""Protocols that say who is not wanted, and why; and the one that libp2p cannot do without."""
_SPARE = 60.0
"""Seconds that a relayed connection is kept for its streams' sake beside a straight one (specs/relay/DCUtR.md)."""


@dataclass(frozen=True)
class HostLimits:
    """Deadlines in seconds; counts of what strangers may have of us at once."""

    connect: float = 6.0
    negotiate: float = 10.0
    progress: float = 15.0
    linger: float = 5.0
    """How long a served stream waits for the peer to close its side too."""
    served: float = 20.0
    """How long libp2p's own handlers have for one stream: they know no deadline."""
    connections: int = 256
    streams_per_peer: int = 32
    """Of one of our protocols, being served."""
    streams_per_connection: int = 128
    """Opened by a peer and not yet ended, libp2p's own protocols included."""
    door: ConnectionLimits = field(default_factory=ConnectionLimits)
    rates: Mapping[str, Rate] = field(default_factory=dict)
    """Of the streams of some protocols that are opened to us; for all others NORMAL."""


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
    listen: Sequence[Address],
    announce: Sequence[str],
    emit: Emit,
    limits: HostLimits | None = None,
    meter: Meter | None = None,
    gate: ConnectionGater | None = None,
) -> AsyncIterator[Host]:
    """Listen on `listen` and be reachable as `identity`; `announce` replaces the straight addresses that others are told.

    All connections together keep to `meter`'s budgets; `gate` says with whom there may be one.

    Raises PortTakenError, or UsageError for an address that this machine does not have or that nobody could dial.
    """
    quiet_libraries()
    for address in announce:
        if not dialable(address):
            raise UsageError(f"--announce {address!r} cannot be dialled.", remedy="Write it like /ip4/203.0.113.7/tcp/4001.")
    bound = claim(listen)
    limits = limits or HostLimits()
    keys = create_new_key_pair(identity.secret)
    basic = _basic_host(keys, limits, NoiseTransport(keys, limits.progress, meter, gate))
    swarm = cast("Swarm", basic.get_network())
    dialler = Dialler(swarm, bound, limits.connections, limits.connect, ConnectionLimiter(limits.door))
    async with basic.run([Multiaddr(multiaddr_of(address)) for address in bound]), trio.open_nursery() as nursery:
        await swarm.auto_connector.stop()  # it would dial whom it likes
        if len(swarm.listeners) < len(bound):  # libp2p tells nobody
            raise PortTakenError(f"{bound[0]} was taken a moment ago.")
        host = Host(basic, dialler, nursery, emit, limits)
        host.announce(bound, announce)
        try:
            yield host
        finally:
            with shielded(2.0):
                await host.close()
            nursery.cancel_scope.cancel()


def _basic_host(keys: KeyPair, limits: HostLimits, noise: NoiseTransport) -> BasicHost:
    config = ConnectionConfig(
        max_connections=limits.connections,
        min_connections=0,
        low_watermark=limits.connections,  # no pruning: `max_connections` refuses before it comes to that
        high_watermark=limits.connections,
        # ours end first, and then close the connection
        outbound_stream_protocol_negotiation_timeout=limits.negotiate * 3,
        auto_connect_interval=3600.0,
        inbound_upgrade_timeout=limits.connect,
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
        peerstore_opt=BoundedStore(),
        sec_opt={NOISE_PROTOCOL: noise},
        resource_manager=manager,
        connection_config=config,
        disable_identify_address_discovery=True,
    )
    swarm = cast("Swarm", basic.get_network())
    swarm.retry_config = RetryConfig(max_retries=0)
    # `muxer_opt` is ignored for yamux
    swarm.upgrader.muxer_multistream = YamuxMultistream(MuxLimits(streams=limits.streams_per_connection))
    swarm._select_connection = _best
    # We ask ourselves (identify.py). libp2p 0.8.1 keeps what each peer says, up to a megabyte unasked, until the host stops.
    basic._schedule_identify = lambda *_, **__: None
    basic.remove_stream_handler(ID_PUSH)
    basic.multiselect = Negotiation(basic.multiselect.handlers)
    return cast("BasicHost", basic)


def _best(connections: Sequence[INetConn], _: ID) -> INetConn:
    """The one to open a stream on: straight before relayed, and else the one that was heard last."""
    return max(connections, key=lambda connection: (not relayed(connection), connection.muxed_conn.heard_at))


class Host:
    """Connections and streams to peers. Made by `open_host`."""

    def __init__(self, basic: BasicHost, dialler: Dialler, nursery: trio.Nursery, emit: Emit, limits: HostLimits) -> None:
        self.basic = basic
        self.dialler = dialler
        self.own = PeerId(str(basic.get_id()))
        self.limits = limits
        self.faults = 0
        """Inbound streams that ended with a fault of the peer."""
        self.through: Callable[[PeerId, PeerId], Awaitable[None]] | None = None
        """Have a connection through a relay, which is connected, to a target: how circuit addresses are dialled."""
        self.met_through_relay: Callable[[PeerId], Awaitable[None]] | None = None
        """Called in the host's nursery for each connection that a peer made to us through a relay."""
        self.straight_to: Callable[[PeerId], bool] | None = None
        """If set, straight connections are made only to those for whom it is true, and only circuits are announced."""
        self.external: tuple[str, ...] = ()
        """Straight transport multiaddrs that others confirmed from outside; announced first."""
        self.circuits: tuple[str, ...] = ()
        """Circuit addresses (".../p2p/RELAY/p2p-circuit") to announce."""
        self.observed: dict[PeerId, Observation] = {}
        """What those who are connected straight see us as."""
        self.shuns: Callable[[PeerId], bool] = lambda _: False
        """Whose streams are reset, but for those of `_TOLD`, where they are told why."""
        self.judge: Callable[[PeerId, RemoteError | None], None] = lambda _, __: None
        """Told of each fault that ended an inbound stream; of None for a stream that was one too many."""
        self._swarm = cast("Swarm", basic.get_network())
        self._nursery = nursery
        self._emit = emit
        self._listening: tuple[Address, ...] = ()
        self._local: tuple[str, ...] = ()
        self._override: tuple[str, ...] = ()
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._inbound: Counter[PeerId] = Counter()
        self._stream_limiter = StreamLimiter(limits.rates)
        self._told: dict[PeerId, Reach] = {}  # who is connected, and how, by the last event of ours about it
        self._arrived = trio.Event()
        self._swarm.dial_peer = self._dial_for_libp2p
        self._swarm.register_notifee(_Watch(self._connected, self._disconnected))
        self.serve(IDENTIFY, self._tell_who_we_are)

    # --- addresses --------------------------------------------------------------------------------

    def announce(self, bound: Sequence[Address], override: Sequence[str] = ()) -> None:
        """Tell others the sockets' addresses `bound`, or `override` instead of all straight ones."""
        self._listening, self._override = tuple(bound), tuple(override)
        self.look_again()
        # Without circuits, of which libp2p 0.8.1 would make addresses of the relay with our name.
        self.basic._addrs_factory = lambda _: [Multiaddr(text) for text in self._straight_addresses()]

    def _straight_addresses(self) -> tuple[str, ...]:
        if self.straight_to is not None:
            return ()
        return self._override or tuple(dict.fromkeys((*self.external, *self.local)))

    def look_again(self) -> bool:
        """Work out our addresses anew, as interfaces come and go; whether they changed."""
        before, self._local = self._local, announced(self._listening, ())
        return self._local != before

    @property
    def local(self) -> tuple[str, ...]:
        """Transport multiaddrs of the interfaces that we listen on, best first, whatever is announced."""
        return self._local

    @property
    def announced(self) -> tuple[str, ...]:
        """Multiaddrs that others are told, without our name, best first: straight ones, then circuits."""
        return (*self._straight_addresses(), *dict.fromkeys(self.circuits))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs with /p2p/ID, best first."""
        return tuple(with_peer(address, self.own) for address in self.announced)

    def promising(self, address: str) -> bool:
        """Whether a straight address can be expected to lead where it says: not into a private network far from here.

        Near is also where those are who are connected straight; what they say that we are would be theirs to choose.
        """
        found = endpoint(address)
        ours = (*self.local, *self.external, *(seen.observer for seen in self.observed.values() if seen.observer))
        return found is None or near(found[0], [host for host, _ in filter(None, map(endpoint, ours))])

    # --- connections ------------------------------------------------------------------------------

    def peers(self) -> dict[PeerId, Reach]:
        """Who is connected, and how; of several connections to a peer the best one counts."""
        found = {PeerId(str(peer)): self._reaches(PeerId(str(peer))) for peer in self._swarm.connections}
        return {peer: min(reaches, key=_RANKS.index) for peer, reaches in found.items() if reaches}

    def _live(self, peer: PeerId) -> list[INetConn]:
        return [connection for connection in self._swarm.connections.get(_id(peer), ()) if not connection.is_closed]

    def _reaches(self, peer: PeerId) -> list[Reach]:
        origins = [origin_of(connection) for connection in self._live(peer)]
        return ["inbound" if origin.expected not in (None, peer) else origin.reach for origin in origins]

    def straight(self, peer: PeerId) -> bool:
        """Whether there is a connection without a relay."""
        return any(not relayed(connection) for connection in self._live(peer))

    async def straightened(self, peer: PeerId) -> None:
        """Wait until there is a connection without a relay."""
        while not self.straight(peer):
            await self._arrived.wait()

    def connected(self, peer: PeerId) -> bool:
        return bool(self._live(peer))

    def heard_at(self, peer: PeerId) -> float:
        """When bytes of `peer` last came in (trio's time) on the connection that is used; minus infinity without any."""
        connections = self._live(peer)
        return float(_best(connections, _id(peer)).muxed_conn.heard_at) if connections else -math.inf

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Have a connection to `peer`: straight if one of its addresses answers soon, else through a relay.

        PeerUnavailableError (with each address's cause) or PeerTooSlowError.
        """
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
        """Try the addresses until one answers; the circuits when the straight ones have failed, or had their head start."""
        direct, circuits = self._sorted(peer, addresses)
        if not (direct or circuits) or peer == self.own:
            raise PeerUnavailableError("that is ourselves." if peer == self.own else f"no address is known of {short(peer)}.")
        failures: list[RemoteError] = []
        tried = trio.Event()

        async def tries(kind: Callable[[PeerId, str], Awaitable[None]], texts: Sequence[str]) -> None:
            failures.extend(await self._first_of([partial(kind, peer, text) for text in texts]))
            tried.set()
            if self.connected(peer):
                everything.cancel()

        with trio.CancelScope() as everything:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tries, partial(self._straightly, fresh=bool(circuits)), direct)
                if circuits:
                    with trio.move_on_after(_HEAD_START if any(map(self.promising, direct)) else _STAGGER):
                        await tried.wait()
                    nursery.start_soon(tries, self._by_circuit, circuits)
        if not self.connected(peer):
            raise _kind(failures)(" ".join(cause.cause for cause in failures) or f"{short(peer)} hung up.")

    async def _dial_for_libp2p(self, peer: ID) -> list[INetConn]:
        """What the DHT dials, our way: libp2p would try one address of a peer, remember a failure for a minute, and leave
        from a port of chance. SwarmException."""
        try:
            known = [str(address) for address in self.basic.get_peerstore().addrs(peer)]
            await self.connect(PeerId(str(peer)), known)
        except (RemoteError, PeerStoreError) as error:
            raise SwarmException(f"{peer} is not reached: {error}") from error
        return self._live(PeerId(str(peer)))

    def _sorted(self, peer: PeerId, addresses: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those to dial, and the circuits among them."""
        may = self.straight_to is None or self.straight_to(peer)
        direct = interleave(address for address in addresses if straight(address)) if may else []
        circuits = [address for address in dict.fromkeys(addresses) if via(address)] if self.through else []
        return direct[:_MOST_ADDRESSES], circuits[:_MOST_CIRCUITS]

    async def _first_of(self, attempts: Sequence[Callable[[], Awaitable[None]]]) -> list[RemoteError]:
        """Start each a little after the one before, until one succeeds (RFC 8305, section 5); how the others failed."""
        failures: list[RemoteError] = []

        async def attempt(call: Callable[[], Awaitable[None]], over: trio.Event) -> None:
            try:
                await call()
            except RemoteError as error:
                failures.append(error)
                over.set()
            else:
                everything.cancel()

        with trio.CancelScope() as everything:
            async with trio.open_nursery() as nursery:
                for call in attempts:
                    over = trio.Event()
                    nursery.start_soon(attempt, call, over)
                    with trio.move_on_after(_STAGGER):
                        await over.wait()
        return failures

    async def _straightly(self, peer: PeerId, address: str, *, fresh: bool) -> None:
        with map_exceptions(peer, f"dialling {address}", stranger=True), trio.fail_after(self.limits.connect):
            await self.dialler.dial(peer, address, fresh=fresh)

    async def _by_circuit(self, peer: PeerId, address: str) -> None:
        found = via(address)
        assert found is not None
        assert self.through is not None
        relay, relay_address = found
        if relay in (self.own, peer):
            raise PeerUnavailableError(f"{address} leads through one of the two ends.")
        with deadline(2 * self.limits.connect, f"dialling {short(peer)} through {short(relay)}"):
            await self.connect(relay, [relay_address])
            if not self.straight(relay):
                raise PeerUnavailableError(f"relay {short(relay)} is itself reached only through a relay.")
            await self.through(relay, peer)

    async def dial_straight(self, peer: PeerId, addresses: Sequence[str], seconds: float) -> bool:
        """Try for `seconds` to have a straight connection, whatever others there are; whether there is one now.

        From a fresh port: a punch may follow (dialing.py).
        """
        direct, _ = self._sorted(peer, addresses)
        with trio.move_on_after(seconds):
            await self._first_of([partial(self._straightly, peer, address, fresh=True) for address in direct])
        return self.straight(peer)

    async def punch(self, peer: PeerId, targets: Sequence[tuple[str, int]], seconds: float, *, client: bool) -> bool:
        """Dial all `targets` at once from the listening port, as one of two ends that do so; whether it worked.

        `client` is which of the two this one is on a connection that both have dialled.
        """

        async def attempt(target: tuple[str, int]) -> None:
            with suppress(OSError):
                connected = await self.dialler.punch(target)
                self._nursery.start_soon(self._finish_punch, connected, peer, client)

        with self.dialler.expecting(peer, targets, client=client), trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for target in targets:
                    nursery.start_soon(attempt, target)
                await self.straightened(peer)
                nursery.cancel_scope.cancel()
        return self.straight(peer)

    async def _finish_punch(self, connected: trio.socket.SocketType, peer: PeerId, client: bool) -> None:
        # Not in the punch's own scope: of two connections, one end would cancel the one, and the other end the other.
        with suppress(RemoteError), map_exceptions(peer, "punching"):
            await self.dialler.punched(connected, peer, client=client)

    async def probe(self, peer: PeerId, address: str) -> None:
        """Dial `address` from a fresh port beside all connections, make sure that it is `peer`, and hang up.

        Raises PeerUnavailableError or PeerTooSlowError.
        """
        if not straight(address):
            raise PeerUnavailableError(f"{address!r} is no TCP address.")
        with map_exceptions(peer, f"dialling {address}", stranger=True), trio.fail_after(self.limits.connect):
            await self.dialler.probe(peer, address)

    async def adopt_circuit(self, stream: Stream, target: PeerId) -> None:
        """Have a connection to `target` over `stream`, which a relay has joined to it."""
        address = _circuit(stream.remote, target)
        raw = Connection(CircuitEndpoint(cast("LibStream", stream).muxed), True, Origin("relayed"), address)
        try:
            with map_exceptions(target, f"dialling through {short(stream.remote)}"), trio.fail_after(self.limits.connect):
                await self._swarm.upgrade_outbound_raw_conn(raw, _id(target))
        except BaseException:
            await stream.reset()
            raise

    async def accept_circuit(self, stream: Stream, source: PeerId) -> None:
        """Serve a connection over `stream`, until it ends; by the relay's word it comes from `source`."""
        address = _circuit(stream.remote, source)
        raw = Connection(CircuitEndpoint(cast("LibStream", stream).muxed), False, Origin("relayed"), address)
        with map_exceptions(source, f"answering through {short(stream.remote)}"):
            muxed = await self._swarm.upgrade_inbound_raw_conn(raw, address)
            if self.met_through_relay is not None:
                self._nursery.start_soon(self.met_through_relay, PeerId(str(muxed.peer_id)))
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

    async def open_stream(self, peer: PeerId, protocol: str, addresses: Sequence[str] = ()) -> LibStream:
        """Open a stream on the best connection there is, connecting first where needed.

        Raises PeerUnavailableError, PeerTooSlowError, or RefusedError for a protocol it does not speak.
        """
        await self.connect(peer, addresses)
        with map_exceptions(peer, f"opening {protocol}"), trio.fail_after(self.limits.negotiate):
            raw = await self.basic.new_stream(_id(peer), [TProtocol(protocol)])
        return self._wrap(raw)

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer inbound streams of `protocol`; the stream is closed when `handler` returns."""

        async def accept(raw: INetStream) -> None:
            stream = await self._admitted(protocol, raw)
            if stream is None:
                return
            done = trio.Event()
            self._nursery.start_soon(self._handle, handler, stream, done)
            await done.wait()  # libp2p forgets the stream when this returns

        self.basic.set_stream_handler(TProtocol(protocol), accept)

    def bounded(self, protocol: str, handle: RawHandler) -> RawHandler:
        """`handle`, one of libp2p's own for `protocol`, within our limits, and for `served` seconds at most."""

        async def accept(raw: INetStream) -> None:
            stream = await self._admitted(protocol, raw)
            if stream is None:
                return
            with self._counted(stream.remote), trio.move_on_after(self.limits.served) as scope:
                await handle(raw)
            if scope.cancelled_caught:
                self.faults += 1
                await stream.reset()

        return accept

    async def _admitted(self, protocol: str, raw: INetStream) -> LibStream | None:
        """The stream; None, and it is reset, if it is of one who is shunned, or one too many."""
        stream = self._wrap(raw)
        if self._admits(protocol, stream):
            return stream
        self.faults += 1
        await stream.reset()
        return None

    def _admits(self, protocol: str, stream: LibStream) -> bool:
        """Whether this stream is neither of one who is shunned, nor one too many."""
        peer = stream.remote
        if self.shuns(peer) and protocol not in _TOLD:
            return False
        place = endpoint(stream.remote_address or "")
        blamed = self._stream_limiter.objection(protocol, peer, place and place[0], trio.current_time())
        if blamed == "peer":
            self.judge(peer, None)
        return blamed is None and self._inbound[peer] < self.limits.streams_per_peer

    async def _handle(self, handler: Handler, stream: LibStream, done: trio.Event) -> None:
        with self._counted(stream.remote):
            try:
                await handler(stream)
                await stream.finish(self.limits.linger)
            except RemoteError as error:
                self.faults += 1
                self.judge(stream.remote, error)
                logger.debug("a stream of %s ended: %s", short(stream.remote), error)
                await stream.reset()
            finally:
                done.set()

    @contextmanager
    def _counted(self, peer: PeerId) -> Iterator[None]:
        """One more of `peer`'s streams is served, until the end of the block."""
        self._inbound[peer] += 1
        try:
            yield
        finally:
            self._inbound[peer] -= 1
            if not self._inbound[peer]:
                del self._inbound[peer]

    def _wrap(self, raw: INetStream) -> LibStream:
        remote = PeerId(str(raw.muxed_conn.peer_id))
        return LibStream(raw, remote, self.limits.progress)

    # --- identify ---------------------------------------------------------------------------------

    async def identify(self, peer: PeerId) -> Identified:
        """Ask a connected peer who it is, and what it sees us as. Raises RemoteError."""
        stream = await self.open_stream(peer, IDENTIFY)
        origin, observer = stream.origin, stream.remote_address
        try:
            found = await ask(stream)
        finally:
            await stream.reset()
        if found.observed is not None and origin.reach != "relayed" and self.straight(peer):
            self.observed[peer] = Observation(found.observed, origin.from_listen_port, trio.current_time(), observer)
        return found

    async def _learn(self, peer: PeerId) -> None:
        with suppress(RemoteError):
            await self.identify(peer)

    async def _tell_who_we_are(self, stream: Stream) -> None:
        key = self.basic.get_public_key().serialize()
        protocols = [str(protocol) for protocol in self.basic.get_mux().get_protocols() if protocol]
        await answer(stream, Self(key, self.announced, protocols), cast("LibStream", stream).remote_address)

    # --- what libp2p tells us ---------------------------------------------------------------------

    def _connected(self, connection: INetConn) -> None:
        peer = PeerId(str(connection.muxed_conn.peer_id))
        self._arrived.set()
        self._arrived = trio.Event()
        self._tell(peer)
        if not relayed(connection):
            self._nursery.start_soon(self._learn, peer)
        if len({relayed(other) for other in self._live(peer)}) == 2:
            self._nursery.start_soon(self._give_up_relayed, peer)

    async def _give_up_relayed(self, peer: PeerId) -> None:
        """Close relayed connections beside a straight one when they carry no streams, or after a while."""
        patience = trio.current_time() + _SPARE
        while True:
            await trio.sleep(_TIDY)
            spare = [connection for connection in self._live(peer) if relayed(connection)]
            if not spare or not self.straight(peer):
                return
            for connection in spare:
                if not connection.muxed_conn.streams or trio.current_time() >= patience:
                    with trio.move_on_after(_TIDY), already_gone():
                        await connection.close()

    def _disconnected(self, connection: INetConn) -> None:
        peer = PeerId(str(connection.muxed_conn.peer_id))
        if not self.straight(peer):
            self.observed.pop(peer, None)
        self._swarm.auto_connector.record_successful_connection(_id(peer))  # or it notes for ever when it was lost
        self._tell(peer)

    def _tell(self, peer: PeerId) -> None:
        """Emit what has changed: whether the peer is connected, or the best way in which it is."""
        reach = min(self._reaches(peer), key=_RANKS.index, default=None)
        if reach is not None and reach != self._told.get(peer):
            self._told[peer] = reach
            self._emit(PeerConnected(peer, reach))
        elif reach is None and peer in self._told:
            del self._told[peer]
            self._emit(PeerDisconnected(peer))


class _Watch(INotifee):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """libp2p's connection events, as two calls."""

    def __init__(self, connected: Callable[[INetConn], None], disconnected: Callable[[INetConn], None]) -> None:
        self._connected = connected
        self._disconnected = disconnected

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._connected(conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._disconnected(conn)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def _kind(failures: Sequence[RemoteError]) -> type[RemoteError]:
    """What several failures to reach one peer come to: that it wants nothing of us, if it answered so anywhere."""
    for kind in (PeerNetworkKeyError, PeerNotAllowedError):
        if any(isinstance(failure, kind) for failure in failures):
            return kind
    return PeerTooSlowError if all(isinstance(failure, PeerTooSlowError) for failure in failures) else PeerUnavailableError


def _id(peer: PeerId) -> ID:
    return ID.from_string(peer)


def _circuit(relay: PeerId, peer: PeerId) -> Multiaddr:
    return Multiaddr(f"/p2p/{relay}/p2p-circuit/p2p/{peer}")
