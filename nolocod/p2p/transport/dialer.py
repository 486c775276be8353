"""TCP connections of our own making: dialled from the port that we listen on, accepted, punched, or only tried.

The rule: whatever can be seen of us is seen of the listening port, so that a NAT keeps one mapping for all,
and what a peer observes tells others where to dial or to punch. Where that port cannot be used, a fresh one is;
only punching needs it. Who may have to be punched to is dialled from a fresh one: our own router remembers what was
dialled in vain for minutes, lets the other's packets in by that, and drops our answers, which do not continue it. Who
answers there is dialled again from the listening one while nobody can tell our NAT's kind yet.
"""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from multiaddr import Multiaddr

from nolocod.errors import RemoteError
from nolocod.p2p import libp2p_patches
from nolocod.p2p.limits.address_groups import source
from nolocod.p2p.limits.rate_limits import PUNCHES, DialLimiter
from nolocod.p2p.transport.connection import Connection, Origin
from nolocod.p2p.transport.deadlines import shielded
from nolocod.p2p.transport.endpoints import TcpEndpoint, plain
from nolocod.p2p.transport.exceptions import FOREIGN, already_gone, causes
from nolocod.p2p.transport.multiaddrs import multiaddr_of, tcp_parts
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from libp2p.abc import INetConn
    from libp2p.io.trio import TrioTCPStream
    from libp2p.network.swarm import Swarm

    from nolocod.identity import PeerId
    from nolocod.p2p.limits.connection_manager import ConnectionManager

logger = logging.getLogger(__name__)

Endpoint = tuple[str, int]
"""An IP address and a port."""

_STAGGER = 0.25
"""Seconds after which the next address of a peer is tried beside the one before (RFC 8305)."""
_MOST_RESOLVED = 4
"""Addresses of one name that are tried."""
_LOOK_UPS = trio.CapacityLimiter(8)
"""Threads that ask for names: a name server may be slow on purpose, and disks are written in threads too."""
_PAUSE = 0.1
"""Seconds until a punch that was turned away is tried again: most likely the other side's NAT knew nothing of us yet."""
_ELSEWHERE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EINVAL)
"""What the system says when the listening port cannot be used for this peer, for instance because it is already."""


@dataclass(frozen=True)
class Expected:
    """Who is going to come from an address, and which of us two is the client then."""

    peer: PeerId
    client: bool


