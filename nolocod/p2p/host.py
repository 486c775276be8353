"""A node's host: the only `new_host` call, the streams that it opens and answers, and the addresses that it tells.

The rule: above this module nobody sees libp2p. Handlers of inbound streams run in this host's nursery: a LocalError there
stops the node, anything else costs the peer its stream.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from multiaddr import Multiaddr

from nolocod.errors import PortTakenError, RemoteError, UsageError
from nolocod.identity import PeerId, short
from nolocod.p2p import libp2p_patches
from nolocod.p2p.connections import Connections
from nolocod.p2p.limits.bandwidth import Unmetered
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.limits.connection_manager import ConnectionLimits, ConnectionManager
from nolocod.p2p.limits.peerstore import BoundedStore
from nolocod.p2p.limits.rate_limits import ALL, BANNED, NORMAL, Rate, StreamLimiter, TokenBuckets
from nolocod.p2p.transport.buffers import HeldMemory
from nolocod.p2p.transport.connection import relayed
from nolocod.p2p.transport.deadlines import shielded
from nolocod.p2p.transport.dialer import Dialer
from nolocod.p2p.transport.exceptions import map_exceptions
from nolocod.p2p.transport.identify import IDENTIFY, Identified, Observation, answer, ask
from nolocod.p2p.transport.libp2p_stream import LibStream
from nolocod.p2p.transport.listen_addresses import announced, claim
from nolocod.p2p.transport.multiaddrs import dialable, multiaddr_of, with_peer
from nolocod.p2p.transport.noise import NOISE_PROTOCOL, NoiseTransport
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, INFO, PING, SNAPSHOT
from nolocod.p2p.transport.yamux import PROTOCOL, Yamux
from nolocod.p2p.transport.yamux_limits import MuxLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from libp2p.abc import INetConn, INetStream
    from libp2p.crypto.keys import KeyPair
    from libp2p.host.basic_host import BasicHost
    from libp2p.network.swarm import Swarm

    from nolocod.identity import Identity
    from nolocod.observe.events import Emit
    from nolocod.p2p.limits.bandwidth import Meter
    from nolocod.p2p.transport.noise import SecureChannel
    from nolocod.p2p.transport.stream import Handler, Stream
    from nolocod.units import Address

logger = logging.getLogger(__name__)

RawHandler = Callable[["INetStream"], Awaitable[None]]

_REASON_TOLD = frozenset({EXCHANGE, GOSSIP, INFO, SNAPSHOT, IDENTIFY})
"""Protocols that tell a refused peer why, and the one that libp2p cannot do without."""
_PINGS = 16
"""That are answered on one stream, with a second between any two."""


@dataclass(frozen=True)
class HostLimits:
    """Deadlines in seconds; counts of what peers may have of us at once."""

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
    inbound: ConnectionLimits = field(default_factory=ConnectionLimits)


@asynccontextmanager
async def open_host(
    identity: Identity,
    listen: Sequence[Address],
    announce: Sequence[str],
    emit: Emit,
    limits: HostLimits | None = None,
    meter: Meter | None = None,
    gater: ConnectionGater | None = None,
) -> AsyncIterator[Host]:
    """Listen on `listen` and be reachable as `identity`; `announce` replaces the straight addresses that others are told.

    All connections together keep to `meter`'s budgets; `gater` says with whom there may be one.

    Raises PortTakenError, or UsageError for an address that this machine does not have or that nobody could dial.
    """
    libp2p_patches.quiet_libraries()
    libp2p_patches.bound_lengths()
    for address in announce:
        if not dialable(address):
            raise UsageError(f"--announce {address!r} cannot be dialled.", remedy="Write it like /ip4/203.0.113.7/tcp/4001.")
    limits = limits or HostLimits()
    keys = create_new_key_pair(identity.secret)
    gater, memory = gater or ConnectionGater(), HeldMemory()
    noise = NoiseTransport(keys, limits.progress, meter or Unmetered(), gater)
    muxer = _Muxer(MuxLimits(streams=limits.streams_per_connection), memory)
    basic = _basic_host(keys, limits, noise, muxer)
    swarm = cast("Swarm", basic.get_network())
    async with AsyncExitStack() as stack:
        with claim(listen) as bound:
            await stack.enter_async_context(basic.run([Multiaddr(multiaddr_of(address)) for address in bound]))
        nursery = await stack.enter_async_context(trio.open_nursery())
        await libp2p_patches.never_dial_unasked(swarm)
        if len(swarm.listeners) < len(bound):  # libp2p tells nobody
            raise PortTakenError(f"{bound[0]} was taken a moment ago.")
        dialer = Dialer(swarm, bound, limits.connect, ConnectionManager(limits.connections, limits.inbound))
        host = Host(basic, dialer, nursery, emit, limits, memory)
        host.announce(bound, announce)
        muxer.may_open, gater.banned = host.may_open, host.came_too_often
        try:
            yield host
        finally:
            with shielded(2.0):
                await host.close()
            nursery.cancel_scope.cancel()


def _basic_host(keys: KeyPair, limits: HostLimits, noise: NoiseTransport, muxer: _Muxer) -> BasicHost:
    most = limits.connections + limits.inbound.half_open  # our own manager keeps to `connections`
    config = ConnectionConfig(
        max_connections=most,
        min_connections=0,
        low_watermark=most,
        high_watermark=most,
        # ours end first, and then close the connection
        outbound_stream_protocol_negotiation_timeout=limits.negotiate * 3,
        auto_connect_interval=3600.0,
        inbound_upgrade_timeout=limits.connect,
    )
    manager = ResourceManager(
        ResourceLimits(max_connections=most * 2, max_streams=limits.connections * limits.streams_per_peer),
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
    libp2p_patches.offer_only(cast("Swarm", basic.get_network()), muxer)
    libp2p_patches.never_identify(basic)
    libp2p_patches.contain_streams(basic, _contained)
    return cast("BasicHost", basic)


def _contained(handle: RawHandler) -> RawHandler:
    """`handle`, whose failures end the stream alone."""

    async def handle_stream(raw: INetStream) -> None:
        try:
            with map_exceptions(PeerId(str(raw.muxed_conn.peer_id)), "answering"):
                await handle(raw)
        except RemoteError as error:
            logger.debug("a stream ended: %s", error)
            await raw.reset()

    return handle_stream


class _Muxer(MuxerMultistream):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """Offers our yamux and nothing else."""

    def __init__(self, limits: MuxLimits, memory: HeldMemory) -> None:
        super().__init__({PROTOCOL: Yamux})
        self._limits, self._memory = limits, memory
        self.may_open: Callable[[PeerId, str], bool] = lambda _, __: True
        """Whether a peer may open one more stream, on a connection from a source."""

    async def new_conn(self, conn: SecureChannel, peer_id: ID) -> Yamux:
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = Yamux(conn, peer_id, self._limits, self._memory)
        muxed.may_open = partial(self.may_open, PeerId(str(peer_id)), conn.origin.source)
        return muxed


class Host(Connections):
    """Connections and streams to peers, and what these are told of us. Made by `open_host`."""

    def __init__(
        self, basic: BasicHost, dialer: Dialer, nursery: trio.Nursery, emit: Emit, limits: HostLimits, memory: HeldMemory
    ) -> None:
        super().__init__(cast("Swarm", basic.get_network()), dialer, nursery, emit, limits.connect)
        self.basic = basic
        self.limits = limits
        self.memory = memory
        """What is held for peers, all connections together."""
        self.faults = 0
        """Inbound streams that ended with a fault of the peer."""
        self.circuits: tuple[str, ...] = ()
        """Circuit addresses (".../p2p/RELAY/p2p-circuit") to announce."""
        self.refuses: Callable[[PeerId], bool] = lambda _: False
        """Whose streams are reset, but for those of `_REASON_TOLD`, where they are told why."""
        self.judge: Callable[[PeerId, RemoteError | None], None] = lambda _, __: None
        """Told of each fault that ended an inbound stream; of None for a stream that was one too many."""
        self._listening: tuple[Address, ...] = ()
        self._override: tuple[str, ...] = ()
        self._inbound: Counter[PeerId] = Counter()
        self._streams, self._of_banned, self._banned_arrivals = StreamLimiter(ALL), TokenBuckets(BANNED), TokenBuckets(BANNED)
        libp2p_patches.announce_with(basic, self._straight_addresses)
        self.serve(IDENTIFY, self._tell_who_we_are)
        basic.set_stream_handler(TProtocol(PING), self.bounded(PING, self._answer_pings))

    # --- addresses --------------------------------------------------------------------------------

    def announce(self, bound: Sequence[Address], override: Sequence[str] = ()) -> None:
        """Tell others the sockets' addresses `bound`, or `override` instead of all straight ones."""
        self._listening, self._override = tuple(bound), tuple(override)
        self.look_again()

    def _straight_addresses(self) -> tuple[str, ...]:
        if self.straight_to is not None:
            return ()
        return self._override or tuple(dict.fromkeys((*self.external, *self.local)))

    def look_again(self) -> bool:
        """Work out our addresses anew, as interfaces come and go; whether they changed."""
        before, self.local = self.local, announced(self._listening)
        return self.local != before

    @property
    def announced(self) -> tuple[str, ...]:
        """Multiaddrs that others are told, without our name, best first: straight ones, then circuits."""
        return (*self._straight_addresses(), *dict.fromkeys(self.circuits))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs with /p2p/ID, best first."""
        return tuple(with_peer(address, self.own) for address in self.announced)

    # --- streams ----------------------------------------------------------------------------------

    async def open_stream(self, peer: PeerId, protocol: str, addresses: Sequence[str] = ()) -> LibStream:
        """Open a stream on the best connection there is, connecting first where needed.

        Raises PeerUnavailableError, PeerTooSlowError, or RefusedError for a protocol it does not speak.
        """
        await self.connect(peer, addresses)
        with map_exceptions(peer, f"opening {protocol}"), trio.fail_after(self.limits.negotiate):
            raw = await self.basic.new_stream(ID.from_string(peer), [TProtocol(protocol)])
        return LibStream(raw, self.limits.progress)

    def serve(self, protocol: str, handler: Handler, rate: Rate = NORMAL) -> None:
        """Answer inbound streams of `protocol`, of each peer at `rate`; the stream is closed when `handler` returns."""
        limiter = StreamLimiter(rate)

        async def accept(raw: INetStream) -> None:
            if (stream := await self._admitted(protocol, limiter, raw)) is not None:
                done = trio.Event()
                self._nursery.start_soon(self._handle, handler, stream, done)
                await done.wait()  # libp2p forgets the stream when this returns

        self.basic.set_stream_handler(TProtocol(protocol), accept)

    def bounded(self, protocol: str, handle: RawHandler, rate: Rate = NORMAL) -> RawHandler:
        """`handle`, one of libp2p's own for `protocol`, within our limits, and for `served` seconds at most."""
        limiter = StreamLimiter(rate)

        async def accept(raw: INetStream) -> None:
            if (stream := await self._admitted(protocol, limiter, raw)) is None:
                return
            with self._counted(stream.remote), trio.move_on_after(self.limits.served) as scope:
                await handle(raw)
            if scope.cancelled_caught:
                self.faults += 1
                await stream.reset()

        return accept

    async def _admitted(self, protocol: str, limiter: StreamLimiter, raw: INetStream) -> LibStream | None:
        """The stream; None, and it is reset, if it is of a refused peer, or one too many."""
        stream = LibStream(raw, self.limits.progress)
        peer = stream.remote
        if not self.refuses(peer) or protocol in _REASON_TOLD:
            within = self._within(limiter, peer, stream.origin.source)
            if within and self._inbound[peer] < self.limits.streams_per_peer:
                return stream
        self.faults += 1
        await stream.reset()
        return None

    def may_open(self, peer: PeerId, source: str) -> bool:
        """Whether `peer` may open a stream: asked before a byte of it is looked at, as negotiating costs a millisecond."""
        if not self.refuses(peer):
            return self._within(self._streams, peer, source)
        if self._of_banned.take(peer, trio.current_time()):  # enough to be told why
            return True
        self._nursery.start_soon(self.disconnect, peer)
        return False

    def came_too_often(self, peer: PeerId) -> bool:
        """Whether `peer` is banned, and has connected too often since to be told so."""
        return self.refuses(peer) and not self._banned_arrivals.take(peer, trio.current_time())

    def _within(self, limiter: StreamLimiter, peer: PeerId, source: str) -> bool:
        """Count a stream of `peer`: a partner has a share of its own, whoever shares its source. Who floods is blamed; once
        that has it banned, its source pays."""
        now = trio.current_time()
        blamed = limiter.objection(peer, None if self.memory.is_partner(peer) else source, now)
        if blamed == "peer":
            self.judge(peer, None)
            if self.refuses(peer):
                self.dialer.connection_manager.blame(source, now)
        return blamed is None

    async def _answer_pings(self, raw: INetStream) -> None:
        """libp2p itself answers any number, as fast as they come."""
        stream = LibStream(raw, self.limits.progress)
        with suppress(RemoteError):
            for number in range(_PINGS):
                sent = await stream.read_exactly(32)
                await trio.sleep(min(number, 1))
                await stream.write(sent)
        await stream.finish(self.limits.linger)

    async def _handle(self, handler: Handler, stream: LibStream, done: trio.Event) -> None:
        with self._counted(stream.remote):
            try:
                with map_exceptions(stream.remote, "answering"):
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

    def _connected(self, connection: INetConn) -> None:
        super()._connected(connection)
        if not relayed(connection):
            self._nursery.start_soon(self.learn, PeerId(str(connection.muxed_conn.peer_id)))

    async def learn(self, peer: PeerId) -> None:
        """`identify`, if that is possible."""
        with suppress(RemoteError):
            await self.identify(peer)

    async def _tell_who_we_are(self, stream: Stream) -> None:
        key = self.basic.get_public_key().serialize()
        protocols = [str(protocol) for protocol in self.basic.get_mux().get_protocols() if protocol]
        await answer(stream, key, self.announced, protocols, cast("LibStream", stream).remote_address)
