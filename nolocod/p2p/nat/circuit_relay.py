"""Circuits through a third node that both ends reach: circuit relay v2, the relay's side and the ends'.

The rule: a relay carries for peers that hold a reservation, and a reservation lives as long as its holder's
straight connection. Members come first: strangers have an eighth of all places, or none, and who is worth less to us
makes room for who is worth more. Each circuit is bounded in bytes and time, and stands by itself: when it ends, no other
notices. All together keep to one rate, and take turns. What is carried is sealed end to end; the relay learns
only who speaks with whom, and how much. No clock but our own counts.

libp2p's own relay keys circuits by peer, never frees the reservation of a peer that left, and copies 64 KiB at a time through
a retry loop (3 to 13 MB/s); ours speaks the same protocol (github.com/libp2p/specs, relay/circuit-v2.md).
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from multiaddr import Multiaddr

from nolocod.errors import PeerTooSlowError, ProtocolError, RefusedError, RemoteError
from nolocod.identity import PeerId, short
from nolocod.observe.events import Relaying
from nolocod.p2p.limits.address_groups import customer
from nolocod.p2p.limits.bandwidth import Bucket, paid, piece
from nolocod.p2p.limits.connection_manager import STRANGER
from nolocod.p2p.limits.newest import Newest
from nolocod.p2p.limits.rate_limits import RARE
from nolocod.p2p.transport.deadlines import deadline, reset_unless_done
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.multiaddrs import host_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from nolocod.observe.events import Emit
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.libp2p_stream import LibStream
    from nolocod.p2p.transport.stream import Handler, Stream

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"

_MESSAGE_BYTES = 4096
"""No message of the protocol comes near this."""
_ID_BYTES = 64
_ANSWER = 10.0
"""Seconds that one end gives the other, or a relay, for a message."""
_TELL_SECONDS = 3.0
_HALF_LIFE = 10.0
_IDLE_BYTES = 32 << 10
"""Gossip and pings on a circuit come to less, an exchange comes to more."""
_FOR_MEMBERS = (pb.PERMISSION_DENIED, pb.RESERVATION_REFUSED, pb.RESOURCE_LIMIT_EXCEEDED)
"""Answers that a relay may give strangers alone."""
_KNOWN = 512
"""Peers of whose circuits the limit is remembered."""


@dataclass(frozen=True)
class RelayLimits:
    """What a relay gives. Sizes in bytes, times in seconds."""

    reservations: int = 128
    reservations_per_address: int = 16
    """Of all peers behind one address."""
    reservation_seconds: float = 3600.0
    circuits: int = 32
    """At once, in all."""
    circuits_per_peer: int = 8
    """At once, of one end."""
    circuit_bytes: int = 16 << 30
    """Both ways together, after which a circuit ends."""
    circuit_seconds: float = 3600.0
    idle_seconds: float = 30.0
    """The age from which on a circuit that carries next to nothing makes room for another one."""
    rate: int | None = None
    """Bytes per second that are carried, all circuits and both ways together; None: as many as come."""
    answer_seconds: float = _ANSWER
    """How long an end may take over one message of the protocol."""


@dataclass(eq=False)
class _Circuit:
    """One circuit under way."""

    ends: tuple[PeerId, PeerId]
    left: int
    since: float = field(default_factory=trio.current_time)
    _moved: float = 0.0
    _moved_at: float = -math.inf
    turn: trio.Lock = field(default_factory=trio.Lock)
    """Its two ways count as one among the circuits."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def count(self, size: int, now: float) -> None:
        """Note that `size` bytes were carried."""
        self.left -= size
        self._moved, self._moved_at = self.lately(now) + size, now

    def lately(self, now: float) -> float:
        """Bytes that were carried, those of longer ago counting less."""
        return float(self._moved * 0.5 ** ((now - self._moved_at) / _HALF_LIFE)) if self._moved else 0.0