class Dialer:
    """All TCP connections of one host, both ways.

    `listening` are its sockets' addresses, and `patience` the seconds for a handshake as client. For that as server the
    swarm has a deadline of its own, which is not to be cut short from outside: libp2p 0.8.1 then keeps the connection in
    its count for ever.
    """

    def __init__(
        self, swarm: Swarm, listening: Sequence[Address], patience: float, connection_manager: ConnectionManager
    ) -> None:
        self._swarm = swarm
        self.connection_manager = connection_manager
        self._dial_limiter, self._punches = DialLimiter(), DialLimiter(PUNCHES)
        self._patience = patience
        self._sources = {_family(address.host): address for address in reversed(listening)}
        self.expected: dict[Endpoint, Expected] = {}
        """Who is being punched to, by where it would come from."""
        self.to_be_seen: Callable[[], bool] = lambda: False
        """Whether somebody is looked for who sees our listening port."""
        self.may: Callable[[str, str], bool] = lambda _address, _host: True
        """Whether a multiaddr may be dialled at the IP address that it means."""
        libp2p_patches.accept_with(swarm, self._accept)

    def port(self, host: str) -> int | None:
        """The port that we listen on for peers of `host`'s family."""
        source = self._sources.get(_family(host))
        return source.port if source else None

    # --- dialling -------------------------------------------------------------------------------------

    async def dial(self, peer: PeerId, address: str, *, fresh: bool = False) -> None:
        """Have a straight connection to `peer` at a TCP multiaddr, from a `fresh` port or the listening one.

        Raises what libp2p and the system raise (FOREIGN).
        """
        await _one_of(await self._targets(address), partial(self._dial, peer, fresh))

    async def _targets(self, address: str) -> list[Endpoint]:
        """Where a multiaddr leads: what a name server answers is judged like what the address says itself."""
        found = [target for target in await resolve(address) if self.may(address, target[0])]
        if not found:
            raise SwarmException("it is in no network where a peer may have us dial.")
        return found

    async def _dial(self, peer: PeerId, fresh: bool, target: Endpoint) -> None:
        if not self.connection_manager.has_room(source(target[0]), trio.current_time(), arrived=False):
            raise SwarmException("this node has all the connections that it may have.")
        if not self._dial_limiter.may(target[0], trio.current_time()):
            raise SwarmException(f"{target[0]} was dialled in vain too often of late.")
        until = trio.current_effective_deadline()
        try:
            await self._dial_there(peer, fresh, target)
        except trio.Cancelled:
            if trio.current_time() < until:  # there was time left: this dial was not wanted any more
                self._dial_limiter.overtaken(target[0], trio.current_time())
            raise
        self._dial_limiter.answered(target[0], trio.current_time())

    async def _dial_there(self, peer: PeerId, fresh: bool, target: Endpoint) -> None:
        connected, from_listen_port = await (self._try_first(target) if fresh else self._connect(target))
        try:
            await self._upgrade(connected, peer, Origin("direct", from_listen_port, None, source(target[0])), client=True)
        except BaseLibp2pError as error:
            if not from_listen_port or not _crossed(error):
                raise
            # Perhaps both of us dialled at the same moment, and TCP made one connection of it, with two clients.
            await self._upgrade(await _open(target, None), peer, Origin("direct", False, None, source(target[0])), client=True)

    async def _try_first(self, target: Endpoint) -> tuple[trio.socket.SocketType, bool]:
        """As `_connect`, of one who may not answer: from a fresh port, which is given up if the other is to be seen."""
        first = await _open(target, None)
        if not self.to_be_seen():
            return first, False
        with first:
            return await self._connect(target)

    async def _connect(self, target: Endpoint) -> tuple[trio.socket.SocketType, bool]:
        """A socket, and whether it is bound to the listening port."""
        if (source := self._source(target)) is not None:
            try:
                return await _open(target, source), True
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
        return await _open(target, None), False

    def _source(self, target: Endpoint) -> Address | None:
        source = self._sources.get(_family(target[0]))
        if source is None or (_loopback(source.host) and not _loopback(target[0])):
            return None
        return source

    async def probe(self, peer: PeerId, address: str) -> None:
        """Dial a TCP multiaddr from a fresh port beside all connections, make sure that `peer` answers, and hang up.

        Raises what libp2p and the system raise (FOREIGN).
        """
        await _one_of(await self._targets(address), partial(self._probe, peer))

    async def _probe(self, peer: PeerId, target: Endpoint) -> None:
        link = Connection(TcpEndpoint(trio.SocketStream(await _open(target, None))), True, Origin("direct"))
        try:
            await self._swarm.upgrader.upgrade_security(link, True, ID.from_string(peer))
        finally:
            await _hang_up(link)

    # --- punching -------------------------------------------------------------------------------------

    @contextmanager
    def expecting(self, peer: PeerId, targets: Iterable[Endpoint], *, client: bool) -> Iterator[None]:
        """While inside, who comes from one of `targets` is taken for `peer`, and we are the `client` of the connection.

        When both ends dial at once and one of them is late, its listener gets what the other meant to meet it half-way.
        """
        ours = {target: Expected(peer, client) for target in targets if target not in self.expected}
        self.expected |= ours
        try:
            yield
        finally:
            for target in ours:
                del self.expected[target]

    async def punch(self, target: Endpoint) -> trio.socket.SocketType:
        """Connect from the listening port, again and again until it works or the caller cancels: as often as is allowed
        where a peer says that it is.

        OSError where there is no such port for `target`.
        """
        if (source := self._source(target)) is None:
            raise OSError(errno.EADDRNOTAVAIL, "no listening port of this address family")
        while True:
            if self._punches.may(target[0], trio.current_time()):
                try:
                    return await _open(target, source)
                except OSError as error:
                    logger.debug("a punch to %s: %s", target, error)
            await trio.sleep(_PAUSE)

    async def punched(self, connected: trio.socket.SocketType, peer: PeerId, *, client: bool) -> None:
        """Make a connection to `peer` of what `punch` returned. Raises as `dial` does."""
        host = connected.getpeername()[0]
        await self._upgrade(connected, peer, Origin("punched", True, peer, source(host)), client=client)
        self._punches.answered(host, trio.current_time())

    # --- both -----------------------------------------------------------------------------------------

    async def _upgrade(self, connected: trio.socket.SocketType, peer: PeerId, origin: Origin, *, client: bool) -> None:
        link = Connection(TcpEndpoint(trio.SocketStream(connected)), client, origin)
        try:
            if client:
                await self._as_client(link, peer)
            else:
                host, port = link.get_remote_address() or ("0.0.0.0", 0)
                address = Multiaddr(multiaddr_of(Address(host, port)))
                muxed = await self._swarm.upgrade_inbound_raw_conn(link, address)
                if muxed.peer_id != ID.from_string(peer):
                    raise SwarmException("another peer answered a punch.")
        except BaseException:
            await _hang_up(link)
            raise

    async def _as_client(self, link: Connection, peer: PeerId) -> INetConn:
        with trio.fail_after(self._patience):
            return await self._swarm.upgrade_outbound_raw_conn(link, ID.from_string(peer))

    async def _accept(self, stream: TrioTCPStream, address: Multiaddr) -> None:
        """One inbound connection, until it ends."""
        inner = TcpEndpoint(stream.stream)
        remote = inner.get_remote_address() or ("", 0)
        admitted = self.connection_manager.admit(remote[0], trio.current_time(), stream.stream.socket.close)
        if admitted is None:
            await stream.close()
            return
        expected = self.expected.get(remote)
        client = expected is not None and expected.client
        origin = Origin("punched" if expected else "inbound", True, expected.peer if expected else None, admitted.source)
        link = Connection(inner, client, origin)
        try:
            if expected is not None and client:
                muxed = (await self._as_client(link, expected.peer)).muxed_conn
            else:
                muxed = await self._swarm.upgrade_inbound_raw_conn(link, address)
            self.connection_manager.half_open.pop(admitted, None)
            await muxed.event_closed.wait()
        except FOREIGN as error:
            logger.debug("an inbound connection failed: %s", error)
        finally:
            self.connection_manager.half_open.pop(admitted, None)
            await _hang_up(link)


