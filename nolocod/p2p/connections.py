"""The connections of one host: which there are, how a peer is reached, and what becomes of one that is not needed.

The rule: a peer may have several connections; what is opened goes over a straight one if there is one, and a relayed one
is given up once it is not needed any more. Straight addresses are tried first, circuits when these do not answer soon.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
from libp2p.abc import INotifee
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from nolocod import errors
from nolocod.identity import PeerId, short
from nolocod.observe.events import Emit, PeerConnected, PeerDisconnected, Reach
from nolocod.p2p import libp2p_patches
from nolocod.p2p.limits.connection_manager import Held
from nolocod.p2p.transport.connection import Connection, Origin, origin_of, relayed
from nolocod.p2p.transport.deadlines import deadline, reset_unless_done
from nolocod.p2p.transport.dialer import Dialer, first_of
from nolocod.p2p.transport.endpoints import CircuitEndpoint
from nolocod.p2p.transport.exceptions import already_gone, map_exceptions
from nolocod.p2p.transport.multiaddrs import endpoint, interleave, near, straight, via

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from libp2p.abc import INetConn, INetStream, INetwork
    from libp2p.network.swarm import Swarm

    from nolocod.p2p.transport.identify import Observation
    from nolocod.p2p.transport.libp2p_stream import LibStream
    from nolocod.p2p.transport.stream import Stream

_MOST_ADDRESSES = 6
_MOST_CIRCUITS = 4
_HEAD_START = 2.0
"""Seconds after which circuits are tried beside straight addresses that have not answered."""
_TIDY = 1.0
"""Seconds between two looks at relayed connections that are not needed."""
_RANKS: tuple[Reach, ...] = ("direct", "punched", "inbound", "relayed")
_SPARE = 60.0
"""Seconds that a relayed connection is kept for its streams' sake beside a straight one (specs/relay/DCUtR.md)."""