class Relay:
    """The relay's side. `serve` it on a node that others may reach; `willing` says whether it gives anything now."""

    def __init__(self, host: Host, limits: RelayLimits | None = None, willing: Callable[[], bool] = lambda: True) -> None:
        self.limits = limits or RelayLimits()
        self.willing = willing
        self.strangers = 1 / 8
        """Their share of reservations and of circuits; 0 in runs that one must be invited to."""
        self.circuits_carried = self.bytes_carried = self.refused = 0
        self._host = host
        self._bucket = Bucket(self.limits.rate, trio.current_time())
        self._queue = trio.Lock()
        self._reservations: dict[PeerId, tuple[float, str]] = {}  # until when (trio's time), and from where the holder comes
        self._circuits: set[_Circuit] = set()

    def serve(self, interruptible: Callable[[Handler], Handler] = lambda handler: handler) -> None:
        """Answer HOP streams from now on."""
        self._host.serve(HOP, interruptible(self.handle), RARE)

    async def run(self, emit: Emit) -> None:
        """Tell what is carried, whenever that changed, until cancelled."""
        told = Relaying(0, 0, 0, 0)
        while True:
            self._prune()
            now = Relaying(len(self._reservations), len(self._circuits), self.circuits_carried, self.bytes_carried)
            if now != told:
                emit(now)
                told = now
            await trio.sleep(_TELL_SECONDS)

    async def handle(self, stream: Stream) -> None:
        """One HOP stream: a reservation, or a circuit until it ends. Raises RemoteError for a peer's fault."""
        with deadline(self.limits.answer_seconds, "the request of a relay's client"):
            request = await receive_message(stream, pb.HopMessage, _MESSAGE_BYTES)
        if not self.willing() or not self._welcome(stream.remote):
            await self._refuse(stream, pb.PERMISSION_DENIED)
        elif request.type == pb.HopMessage.RESERVE:
            await self._reserve(stream)
        elif request.type == pb.HopMessage.CONNECT:
            await self._connect(stream, request)
        else:
            await self._refuse(stream, pb.MALFORMED_MESSAGE)

    async def _reserve(self, stream: Stream) -> None:
        self._prune()
        address = customer(host_of(cast("LibStream", stream).remote_address or ""))
        if stream.remote not in self._reservations and (rivals := self._rivals(stream.remote, address)):
            least = min(rivals, key=self._rank)
            if self._rank(least) >= self._rank(stream.remote):
                await self._refuse(stream, pb.RESERVATION_REFUSED)
                return
            del self._reservations[least]
            await self._host.disconnect(least)  # so that it knows, and finds another relay
        seconds = self.limits.reservation_seconds
        self._reservations[stream.remote] = (trio.current_time() + seconds, address)
        addresses = [Multiaddr(text).to_bytes() for text in self._host.addresses]
        await self._agree(stream, pb.Reservation(expire=int(time.time() + seconds), addrs=addresses))

    def _rivals(self, peer: PeerId, address: str) -> list[PeerId]:
        """Of whom one has to go if `peer` is to have a place; nobody while there is room."""
        beside = [other for other, (_, theirs) in self._reservations.items() if theirs == address]
        strangers = [other for other in self._reservations if self._rank(other) == STRANGER]
        if self._rank(peer) == STRANGER and len(strangers) >= self._share(self.limits.reservations):
            return strangers
        if len(beside) >= self.limits.reservations_per_address:
            return beside
        return [*self._reservations] if len(self._reservations) >= self.limits.reservations else []

    def _rank(self, peer: PeerId) -> int:
        return self._host.dialer.connection_manager.rank(peer)

    def _share(self, places: int) -> int:
        """Of so many places those for strangers."""
        return max(1, int(places * self.strangers))

    def _welcome(self, peer: PeerId) -> bool:
        """Whether we relay for it: over a circuit everything would be carried twice."""
        return self._host.straight(peer) and (self.strangers > 0 or self._rank(peer) != STRANGER)

    def _holds(self, peer: PeerId) -> bool:
        """Whether `peer` has a reservation: it must not have run out, and its holder must still be connected."""
        until, _ = self._reservations.get(peer, (0.0, ""))
        return until > trio.current_time() and self._welcome(peer)

    def _prune(self) -> None:
        kept = self._reservations.items() if self.willing() else ()
        self._reservations = {peer: held for peer, held in kept if self._holds(peer)}

    async def _connect(self, stream: Stream, request: pb.HopMessage) -> None:
        target = read_peer(request.peer)
        if not self._holds(target):
            await self._refuse(stream, pb.NO_RESERVATION)
            return
        circuit = _Circuit((stream.remote, target), self.limits.circuit_bytes)
        if not self._room_for(circuit):
            await self._refuse(stream, pb.RESOURCE_LIMIT_EXCEEDED)
            return
        self._circuits.add(circuit)
        try:
            if (onward := await self._reach(circuit)) is None:
                await self._refuse(stream, pb.CONNECTION_FAILED)
                return
            try:
                await self._agree(stream)
                self.circuits_carried += 1
                await self._carry(circuit, stream, onward)
            finally:
                await onward.reset()
        finally:
            self._circuits.discard(circuit)

    def _room_for(self, circuit: _Circuit) -> bool:
        """Whether there is room for one more, once those that are not used have made theirs."""
        for end in circuit.ends:
            theirs = [other for other in self._circuits if end in other.ends]
            if len(theirs) >= self.limits.circuits_per_peer and not self._end_least(theirs):
                return False
        strangers = [one for one in self._circuits if self._strange(one)]
        if self._strange(circuit):
            if len(strangers) >= self._share(self.limits.circuits) and not self._end_least(strangers):
                return False
            strangers = []
        room = len(self._circuits) < self.limits.circuits
        return room or self._end_least(self._circuits) or self._end_least(strangers, used=True)

    def _strange(self, circuit: _Circuit) -> bool:
        return STRANGER in map(self._rank, circuit.ends)

    def _end_least(self, circuits: Iterable[_Circuit], *, used: bool = False) -> bool:
        """End the one of `circuits` that carried least lately; False if all are young or in use, which may not matter."""
        now = trio.current_time()
        old = (other for other in circuits if used or now - other.since >= self.limits.idle_seconds)
        least = min(old, key=lambda other: other.lately(now), default=None)
        if least is None or (least.lately(now) >= _IDLE_BYTES and not used):
            return False
        self._circuits.discard(least)
        least.scope.cancel()
        return True

    async def _reach(self, circuit: _Circuit) -> Stream | None:
        """Ask the target; None if it cannot be reached or does not want."""
        source, target = circuit.ends
        onward: Stream | None = None
        with suppress(RemoteError), deadline(self.limits.answer_seconds, "the answer of a circuit's target"):
            onward = await self._host.open_stream(target, STOP)
            asked = pb.StopMessage(type=pb.StopMessage.CONNECT, peer=_wire_peer(source), limit=self._limit())
            await send_message(onward, asked)
            if (await receive_message(onward, pb.StopMessage, _MESSAGE_BYTES)).status == pb.OK:
                return onward
        if onward is not None:
            await onward.reset()
        return None

    async def _carry(self, circuit: _Circuit, one: Stream, other: Stream) -> None:
        """Both ways until both ends have closed, one fails, or a limit is reached; then neither stream is of use."""
        failures: list[RemoteError] = []
        rate = self.limits.rate

        async def way(source: Stream, sink: Stream) -> None:
            try:
                while data := await cast("LibStream", source).arrived(None if rate is None else piece(rate, self._queue)):
                    if rate is not None:
                        async with circuit.turn, self._queue:  # one at a time of each circuit, first come first served
                            await paid(self._bucket, len(data))
                            self._bucket.take(len(data))
                    circuit.count(len(data), trio.current_time())
                    if circuit.left < 0:
                        raise RefusedError("the circuit has reached its limit.")
                    await sink.write(memoryview(data))
                    self.bytes_carried += len(data)
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

    async def _agree(self, stream: Stream, held: pb.Reservation | None = None) -> None:
        told = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, reservation=held, limit=self._limit())
        await send_message(stream, told)

    async def _refuse(self, stream: Stream, status: pb.Status.ValueType) -> None:
        self.refused += 1
        await send_message(stream, pb.HopMessage(type=pb.HopMessage.STATUS, status=status))

    def _limit(self) -> pb.Limit:
        return pb.Limit(duration=int(self.limits.circuit_seconds), data=min(self.limits.circuit_bytes, 2**63 - 1))


