"""Heartbeats by push and pull: how every member hears of every other.

The rule: every few seconds a node seals one heartbeat and swaps it, with the freshest it knows of others,
with a few members; whoever is asked answers with its own view. So news reach all N members in about
log N beats, and nobody needs to know everybody's connection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from nolocod import __version__
from nolocod.errors import OtherRunError, PeerVersionError, ProtocolError, RemoteError
from nolocod.events import PeerLost, PeerSeen, Troubled
from nolocod.p2p.requests import Terms, answer, ask
from nolocod.p2p.streams import GOSSIP
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import seal, standing_to_wire

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from nolocod.events import Emit
    from nolocod.identity import Identity, PeerId
    from nolocod.p2p.host import Host
    from nolocod.p2p.membership import Membership
    from nolocod.p2p.streams import Stream
    from nolocod.p2p.timing import Timing
    from nolocod.terms import Standing

_ENOUGH = 16
"""With so many connections, gossip keeps to connected members: a random graph of that degree holds together."""
_AT_ONCE = 32


@dataclass
class Voice:
    """Makes our heartbeats: `own` gives standing and state, `addresses` what others may dial."""

    identity: Identity
    run_id: str
    own: Callable[[], tuple[Standing, str]]
    addresses: Callable[[], Sequence[str]]
    clock: Callable[[], float] = time.time
    _count: int = field(default=0)

    def heartbeat(self, *, leaving: bool = False) -> bytes:
        """Seal a new heartbeat. Its count grows over restarts, as the time of day does."""
        standing, state = self.own()
        now_ms = int(self.clock() * 1000)
        self._count = max(now_ms, self._count + 1)
        heartbeat = pb.Heartbeat(
            count=self._count,
            standing=standing_to_wire(standing),
            state="leaving" if leaving else state,
            addresses=list(self.addresses())[:8],
            version=__version__,
            time_ms=now_ms,
        )
        return seal(pb.Body(run_id=self.run_id, heartbeat=heartbeat), self.identity)


class Gossip:
    """Speaks for this node and keeps `table` up to date. `run` does the work, `contact` adds a peer to it."""

    def __init__(self, host: Host, table: Membership, voice: Voice, rng: random.Random, timing: Timing, emit: Emit) -> None:
        self._host = host
        self._table = table
        self._voice = voice
        self._rng = rng
        self._timing = timing
        self._emit = emit
        self._terms = Terms(voice.identity, voice.run_id, timing.request)
        self._beat = voice.heartbeat()
        self._under_way: set[PeerId] = set()
        self._nursery: trio.Nursery | None = None
        self._began = trio.current_time()
        self.changed = trio.Event()
        """Set, and replaced, whenever the table changed."""
        self.heard_directly: dict[PeerId, float] = {}
        """When we last had an answer or a question of a peer on its own connection."""

    async def run(self, nursery: trio.Nursery) -> None:
        """Beat until cancelled; contacts run in `nursery`."""
        self._nursery = nursery
        while True:
            self._beat = self._voice.heartbeat()
            self._tell(self._table.expire(trio.current_time()))
            self._forget_strangers()
            for peer in self._targets():
                self._start(peer, ())
            await trio.sleep(self._timing.heartbeat * self._rng.uniform(0.8, 1.2))

    def _forget_strangers(self) -> None:
        """Whoever asked us once, and is neither member nor connected any more, is not kept in mind."""
        reach = self._host.peers()
        self.heard_directly = {peer: when for peer, when in self.heard_directly.items() if peer in reach or peer in self._table}

    def _targets(self) -> list[PeerId]:
        now, reach = trio.current_time(), self._host.peers()
        connected = [member.peer_id for member in self._table.live(now) if member.peer_id in reach]
        if len(connected) >= _ENOUGH:
            return self._rng.sample(connected, min(self._timing.fanout, len(connected)))
        return self._table.sample(self._rng, self._timing.fanout, now)

    def _start(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if self._nursery is not None and peer not in self._under_way and len(self._under_way) < _AT_ONCE:
            self._nursery.start_soon(self._contact_quietly, peer, addresses)

    async def _contact_quietly(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if peer not in self._under_way:
            try:
                await self.contact(peer, addresses)
            except RemoteError as error:
                self._table.suspect(peer, trio.current_time())
                self.trouble(error)

    async def contact(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Swap views with `peer`, dialling `addresses` or those it announced. Raises RemoteError."""
        self._under_way.add(peer)
        try:
            stream = await self._host.open_stream(peer, GOSSIP, (*addresses, *self._table.addresses(peer)))
            view = pb.Gossip(heartbeats=[self._beat, *self._view()], answer=True)
            body = await ask(stream, pb.Body(gossip=view), self._terms)
        finally:
            self._under_way.discard(peer)
        if not body.HasField("gossip"):
            raise ProtocolError("gossip was answered with something else.")
        self.heard_directly[peer] = trio.current_time()
        self._table.trust(peer)
        self.learn(body.gossip.heartbeats)

    def _view(self) -> list[bytes]:
        return self._table.encode_view(self._rng, self._timing.view)

    async def handle(self, stream: Stream) -> None:
        """Answer a GOSSIP stream."""

        def reply(body: pb.Body) -> pb.Body:
            if not body.HasField("gossip"):
                raise ProtocolError("a gossip stream began with something else.")
            view = self._view()  # before we learn, or the peer would get back what it just told
            self.learn(body.gossip.heartbeats)
            return pb.Body(gossip=pb.Gossip(heartbeats=[self._beat, *view] if body.gossip.answer else []))

        refused = await answer(stream, self._terms, reply)
        if refused is not None:
            self.trouble(refused)
            return
        self.heard_directly[stream.remote] = trio.current_time()

    def learn(self, heartbeats: Iterable[bytes]) -> None:
        """Take in heartbeats that somebody told us; those that are not valid are dropped, one by one."""
        now, wall = trio.current_time(), self._voice.clock()
        own_round = self._voice.own()[0].round
        told: list[PeerSeen | PeerLost] = []
        for number, raw in enumerate(heartbeats):
            if number > self._timing.view:
                break
            try:
                change = self._table.heard(raw, now, wall, own_round)
            except RemoteError:
                self._host.faults += 1
                continue
            if change is not None:
                told.append(change)
        newcomers = {change.peer_id for change in told} - set(self.heard_directly)
        if now < self._began + self._timing.eager:
            for peer in newcomers:
                if peer in self._table:
                    self._start(peer, ())
        self._tell(told)

    def _tell(self, changes: Iterable[PeerSeen | PeerLost]) -> None:
        changed = False
        for change in changes:
            changed = True
            if isinstance(change, PeerLost):
                self.heard_directly.pop(change.peer_id, None)
            self._emit(change)
        if changed:
            self.changed.set()
            self.changed = trio.Event()

    def trouble(self, error: RemoteError) -> None:
        """Show the faults that a user can act on; the others are the network's daily life."""
        if isinstance(error, (OtherRunError, PeerVersionError)):
            self._emit(Troubled(error.code, error.cause))

    async def leave(self, seconds: float) -> None:
        """Tell a few members, best effort, that we go."""
        self._beat = self._voice.heartbeat(leaving=True)
        now = trio.current_time()
        told = [member.peer_id for member in self._table.live(now) if member.peer_id in self._host.peers()]
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for peer in told[:_AT_ONCE]:
                    nursery.start_soon(self._contact_quietly, peer, ())