async def resolve(address: str) -> list[Endpoint]:
    """The IP addresses and ports that a TCP multiaddr means; OSError for a name that has none."""
    kind, host, port = tcp_parts(address)
    if kind.startswith("ip"):
        return [(host, port)]
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, socket.AF_UNSPEC)
    look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
    found = await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=_LOOK_UPS)  # type: ignore[call-arg] # old stubs
    return list(dict.fromkeys((plain(str(sockaddr[0])), port) for *_, sockaddr in found))[:_MOST_RESOLVED]


async def first_of(attempts: Sequence[Callable[[], Awaitable[None]]]) -> list[RemoteError]:
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


async def _one_of(targets: Sequence[Endpoint], attempt: Callable[[Endpoint], Awaitable[None]]) -> None:
    """Try one after the other until one succeeds, each for its share of the time that the caller has; the last failure."""
    failure: BaseException = OSError(errno.EHOSTUNREACH, "the name has no address")
    for number, target in enumerate(targets):
        left = max(0.0, trio.current_effective_deadline() - trio.current_time())
        try:
            with trio.fail_after(left / (len(targets) - number)):
                return await attempt(target)
        except FOREIGN as error:
            failure = error
    raise failure


async def _open(target: Endpoint, source: Address | None) -> trio.socket.SocketType:
    """A socket connected to `target`, from `source`; OSError."""
    opened = trio.socket.socket(_family(target[0]), socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the listener does
            await opened.bind((source.host, source.port))
        await opened.connect(target)
    except BaseException:
        opened.close()
        raise
    return opened


async def _hang_up(link: Connection) -> None:
    with shielded(1.0), already_gone():
        await link.close()


def _crossed(error: BaseException) -> bool:
    """Whether the two ends may have taken the same part in the handshake."""
    found = list(causes(error))
    if any(isinstance(cause, (PeerIDMismatchesPubkey, RemoteError)) for cause in found):
        return False
    return any(isinstance(cause, (HandshakeFailure, MultiselectError, MultiselectClientError)) for cause in found)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