class RelayClient:
    """The ends' side: asks relays for reservations and circuits, and takes circuits that others open to us."""

    def __init__(self, host: Host) -> None:
        self.introduce: Callable[[PeerId], Awaitable[None]] | None = None
        """Shows a relay that we are a member, which it may not have heard in a large run."""
        self._host = host
        self._carries: Newest[PeerId, int] = Newest(_KNOWN)

    def serve(self) -> None:
        """Take circuits from now on."""
        self._host.serve(STOP, self.handle)

    def carries(self, peer: PeerId) -> int | None:
        """How many bytes the latest circuit to `peer` may carry, both ways together, as its relay says; None: no limit."""
        return self._carries.get(peer) or None

    async def reserve(self, relay: PeerId) -> float:
        """Have a reservation at `relay`, which we are connected to; returns for how many seconds, by the relay's clock.

        Raises RefusedError if it has none for us, or what the connection raises.
        """
        stream, answer = await self._ask(relay, pb.HopMessage(type=pb.HopMessage.RESERVE))
        await stream.reset()
        return max(0.0, answer.reservation.expire - time.time())

    async def connect(self, relay: PeerId, target: PeerId) -> None:
        """Have a connection to `target` through `relay`. Raises RefusedError, or what the connections raise."""
        stream, answer = await self._ask(relay, pb.HopMessage(type=pb.HopMessage.CONNECT, peer=_wire_peer(target)))
        self._carries[target] = answer.limit.data
        await self._host.adopt_circuit(stream, target)

    async def handle(self, stream: Stream) -> None:
        """One STOP stream: a circuit to us, until it ends. Raises RemoteError for a peer's fault."""
        with deadline(_ANSWER, "a relay's request"):
            request = await receive_message(stream, pb.StopMessage, _MESSAGE_BYTES)
        if request.type != pb.StopMessage.CONNECT:
            await send_message(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.MALFORMED_MESSAGE))
            return
        peer = read_peer(request.peer)
        await send_message(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK))
        self._carries[peer] = request.limit.data
        await self._host.accept_circuit(stream, peer)

    async def _ask(self, relay: PeerId, request: pb.HopMessage, *, introduced: bool = False) -> tuple[LibStream, pb.HopMessage]:
        stream = await self._host.open_stream(relay, HOP)
        async with reset_unless_done(stream.reset):
            with deadline(2 * _ANSWER, "the answer of a relay", PeerTooSlowError):
                await send_message(stream, request)
                answer = await receive_message(stream, pb.HopMessage, _MESSAGE_BYTES)
        if answer.status == pb.OK:
            return stream, answer
        await stream.reset()
        if answer.status in _FOR_MEMBERS and self.introduce is not None and not introduced:
            await self.introduce(relay)
            return await self._ask(relay, request, introduced=True)
        name = pb.Status.Name(answer.status) if answer.status in pb.Status.values() else str(answer.status)
        raise RefusedError(f"relay {short(relay)} answers {name}.")


def read_peer(wire: pb.PeerId) -> PeerId:
    """The peer that a message names; ProtocolError for what is no peer id."""
    if not 0 < len(wire.id) <= _ID_BYTES:
        raise ProtocolError("a relay message names no peer.")
    peer = PeerId(str(ID(wire.id)))
    try:
        Multiaddr(f"/p2p/{peer}")
    except ValueError as error:
        raise ProtocolError("a relay message has an invalid peer id.") from error
    return peer


def _wire_peer(peer: PeerId) -> pb.PeerId:
    return pb.PeerId(id=ID.from_string(peer).to_bytes())
