"""Circuits through a third node that both ends reach: circuit relay v2, the relay's side and the ends'.

The rule: a relay carries for peers that hold a reservation, and a reservation lives as long as its holder's
connection. Each circuit is bounded in bytes and time, and stands by itself: when it ends, no other notices.
What is carried is sealed end to end; the relay learns only who speaks with whom, and how much.

libp2p's own relay keys circuits by peer, never frees the reservation of a peer that left, and copies
64 KiB at a time through a retry loop (3 to 13 MB/s); ours speaks the same protocol.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import trio
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import (
    CONNECTION_FAILED,
    MALFORMED_MESSAGE,
    NO_RESERVATION,
    OK,
    RESERVATION_REFUSED,
    RESOURCE_LIMIT_EXCEEDED,
    HopMessage,
    Limit,
    Reservation,
    Status,
    StopMessage,
)
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as WirePeer
from multiaddr import Multiaddr

from nolocod.errors import PeerTooSlowError, ProtocolError, RefusedError, RemoteError
from nolocod.identity import PeerId, short
from nolocod.p2p.libp2p_streams import map_exceptions
from nolocod.p2p.wire import deadline

if TYPE_CHECKING:
    from nolocod.p2p.host import Host
    from nolocod.p2p.libp2p_streams import LibStream
    from nolocod.p2p.streams import Stream

M = TypeVar("M", HopMessage, StopMessage)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"

_MESSAGE_BYTES = 4096
"""No message of the protocol comes near this."""
_ID_BYTES = 64


@dataclass(frozen=True)
class RelayLimits:
    """What a relay gives. Sizes in bytes, times in seconds."""

    reservations: int = 128
    reservation_seconds: float = 3600.0
    circuits: int = 32
    """At once, in all."""
    circuits_per_peer: int = 4
    """At once, of one end."""
    circuit_bytes: int = 16 << 30
    """Both ways together, after which a circuit ends."""
    circuit_seconds: float = 3600.0
    answer_seconds: float = 10.0
    """How long an end may take over one message of the protocol."""


@dataclass
class Carried:
    """What a relay has carried, for metrics."""

    circuits: int = 0
    bytes: int = 0
    refused: int = 0


@dataclass
class _Circuit:
    """One circuit under way."""

    ends: tuple[PeerId, PeerId]
    left: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Relay:
    """The relay's side. `serve` it on a node that others reach."""

    def __init__(self, host: Host, limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        self.carried = Carried()
        self._host = host
        self._reservations: dict[PeerId, float] = {}  # until when, in trio's time
        self._circuits: list[_Circuit] = []

    def serve(self) -> None:
        """Answer HOP streams from now on."""
        self._host.serve(HOP, self.handle)

    async def handle(self, stream: Stream) -> None:
        """One HOP stream: a reservation, or a circuit until it ends. Raises RemoteError for a peer's fault."""
        with deadline(self.limits.answer_seconds, "the request of a relay's client"):
            request = await _receive(stream, HopMessage)
        if request.type == HopMessage.RESERVE:
            await self._reserve(stream)
        elif request.type == HopMessage.CONNECT:
            await self._connect(stream, request)
        else:
            await self._refuse(stream, MALFORMED_MESSAGE)

    async def _reserve(self, stream: Stream) -> None:
        self._reservations = {peer: until for peer, until in self._reservations.items() if self._holds(peer)}
        if stream.remote not in self._reservations and len(self._reservations) >= self.limits.reservations:
            await self._refuse(stream, RESERVATION_REFUSED)
            return
        self._reservations[stream.remote] = trio.current_time() + self.limits.reservation_seconds
        expire = int(time.time() + self.limits.reservation_seconds)
        addresses = [_address_bytes(address) for address in self._host.addresses]
        reservation = Reservation(expire=expire, addrs=addresses)
        await _send(stream, HopMessage(type=HopMessage.STATUS, status=OK, reservation=reservation, limit=self._limit()))

    def _holds(self, peer: PeerId) -> bool:
        """Whether `peer` has a reservation: it must not have run out, and its holder must still be connected."""
        return self._reservations.get(peer, 0.0) > trio.current_time() and self._host.connected(peer)

    async def _connect(self, stream: Stream, request: HopMessage) -> None:
        target = _peer(request.peer)
        if not self._holds(target):
            await self._refuse(stream, NO_RESERVATION)
            return
        circuit = _Circuit((stream.remote, target), self.limits.circuit_bytes)
        if not self._room_for(circuit):
            await self._refuse(stream, RESOURCE_LIMIT_EXCEEDED)
            return
        self._circuits.append(circuit)
        try:
            onward = await self._reach(circuit)
            if onward is None:
                await self._refuse(stream, CONNECTION_FAILED)
                return
            try:
                await _send(stream, HopMessage(type=HopMessage.STATUS, status=OK, limit=self._limit()))
                self.carried.circuits += 1
                await self._carry(circuit, stream, onward)
            finally:
                await onward.reset()
        finally:
            self._circuits.remove(circuit)

    def _room_for(self, circuit: _Circuit) -> bool:
        busy = Counter(end for other in self._circuits for end in other.ends)
        most = self.limits.circuits_per_peer
        return len(self._circuits) < self.limits.circuits and all(busy[end] < most for end in circuit.ends)

    async def _reach(self, circuit: _Circuit) -> Stream | None:
        """Ask the target; None if it cannot be reached or does not want."""
        source, target = circuit.ends
        onward: Stream | None = None
        willing = False
        try:
            with deadline(self.limits.answer_seconds, "the answer of a circuit's target"):
                onward = await self._host.open_stream(target, STOP)
                request = StopMessage(type=StopMessage.CONNECT, peer=WirePeer(id=_id_bytes(source)), limit=self._limit())
                await _send(onward, request)
                willing = (await _receive(onward, StopMessage)).status == OK
        except RemoteError:
            willing = False
        if onward is not None and not willing:
            await onward.reset()
        return onward if willing else None

    async def _carry(self, circuit: _Circuit, one: Stream, other: Stream) -> None:
        """Both ways until both ends have closed, one fails, or a limit is reached; then neither stream is of use."""
        failures: list[RemoteError] = []

        async def way(source: Stream, sink: Stream) -> None:
            try:
                while data := await _arrived(source):
                    circuit.left -= len(data)
                    if circuit.left < 0:
                        raise RefusedError(
                            f"a circuit between {short(one.remote)} and {short(other.remote)} is over its limit."
                        )
                    await sink.write(memoryview(data))
                    self.carried.bytes += len(data)
                await sink.close()
            except RemoteError as error:
                failures.append(error)
                circuit.scope.cancel()

        circuit.scope.deadline = trio.current_time() + self.limits.circuit_seconds
        with circuit.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(way, one, other)
                nursery.start_soon(way, other, one)
        if failures or circuit.scope.cancelled_caught:
            await one.reset()  # also if this way had ended in order: what the other end did not send is no clean end

    async def _refuse(self, stream: Stream, status: Status.ValueType) -> None:
        self.carried.refused += 1
        await _send(stream, HopMessage(type=HopMessage.STATUS, status=status))

    def _limit(self) -> Limit:
        return Limit(duration=int(self.limits.circuit_seconds), data=min(self.limits.circuit_bytes, 2**63 - 1))


class RelayClient:
    """The ends' side: asks relays for reservations and circuits, and takes circuits that others open to us."""

    def __init__(self, host: Host, limits: RelayLimits | None = None) -> None:
        self._host = host
        self._limits = limits or RelayLimits()

    def serve(self) -> None:
        """Take circuits from now on."""
        self._host.serve(STOP, self.handle)

    async def reserve(self, relay: PeerId) -> float:
        """Have a place at `relay`, which we are connected to; returns for how many seconds.

        Raises RefusedError if it has none for us, or what the connection raises.
        """
        stream = await self._host.open_stream(relay, HOP)
        try:
            answer = await self._ask(stream, HopMessage(type=HopMessage.RESERVE))
        finally:
            await stream.reset()
        return max(0.0, answer.reservation.expire - time.time())

    async def connect(self, relay: PeerId, target: PeerId) -> None:
        """Have a connection to `target` through `relay`. Raises RefusedError, or what the connections raise."""
        stream = await self._host.open_stream(relay, HOP)
        try:
            await self._ask(stream, HopMessage(type=HopMessage.CONNECT, peer=WirePeer(id=_id_bytes(target))))
        except BaseException:
            await stream.reset()
            raise
        await self._host.adopt_circuit(stream, target)

    async def handle(self, stream: Stream) -> None:
        """One STOP stream: a circuit to us, until it ends. Raises RemoteError for a peer's fault."""
        with deadline(self._limits.answer_seconds, "a relay's request"):
            request = await _receive(stream, StopMessage)
        if request.type != StopMessage.CONNECT:
            await _send(stream, StopMessage(type=StopMessage.STATUS, status=MALFORMED_MESSAGE))
            return
        source = _peer(request.peer)
        await _send(stream, StopMessage(type=StopMessage.STATUS, status=OK))
        await self._host.accept_circuit(stream, source)

    async def _ask(self, stream: Stream, request: HopMessage) -> HopMessage:
        with deadline(2 * self._limits.answer_seconds, "the answer of a relay", PeerTooSlowError):
            await _send(stream, request)
            answer = await _receive(stream, HopMessage)
        if answer.status != OK:
            name = Status.Name(answer.status) if answer.status in Status.values() else str(answer.status)
            raise RefusedError(f"relay {short(stream.remote)} answers {name}.")
        return answer


async def _arrived(source: Stream) -> bytearray:
    """What has arrived, without a deadline on progress: the ends of a circuit may be silent for as long as it lives."""
    with map_exceptions(source.remote, "reading"):
        return await cast("LibStream", source).muxed.take()


# --- messages: a varint length, then protobuf -----------------------------------------------------------


async def _send(stream: Stream, message: HopMessage | StopMessage) -> None:
    raw = message.SerializeToString()
    await stream.write(_varint(len(raw)) + raw)


async def _receive(stream: Stream, kind: type[M]) -> M:
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


def _peer(wire: WirePeer) -> PeerId:
    """ProtocolError for what is no peer id."""
    if not 0 < len(wire.id) <= _ID_BYTES:
        raise ProtocolError("a relay message names no peer.")
    peer = PeerId(str(ID(wire.id)))
    try:
        Multiaddr(f"/p2p/{peer}")
    except ValueError as error:
        raise ProtocolError("a relay message names a peer that cannot be.") from error
    return peer


def _id_bytes(peer: PeerId) -> bytes:
    raw: bytes = ID.from_string(peer).to_bytes()
    return raw


def _address_bytes(address: str) -> bytes:
    raw: bytes = Multiaddr(address).to_bytes()
    return raw
