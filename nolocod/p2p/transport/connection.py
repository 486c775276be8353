"""A connection before it is secured, and how it came about, which is kept with it for its whole life.

The rule: libp2p knows only who dialled; how a peer is reached, and whether a NAT's mapping of our listening
port stands behind a connection, is written down by whoever made it, and read by everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.raw_connection import RawConnection

if TYPE_CHECKING:
    from libp2p.abc import INetConn
    from multiaddr import Multiaddr

    from nolocod.identity import PeerId
    from nolocod.observe.events import Reach
    from nolocod.p2p.transport.endpoints import CircuitEndpoint, TcpEndpoint


@dataclass(frozen=True)
class Origin:
    """How a connection came about."""

    reach: Reach
    from_listen_port: bool = False
    """Ours is the port that we listen on: what the peer sees of us is what others can dial, or punch to."""
    expected: PeerId | None = None
    """Whom a punched connection was expected from: anybody else who comes that way has simply dialled us."""
    source: str = ""
    """Where the other end is (address_groups.source): an address or a group of them, or the relay."""
    since: float = field(default_factory=trio.current_time, compare=False)


class Connection(RawConnection):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """`initiator` is our role in the handshake, which is not always that of the one that dialled."""

    def __init__(
        self, stream: TcpEndpoint | CircuitEndpoint, initiator: bool, origin: Origin, address: Multiaddr | None = None
    ) -> None:
        kind = ConnectionType.RELAYED if origin.reach == "relayed" else ConnectionType.DIRECT
        super().__init__(stream, initiator, kind, [address] if address else None)
        self.origin = origin


def origin_of(connection: INetConn) -> Origin:
    """How a live connection came about."""
    found: Origin = connection.muxed_conn.secured_conn.origin
    return found


def relayed(connection: INetConn) -> bool:
    return origin_of(connection).reach == "relayed"
