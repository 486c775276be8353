"""The network between simulated nodes: streams (p2p.transport.stream.Stream) with latency, bandwidth and loss.

The rule: a stream behaves as one over TCP does. Bytes arrive in order or not at all; what was sent before an end or a
reset still arrives, unless the line itself is cut; a lost segment costs a retransmission timeout, not a byte. Times in
seconds, rates in bytes per second.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from nolocod.errors import PeerTooSlowError, PeerUnavailableError, RemoteError
from nolocod.studies.sim.clock import Wakeup, past, sleep

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.observe.events import NatClass
    from nolocod.p2p.transport.stream import Dial, Handler

PROGRESS = 30.0
"""A read or a write gives up after so long without a byte, as the daemon's streams do."""
_SEGMENT = 1400
_WINDOW = 4 << 20
"""Bytes that a writer may be ahead of the line."""
_RESET = 1
_END = 2


@dataclass(frozen=True)
class LineModel:
    """What lines are like. A message's way takes a lognormal time of mean `latency`, whose standard deviation is `spread`
    times that; a segment is lost with probability `loss`, which delays all behind it by `retransmission`."""

    latency: float = 0.02
    spread: float = 0.3
    loss: float = 0.0
    retransmission: float = 0.2
    up: float = 12_500_000.0
    down: float = 12_500_000.0
    relayed: float = 2_500_000.0
    """The rate of a circuit through a relay; its latency is twice a line's."""
    punched: float = 0.9
    """The share of pairs behind cone NATs that can punch; settled once for each pair."""

    def delay(self, rng: random.Random, size: int) -> float:
        """Seconds on the way for `size` bytes, the sending itself not included."""
        if not self.latency:
            return 0.0
        variance = math.log1p(self.spread**2)
        way = self.latency * (rng.lognormvariate(-variance / 2, math.sqrt(variance)) if variance else 1.0)
        if self.loss:
            lost = sum(rng.random() < self.loss for _ in range(math.ceil(size / _SEGMENT)))
            way += self.retransmission * lost
        return way


@dataclass
class Port:
    """A simulated node's place in the network."""

    number: int
    peer: PeerId
    nat: NatClass = "public"
    side: int = 0
    """Only nodes on the same side reach each other: two sides are a partition."""
    up: bool = True
    frozen_until: float = 0.0
    """Nothing leaves it and nothing is taken before that."""
    handlers: dict[str, Handler] = field(default_factory=dict)
    spawn: Callable[..., None] | None = None
    """Starts a task that lives as long as the node does; there is none before it runs."""
    sending_until: float = 0.0
    receiving_until: float = 0.0
    ends: set[End] = field(default_factory=set)
    sent: int = 0
    """Bytes, in all."""


