"""The messages of circuit relay v2.

The rule: a peer that is named is one that can be. Source: github.com/libp2p/specs, relay/circuit-v2.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as WirePeer
from multiaddr import Multiaddr

from nolocod.errors import ProtocolError
from nolocod.identity import PeerId
from nolocod.p2p.transport.delimited import receive_message

if TYPE_CHECKING:
    from nolocod.p2p.transport.stream import Stream

M = TypeVar("M", HopMessage, StopMessage)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"

_MESSAGE_BYTES = 4096
"""No message of the protocol comes near this."""
_ID_BYTES = 64


async def receive(stream: Stream, kind: type[M]) -> M:
    """Read one message. Raises ProtocolError, or what the stream raises."""
    return await receive_message(stream, kind, _MESSAGE_BYTES)


def read_peer(wire: WirePeer) -> PeerId:
    """The peer that a message names; ProtocolError for what is no peer id."""
    if not 0 < len(wire.id) <= _ID_BYTES:
        raise ProtocolError("a relay message names no peer.")
    peer = PeerId(str(ID(wire.id)))
    try:
        Multiaddr(f"/p2p/{peer}")
    except ValueError as error:
        raise ProtocolError("a relay message names a peer that cannot be.") from error
    return peer


def peer_bytes(peer: PeerId) -> bytes:
    """How a message names `peer`."""
    raw: bytes = ID.from_string(peer).to_bytes()
    return raw


def address_bytes(address: str) -> bytes:
    """How a message tells a multiaddr."""
    raw: bytes = Multiaddr(address).to_bytes()
    return raw
