"""Heartbeats by push and pull: how members hear of each other.

The rule: every few seconds a node seals one heartbeat and swaps it, with some that it knows of others, with a
member; whoever is asked answers with its own view. So news spread in about log N beats, and nobody needs to
know everybody, or everybody's connection. What goes into a message is `gossip`'s matter; this is how it travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from nolocod import errors
from nolocod.observe.events import PeerLost, PeerSeen, Troubled
from nolocod.p2p.membership.gossip import Gossip, Heard
from nolocod.p2p.membership.peer_scoring import Conduct, conduct_of
from nolocod.p2p.transport.requests import Terms, answer, ask
from nolocod.p2p.transport.stream import GOSSIP
from nolocod.proto import nolocod_pb2 as pb

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.host import Host
    from nolocod.p2p.membership.amended import AmendedRun
    from nolocod.p2p.membership.heartbeat import OwnHeartbeat
    from nolocod.p2p.membership.table import Membership
    from nolocod.p2p.timing import Timing
    from nolocod.p2p.transport.stream import Stream

_AT_ONCE = 32
_THEIRS = (errors.PeerNotInvitedError, errors.PeerInvitationOverError, errors.BannedError)
"""Refusals that only the refused one's user can do something about."""


class GossipService:
    """Speaks for this node and keeps `table` up to date. `run` does the work, `contact` adds a peer to it."""

    def __init__(
        self, host: Host, table: Membership, own_heartbeat: OwnHeartbeat, rng: random.Random, timing: Timing, emit: Emit,
        amended: AmendedRun | None = None,
    ) -> None:  # fmt: skip
        self._host = host
        self._table = table
        self._gossip = Gossip(table, own_heartbeat, rng, amended)
        self._own_heartbeat = own_heartbeat
        self._emit = emit
        self.cloned = trio.Event()
        """Set once another node, that began before us, is known to speak with our key."""
        self._warned_of = 0
        """The life of the clone that was told last: each is told once."""
        self._terms = Terms(own_heartbeat.identity, own_heartbeat.run_id, timing.request)
        self._under_way: set[PeerId] = set()
        self._learning = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self.judge: Callable[[PeerId, Conduct], None] = lambda _, __: None
        """Told what peers do wrong that we asked, or that pass on what is not valid."""
        self.heard_directly: dict[PeerId, float] = {}
        """When we last had an answer or a question of a peer on its own connection."""

    async def run(self, nursery: trio.Nursery) -> None:
        """Beat until cancelled; contacts run in `nursery`."""
        self._nursery = nursery
        while True:
            now, connected = trio.current_time(), set(self._host.peers())
            for gone in self._gossip.beat(now):  # hundreds at once, where somebody invented them
                self._tell((gone,))
                await trio.lowlevel.checkpoint()
            # whoever asked us once, and is neither member nor connected any more, is not kept in mind
            kept = connected | self._table.among(self.heard_directly)
            self.heard_directly = {peer: when for peer, when in self.heard_directly.items() if peer in kept}
            for peer in self._gossip.targets(now, connected):
                self._start(peer, ())
            await trio.sleep(self._gossip.pause())

    def _start(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if self._nursery is not None and peer not in self._under_way and len(self._under_way) < _AT_ONCE:
            self._nursery.start_soon(self._contact_quietly, peer, addresses)

    async def _contact_quietly(self, peer: PeerId, addresses: Sequence[str]) -> None:
        if peer not in self._under_way and self._table.ban(peer) is None:
            try:
                await self.contact(peer, addresses)
            except errors.RemoteError as error:
                self._table.suspect(peer, trio.current_time())
                self.trouble(error)

    async def contact(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Swap views with `peer`, dialling `addresses` or those it announced. Raises RemoteError.

        Each side then knows by what right the other is a member.
        """
        if (ban := self._table.ban(peer)) is not None:
            raise ban
        self._under_way.add(peer)
        try:
            stream = await self._host.open_stream(peer, GOSSIP, (*addresses, *self._table.addresses(peer)))
            question = self._gossip.question(trio.current_time())
            body = await ask(stream, pb.Body(gossip=question), self._terms, "gossip")
            await self._learn(peer, body.gossip)
        except errors.RemoteError as error:
            if (conduct := conduct_of(error)) is not None:
                self.judge(peer, conduct)
            raise
        finally:
            self._under_way.discard(peer)
        if (objection := self._table.objection(peer)) is not None:
            raise errors.AdmissionError(objection.cause)
        self._met(peer)

    def heard_at(self, peer: PeerId) -> float:
        """When we last had an answer or a question of `peer`; 0 for never."""
        return self.heard_directly.get(peer, 0.0)

    def knows(self, peer: PeerId) -> bool:
        """Whether `peer` is a member, or was heard of lately where there are more than we hold."""
        return self._table.known(peer, trio.current_time())

    async def handle(self, stream: Stream) -> None:
        """Answer a GOSSIP stream."""

        async def reply(body: pb.Body) -> pb.Body:
            if (ban := self._table.ban(stream.remote)) is not None:
                raise ban  # before a word of it is taken in
            before = self._table.said(stream.remote)
            await self._learn(stream.remote, body.gossip)
            gossip = self._gossip.answer(stream.remote, body.gossip, before, trio.current_time())
            if (objection := self._table.objection(stream.remote)) is not None:
                raise objection
            return pb.Body(gossip=gossip)

        if (refused := await answer(stream, self._terms, "gossip", reply)) is not None:
            if not isinstance(refused, _THEIRS):
                self.trouble(refused)
            return
        self._met(stream.remote)

    def _met(self, peer: PeerId) -> None:
        self.heard_directly[peer] = trio.current_time()
        self._table.met(peer, *self._host.way(peer))

    async def _learn(self, source: PeerId, message: pb.Gossip) -> None:
        """Take in what `source` told. One message after another, and others have their turn between any two heartbeats."""
        heard = Heard()
        try:
            async with self._learning:
                for _ in self._gossip.learning(heard, source, message, trio.current_time()):
                    await trio.lowlevel.checkpoint()
        finally:
            self._take(source, heard)

    def _take(self, source: PeerId, heard: Heard) -> None:
        self._host.faults += heard.faults
        self._mind_clone()
        if heard.faults:
            self.judge(source, Conduct.FALSE_NEWS)
        if heard.healed is not None:
            self._emit(heard.healed)
        for peer in heard.contact:
            self._start(peer, ())
        self._tell(heard.changes)

    def _mind_clone(self) -> None:
        """Of two nodes with one identity the one that began later stops; the other goes on, and says so."""
        own_heartbeat = self._own_heartbeat
        if own_heartbeat.clone in (0, self._warned_of):
            return
        self._warned_of = own_heartbeat.clone
        if own_heartbeat.clone < own_heartbeat.life:
            self.cloned.set()
        else:
            cause = "another node began to speak with this node's key; it should stop by itself."
            self._emit(Troubled(errors.ClonedIdentityError.entry.code, cause))

    def _tell(self, changes: Iterable[PeerSeen | PeerLost]) -> None:
        for change in changes:
            if isinstance(change, PeerLost):
                self.heard_directly.pop(change.peer_id, None)
            self._emit(change)

    def trouble(self, error: errors.RemoteError) -> None:
        """Show the faults that a user can act on; the others are the network's daily life."""
        if isinstance(error, (errors.OtherRunError, errors.PeerVersionError, *_THEIRS)):
            self._emit(Troubled(error.code, error.cause))

    async def leave(self, seconds: float) -> None:
        """Tell a few members, best effort, that we go."""
        now = trio.current_time()
        self._own_heartbeat.leaving = True
        self._tell(self._gossip.beat(now))
        self._under_way.clear()  # what is on its way does not say so
        told = [member.peer_id for member in self._table.live(now) if member.peer_id in self._host.peers()]
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for peer in told[:_AT_ONCE]:
                    nursery.start_soon(self._contact_quietly, peer, ())