class End:
    """One end of a stream."""

    def __init__(self, network: Network, own: Port, other: Port, protocol: str, *, relayed: bool) -> None:
        self._network = network
        self._own = own
        self._other = other
        self.protocol = protocol
        self.relayed = relayed
        self.peer_end: End = self
        self._queue: deque[tuple[float, bytes | int]] = deque()  # (when it arrives, bytes or how it ends)
        self._rest = memoryview(b"")
        self._news = Wakeup()
        self._closed = False
        self._broken = False
        self._deaf = False  # nothing that is written from here arrives any more
        self._last_arrival = 0.0

    @property
    def remote(self) -> PeerId:
        return self._other.peer

    # --- reading --------------------------------------------------------------------------------------

    async def read_exactly(self, count: int) -> bytes:
        parts = bytearray(count)
        await self.read_into(memoryview(parts))
        return bytes(parts)

    async def read_into(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            if not self._rest:
                await self._more()
                if not self._rest:
                    raise PeerUnavailableError("the stream ended.")
            taken = min(len(view) - filled, len(self._rest))
            view[filled : filled + taken] = self._rest[:taken]
            self._rest = self._rest[taken:]
            filled += taken

    async def _more(self) -> None:
        """Take what arrives next into `_rest`; leaves it empty at the end of the stream."""
        give_up = trio.current_time() + PROGRESS
        waited = False
        while True:
            if self._broken:
                raise PeerUnavailableError("the stream broke.")
            now = trio.current_time()
            due = max(self._queue[0][0], self._own.frozen_until) if self._queue else math.inf
            if due <= now:
                break
            if now >= give_up:
                raise PeerTooSlowError("nothing came.")
            await self._news.wait(min(due, give_up))
            waited = True
        if not waited:
            await trio.lowlevel.checkpoint()
        _, what = self._queue.popleft()
        if what == _RESET:
            self._broken = True
            raise PeerUnavailableError("the stream was reset.")
        if what == _END:
            self._queue.appendleft((0.0, _END))
            return
        if isinstance(what, bytes):
            self._rest = memoryview(what)

    # --- writing --------------------------------------------------------------------------------------

    async def write(self, data: bytes | memoryview) -> None:
        if self._broken or self._closed:
            raise PeerUnavailableError("the stream broke.")
        await trio.lowlevel.checkpoint()
        now = max(trio.current_time(), self._own.frozen_until)
        sent = self._network.occupy(self._own, self._other, len(data), now, relayed=self.relayed)
        self._arrive(bytes(data), sent)
        self._own.sent += len(data)
        if sent - now > _WINDOW / self._network.line.up:
            with trio.move_on_after(PROGRESS) as scope:
                await trio.sleep_until(sent - _WINDOW / self._network.line.up)
            if scope.cancelled_caught:
                raise PeerTooSlowError("nothing was taken.")
        if self._broken:
            raise PeerUnavailableError("the stream broke.")

    def _arrive(self, what: bytes | int, sent: float) -> None:
        """Put `what` on its way to the other end."""
        if what == b"" or self._deaf or not self._network.joined(self._own, self._other):
            return
        size = len(what) if isinstance(what, bytes) else 0
        arrival = sent + self._network.delay(size, relayed=self.relayed)
        self._last_arrival = max(self._last_arrival, arrival)  # in order
        end = self.peer_end
        end._queue.append((self._last_arrival, what))
        end._news.wake()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()
        if not self._closed:
            self._closed = True
            self._arrive(_END, trio.current_time())
            self._let_go()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        if not self._broken:
            self._arrive(_RESET, trio.current_time())
        self._closed = self._broken = True
        self._news.wake()
        self._let_go()

    def cut(self) -> None:
        """The connection is gone, for both ends at once; what had arrived before can still be read."""
        for end in (self, self.peer_end):
            if not end._broken:
                end._queue.append((trio.current_time(), _RESET))
                end._deaf = end._closed = True
                end._news.wake()
                end._let_go()

    def _let_go(self) -> None:
        if self._closed and self.peer_end._closed:
            self._own.ends.discard(self)
            self._other.ends.discard(self.peer_end)


class Network:
    """All ports, and the lines between them. `rng` is its own."""

    end_type: type[End] = End

    def __init__(self, line: LineModel, rng: random.Random) -> None:
        self.line = line
        self.ports: dict[PeerId, Port] = {}
        self._rng = rng
        self._punches: dict[tuple[int, int], bool] = {}

    def add(self, peer: PeerId, nat: NatClass = "public") -> Port:
        port = self.ports[peer] = Port(len(self.ports), peer, nat)
        return port

    def joined(self, one: Port, other: Port) -> bool:
        """Whether bytes pass between the two now."""
        return one.up and other.up and one.side == other.side

    def relayed(self, one: Port, other: Port) -> bool:
        """Whether only a relay connects the two."""
        if "public" in (one.nat, other.nat):
            return False
        if (one.nat, other.nat) != ("cone", "cone"):
            return True
        pair = min(one.number, other.number), max(one.number, other.number)
        if pair not in self._punches:
            self._punches[pair] = self._rng.random() < self.line.punched
        return not self._punches[pair]

    def delay(self, size: int, *, relayed: bool) -> float:
        way = self.line.delay(self._rng, size)
        return way + self.line.delay(self._rng, size) if relayed else way

    def occupy(self, one: Port, other: Port, size: int, now: float, *, relayed: bool) -> float:
        """When the last of `size` bytes is through both lines, each of which carries one thing after another."""
        up, down = self.line.up, self.line.down
        if relayed:
            up, down = min(up, self.line.relayed), min(down, self.line.relayed)
        one.sending_until = max(one.sending_until, now) + size / up
        other.receiving_until = max(other.receiving_until, now) + size / down
        return max(one.sending_until, other.receiving_until)

    def dial(self, own: Port) -> Dial:
        """How the node at `own` opens streams."""

        async def dial(peer: PeerId, protocol: str) -> End:
            other = self.ports.get(peer)
            await past(own.frozen_until)
            await sleep(self.delay(0, relayed=other is not None and self.relayed(own, other)))
            if other is None or not self.joined(own, other) or protocol not in other.handlers:
                raise PeerUnavailableError("nobody answers.")
            if other.frozen_until > trio.current_time() + PROGRESS:
                await sleep(PROGRESS)
                raise PeerTooSlowError("the dial took too long.")
            await past(other.frozen_until)
            if not self.joined(own, other) or other.spawn is None:
                raise PeerUnavailableError("nobody answers.")
            near = self.connect(own, other, protocol)
            other.spawn(self._handle, other, near.peer_end)
            return near

        return dial

    def connect(self, own: Port, other: Port, protocol: str) -> End:
        """A new stream: the end at `own`."""
        relayed = self.relayed(own, other)
        near = self.end_type(self, own, other, protocol, relayed=relayed)
        far = self.end_type(self, other, own, protocol, relayed=relayed)
        near.peer_end, far.peer_end = far, near
        own.ends.add(near)
        other.ends.add(far)
        return near

    async def _handle(self, port: Port, end: End) -> None:
        """A remote error out of a handler costs the peer its stream, as in the daemon."""
        try:
            await port.handlers[end.protocol](end)
            await end.close()
        except RemoteError:
            await end.reset()

    def kill(self, port: Port) -> None:
        """Without a word: the others notice by silence, or when they send."""
        port.up = False
        for end in list(port.ends):
            end.cut()
        port.handlers.clear()