class Connections:
    """Of the host with `swarm`. `patience`: seconds for one address to answer, handshake included."""

    def __init__(self, swarm: Swarm, dialer: Dialer, nursery: trio.Nursery, emit: Emit, patience: float) -> None:
        self.dialer = dialer
        self.own = PeerId(str(swarm.get_peer_id()))
        self.patience = patience
        self.through: Callable[[PeerId, PeerId], Awaitable[None]] | None = None
        """Have a connection through a relay, which is connected, to a target: how circuit addresses are dialled."""
        self.met_through_relay: Callable[[PeerId], Awaitable[object]] | None = None
        """Called in the host's nursery for each connection that a peer made to us through a relay."""
        self.straight_to: Callable[[PeerId], bool] | None = None
        """If set, straight connections are made only to those for whom it is true, and only circuits are announced."""
        self.local: tuple[str, ...] = ()
        """Transport multiaddrs of the interfaces that we listen on, best first, whatever is announced."""
        self.external: tuple[str, ...] = ()
        """Straight transport multiaddrs that others confirmed from outside; announced first."""
        self.observed: dict[PeerId, Observation] = {}
        """What those who are connected straight see us as."""
        self._vouched: set[str] = set()
        self._swarm = swarm
        self._nursery = nursery
        self._emit = emit
        self._dialling: dict[PeerId, trio.Lock] = {}
        self._told: dict[PeerId, Reach] = {}  # who is connected, and how, by the last event of ours about it
        self._arrived = trio.Event()
        self.dialer.connection_manager.open, self.dialer.may = self._held, self.may_dial
        libp2p_patches.dial_with(swarm, self._dial_for_libp2p)
        libp2p_patches.prefer(swarm, best)
        swarm.register_notifee(_Watch(self._connected, self._disconnected))

    # --- which there are --------------------------------------------------------------------------

    def peers(self) -> dict[PeerId, Reach]:
        """Who is connected, and how; of several connections to a peer the best one counts."""
        found = {PeerId(str(peer)): self._reaches(PeerId(str(peer))) for peer in self._swarm.connections}
        return {peer: min(reaches, key=_RANKS.index) for peer, reaches in found.items() if reaches}

    def _held(self) -> list[Held]:
        """All connections, as the connection manager looks at them."""
        found = []
        for connection in self._swarm.get_connections():
            origin, muxed = origin_of(connection), connection.muxed_conn
            drop, peer = partial(self._nursery.start_soon, _close, connection), PeerId(str(muxed.peer_id))
            state = not muxed.is_initiator, bool(muxed.streams), muxed.heard_at
            found.append(Held(origin.source, origin.since, drop, peer, *state))
        return found

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

    def way(self, peer: PeerId) -> tuple[Reach, str]:
        """How `peer` is connected, and its IP address as we see it; through a relay, or not any more, it has none."""
        connections, reaches = self._live(peer), self._reaches(peer)
        best_of = min(zip(reaches, connections, strict=True), key=lambda one: _RANKS.index(one[0]), default=None)
        if best_of is None or best_of[0] == "relayed":
            return best_of[0] if best_of else "inbound", ""
        found = best_of[1].muxed_conn.secured_conn.get_remote_address()
        return best_of[0], str(found[0]) if found else ""

    def heard_at(self, peer: PeerId) -> float:
        """When bytes of `peer` last came in (trio's time) on the connection that is used; minus infinity without any."""
        connections = self._live(peer)
        return float(best(connections).muxed_conn.heard_at) if connections else -math.inf

    # --- how a peer is reached --------------------------------------------------------------------

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Have a connection to `peer`: straight if one of its addresses answers soon, else through a relay.

        PeerUnavailableError (with each address's cause) or PeerTooSlowError.
        """
        await self._once(peer, addresses, self.connected)

    async def connect_straight(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Have a connection to `peer` without a relay, beside those through relays; raises as `connect` does."""
        await self._once(peer, [address for address in addresses if straight(address)], self.straight)

    async def _once(self, peer: PeerId, addresses: Sequence[str], there: Callable[[PeerId], bool]) -> None:
        """Dial until `peer` is `there`, one task at a time; the others take what it made."""
        if there(peer):
            return
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                if not there(peer):
                    await self._dial(peer, addresses, there)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dialling.pop(peer, None)

    async def _dial(self, peer: PeerId, addresses: Sequence[str], there: Callable[[PeerId], bool]) -> None:
        """Try the addresses until one answers; the circuits when the straight ones have failed, or had their head start."""
        direct, circuits = self._sorted(peer, addresses)
        if peer == self.own:
            raise errors.PeerUnavailableError("that is ourselves.")
        if not (direct or circuits):
            raise errors.PeerUnavailableError(f"{short(peer)} has no address that may be dialled from here.")
        failures: list[errors.RemoteError] = []
        tried = trio.Event()

        async def tries(kind: Callable[[PeerId, str], Awaitable[None]], texts: Sequence[str]) -> None:
            failures.extend(await first_of([partial(kind, peer, text) for text in texts]))
            tried.set()
            if there(peer):
                everything.cancel()

        with trio.CancelScope() as everything:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tries, partial(self._straightly, fresh=bool(circuits)), direct)
                if circuits:
                    with trio.move_on_after(_HEAD_START):
                        await tried.wait()
                    nursery.start_soon(tries, self._by_circuit, circuits)
        if not there(peer):
            raise _kind(failures)(" ".join(cause.cause for cause in failures) or f"{short(peer)} hung up.")

    def vouch(self, addresses: Iterable[str]) -> None:
        """Our owner named these multiaddrs, /p2p/PEER behind them or not: they are dialled, and their private networks are
        taken for ours."""
        for text in addresses:
            circuit = via(text)
            self._vouched.add(circuit[1] if circuit else text.partition("/p2p/")[0])

    def may_dial(self, address: str, host: str) -> bool:
        """Whether a transport multiaddr that anybody may have told, of the IP address `host`, is dialled: public ones are,
        others only in private networks that we listen in or that our owner named. Nothing that peers say makes one ours."""
        ours = filter(None, map(endpoint, (*self.local, *self._vouched)))
        return address.partition("/p2p/")[0] in self._vouched or near(host, [one for one, _ in ours])

    async def _dial_for_libp2p(self, peer: ID) -> list[INetConn]:
        """What the DHT dials, our way; SwarmException."""
        try:
            known = [str(address) for address in self._swarm.peerstore.addrs(peer)]
            await self.connect(PeerId(str(peer)), known)
        except (errors.RemoteError, PeerStoreError) as error:
            raise SwarmException(f"{peer} is not reached: {error}") from error
        return self._live(PeerId(str(peer)))

    def _sorted(self, peer: PeerId, addresses: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those to dial, and the circuits among them."""
        may = self.straight_to is None or self.straight_to(peer)
        known = {address: endpoint(address) for address in addresses if may and straight(address)}
        direct = interleave(one for one, found in known.items() if found is None or self.may_dial(one, found[0]))
        circuits = [address for address in dict.fromkeys(addresses) if via(address)] if self.through else []
        return direct[:_MOST_ADDRESSES], circuits[:_MOST_CIRCUITS]

    async def _straightly(self, peer: PeerId, address: str, *, fresh: bool) -> None:
        with map_exceptions(peer, f"dialling {address}", unverified=True), trio.fail_after(self.patience):
            await self.dialer.dial(peer, address, fresh=fresh)

    async def _by_circuit(self, peer: PeerId, address: str) -> None:
        found = via(address)
        assert found is not None
        assert self.through is not None
        relay, relay_address = found
        if relay in (self.own, peer):
            raise errors.PeerUnavailableError(f"{address} leads through one of the two ends.")
        doing = f"dialling through {short(relay)}"
        with map_exceptions(peer, doing), deadline(2 * self.patience, f"{doing} {short(peer)}"):
            await self.connect_straight(relay, [relay_address])
            await self.through(relay, peer)

    async def dial_straight(self, peer: PeerId, addresses: Sequence[str], seconds: float) -> bool:
        """Try for `seconds` to have a straight connection, whatever others there are; whether there is one now.

        From a fresh port: a punch may follow (dialer.py).
        """
        direct, _ = self._sorted(peer, addresses)
        with trio.move_on_after(seconds):
            await first_of([partial(self._straightly, peer, address, fresh=True) for address in direct])
        return self.straight(peer)

    async def punch(self, peer: PeerId, targets: Sequence[tuple[str, int]], seconds: float, *, client: bool) -> bool:
        """Dial all `targets` at once from the listening port, as one of two ends that do so; whether it worked.

        `client` is which of the two this one is on a connection that both have dialled.
        """

        async def attempt(target: tuple[str, int]) -> None:
            with suppress(OSError):
                connected = await self.dialer.punch(target)
                self._nursery.start_soon(self._finish_punch, connected, peer, client)

        with self.dialer.expecting(peer, targets, client=client), trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for target in targets:
                    nursery.start_soon(attempt, target)
                await self.straightened(peer)
                nursery.cancel_scope.cancel()
        return self.straight(peer)

    async def _finish_punch(self, connected: trio.socket.SocketType, peer: PeerId, client: bool) -> None:
        # Not in the punch's own scope: of two connections, one end would cancel the one, and the other end the other.
        with suppress(errors.RemoteError), map_exceptions(peer, "punching"):
            await self.dialer.punched(connected, peer, client=client)

    async def probe(self, peer: PeerId, address: str) -> None:
        """Dial `address` from a fresh port beside all connections, make sure that it is `peer`, and hang up.

        Raises PeerUnavailableError or PeerTooSlowError.
        """
        if not straight(address):
            raise errors.PeerUnavailableError(f"{address!r} is not a TCP address.")
        with map_exceptions(peer, f"dialling {address}", unverified=True), trio.fail_after(self.patience):
            await self.dialer.probe(peer, address)

    async def adopt_circuit(self, stream: Stream, target: PeerId) -> None:
        """Have a connection to `target` over `stream`, which a relay has joined to it."""
        raw = _on_circuit(stream, target, initiator=True)
        async with reset_unless_done(stream.reset):
            with map_exceptions(target, f"dialling through {short(stream.remote)}"), trio.fail_after(self.patience):
                await self._swarm.upgrade_outbound_raw_conn(raw, _id(target))

    async def accept_circuit(self, stream: Stream, source: PeerId) -> None:
        """Serve a connection over `stream`, until it ends; by the relay's word it comes from `source`."""
        if not self.dialer.connection_manager.has_room(stream.remote, trio.current_time()):
            raise errors.RefusedError("this node has all the connections that it may have.")
        raw = _on_circuit(stream, source, initiator=False)
        with map_exceptions(source, f"answering through {short(stream.remote)}"):
            muxed = await self._swarm.upgrade_inbound_raw_conn(raw, *raw.get_transport_addresses())
            if self.met_through_relay is not None:
                self._nursery.start_soon(self.met_through_relay, PeerId(str(muxed.peer_id)))
            await muxed.event_closed.wait()

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer`."""
        for connection in self._swarm.get_connections(_id(peer)):
            await _close(connection)

    async def close(self) -> None:
        """Stop listening, then close all connections: libp2p left to itself keeps late ones open."""
        await libp2p_patches.stop_listening(self._swarm)
        async with trio.open_nursery() as nursery:
            for peer in list(self._swarm.connections):
                nursery.start_soon(self.disconnect, PeerId(str(peer)))

    # --- what becomes of them ---------------------------------------------------------------------

    def _connected(self, connection: INetConn) -> None:
        peer = PeerId(str(connection.muxed_conn.peer_id))
        self._arrived.set()
        self._arrived = trio.Event()
        self._tell(peer)
        self.dialer.connection_manager.enforce(trio.current_time())
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
                    await _close(connection)

    def _disconnected(self, connection: INetConn) -> None:
        peer = PeerId(str(connection.muxed_conn.peer_id))
        if not self.straight(peer):
            self.observed.pop(peer, None)
        libp2p_patches.forget_disconnected(self._swarm, _id(peer))
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
        self._connected, self._disconnected = connected, disconnected

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._connected(conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._disconnected(conn)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def _kind(failures: Sequence[errors.RemoteError]) -> type[errors.RemoteError]:
    """What several failures to reach one peer come to: that it wants nothing of us, if it answered so anywhere."""
    for kind in (errors.PeerNetworkKeyError, errors.PeerNotAllowedError):
        if any(isinstance(failure, kind) for failure in failures):
            return kind
    slow = all(isinstance(failure, errors.PeerTooSlowError) for failure in failures)
    return errors.PeerTooSlowError if slow else errors.PeerUnavailableError


async def _close(connection: INetConn) -> None:
    with trio.move_on_after(2.0), already_gone():
        await connection.close()


def _id(peer: PeerId) -> ID:
    return ID.from_string(peer)


def _on_circuit(stream: Stream, peer: PeerId, *, initiator: bool) -> Connection:
    """What is to be secured over `stream`, which a relay has joined to `peer`."""
    address = Multiaddr(f"/p2p/{stream.remote}/p2p-circuit/p2p/{peer}")
    origin = Origin("relayed", source=stream.remote)
    return Connection(CircuitEndpoint(cast("LibStream", stream).muxed), initiator, origin, address)


def best(connections: Sequence[INetConn], _: ID | None = None) -> INetConn:
    """The one to open a stream on: straight before relayed, and else the one that was heard last."""
    return max(connections, key=lambda connection: (not relayed(connection), connection.muxed_conn.heard_at))
