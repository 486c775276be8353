"""The messages of circuit relay v2: a varint length, then protobuf.

The rule: a length is compared with its limit before anything is read for it, and a peer that is named is one
that can be. Source: github.com/libp2p/specs, relay/circuit-v2.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as WirePeer
from multiaddr import Multiaddr

from nolocod.errors import ProtocolError
from nolocod.identity import PeerId

if TYPE_CHECKING:
    from nolocod.p2p.streams import Stream

M = TypeVar("M", HopMessage, StopMessage)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"

_MESSAGE_BYTES = 4096
"""No message of the protocol comes near this."""
_ID_BYTES = 64


async def send(stream: Stream, message: HopMessage | StopMessage) -> None:
    """Send one message. Raises what the stream raises."""
    raw = message.SerializeToString()
    await stream.write(_varint(len(raw)) + raw)


async def receive(stream: Stream, kind: type[M]) -> M:
    """Read one message. ProtocolError for what is none."""
    length = shift = 0
    while True:
        (byte,) = await stream.read_exactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 21:
            raise ProtocolError("a relay message's length does not end.")
    if length > _MESSAGE_BYTES:
        raise ProtocolError(f"a relay message of {length} bytes.")
    message = kind()
    try:
        message.ParseFromString(await stream.read_exactly(length))
    except DecodeError as error:
        raise ProtocolError("a relay message cannot be parsed.") from error
    return message


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


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
