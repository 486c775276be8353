"""What a connection lies on and how it came about, kept with it for its whole life.

The rule: libp2p knows only who dialled; how a peer is reached, and whether a NAT's mapping of our listening
port stands behind a connection, is written down by whoever made it, and read by everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libp2p.connection_types import ConnectionType
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libp2p.abc import INetConn
    from libp2p.io.abc import ReadWriteCloser
    from multiaddr import Multiaddr

    from nolocod.identity import PeerId
    from nolocod.observe.events import Reach


@dataclass(frozen=True)
class Origin:
    """How a connection came about."""

    reach: Reach
    from_listen_port: bool = False
    """Ours is the port that we listen on: what the peer sees of us is what others can dial, or punch to."""
    expected: PeerId | None = None
    """Whom a punched connection was expected from: anybody else who comes that way has simply dialled us."""


class Link(RawConnection):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """A connection before it is secured. `initiator` is its role there, which is not always the one that dialled."""

    def __init__(
        self, stream: ReadWriteCloser, initiator: bool, origin: Origin, addresses: Sequence[Multiaddr] | None = None
    ) -> None:
        kind = ConnectionType.RELAYED if origin.reach == "relayed" else ConnectionType.DIRECT
        super().__init__(stream, initiator, kind, list(addresses) if addresses else None)
        self.origin = origin


class TcpStream(TrioTCPStream):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """libp2p's, that knows the other end's address with IPv6 too, where a socket's address has four parts."""

    def get_remote_address(self) -> tuple[str, int] | None:
        try:
            host, port, *_ = self.stream.socket.getpeername()
        except OSError:
            return self._last
        self._last = plain(host), int(port)
        return self._last

    _last: tuple[str, int] | None = None


def plain(host: str) -> str:
    """An IP address without a zone, and IPv4 as IPv4 where it came in on an IPv6 socket."""
    return host.partition("%")[0].lower().removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def origin_of(connection: INetConn) -> Origin:
    """How a live connection came about."""
    channel = connection.muxed_conn.secured_conn
    found: Origin | None = channel.origin
    return found or Origin("direct" if channel.is_initiator else "inbound")  # not one of ours


def relayed(connection: INetConn) -> bool:
    return bool(connection.muxed_conn.get_connection_type() == ConnectionType.RELAYED)
