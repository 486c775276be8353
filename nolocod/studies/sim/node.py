"""One simulated node: the product's outer loop, exchanges and membership around a modelled replica.

The rule: this is the wiring of the daemon (mesh.py, daemon.py, training_session.py) with nothing decided in it. A swap of views
is the product's question and answer carried over in one piece, without a stream: a thousand nodes swap all the time.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import trio

from nolocod.errors import DataDirError, DiskFullError, LocalError, PeerTooSlowError, PeerUnavailableError
from nolocod.observe.events import StateChanged, Troubled
from nolocod.outer.loop import Pace, Rounds
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.membership.gossip import Gossip, OwnHeartbeat, new_life
from nolocod.p2p.membership.peer_scoring import Reputation
from nolocod.p2p.membership.peer_selection import choose
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.nat.classify import needs_relay
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto.types import Busy, Ended
from nolocod.studies.sim.clock import at_once, past, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event
    from nolocod.p2p.membership.gossip import Heard
    from nolocod.p2p.membership.peer_scoring import Conduct
    from nolocod.p2p.transport.stream import Handler, Stream
    from nolocod.proto.receipt import Receipt
    from nolocod.proto.types import Answer, LocalSide, Member, Offer, Standing, Subject
    from nolocod.studies.sim.network import Port
    from nolocod.studies.sim.replica import SimReplica, State
    from nolocod.studies.sim.swarm import Swarm

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WALL = 1_700_000_000.0
"""The time of day at which every simulation begins."""
_CONNECTIONS = 64
"""Peers that a node stays connected to."""


class SimReceipts:
    """p2p.receipts.ReceiptStore in memory, whose disk can be full."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Receipt] = {}
        self.full = False

    def add(self, receipt: Receipt) -> None:
        if self.full:
            raise DiskFullError("the simulated disk is full.")
        self.kept[receipt.session] = receipt

    def find(self, session: bytes) -> Receipt | None:
        return self.kept.get(session)


class SimNode:
    """Number `number` of `swarm`."""

    def __init__(self, swarm: Swarm, number: int, port: Port, replica: SimReplica, goal: int, *, life: int = 0) -> None:
        """`life`: how often it was started again."""
        settings, plan = swarm.settings, swarm.plan
        self.number = number
        self.port = port
        self.identity = swarm.signing.identity(number)
        self.peer_id: PeerId = self.identity.peer_id
        self.replica = replica
        self.receipts = SimReceipts()
        self.reputation = Reputation(self.emit, plan.probation)
        self.state = "training"
        self.clock_ahead = 0.0
        """Seconds by which this node's time of day is wrong."""
        self.script: dict[int, tuple[PeerId, bool]] | None = None
        """For each round the partner, and whether this node offers, where that is written already (schedule.py)."""
        self._swarm = swarm
        self._rng = random.Random(f"{swarm.plan.seed} node {number}" + (f" life {life}" if life else ""))
        self._connected: dict[PeerId, None] = {}
        self._session = ""
        self._nursery: trio.Nursery | None = None  # all that runs for this node
        self._table = Membership(self.peer_id, swarm.run_id, settings.timing)
        own_heartbeat = OwnHeartbeat(
            self.identity,
            swarm.run_id,
            lambda: (replica.standing, self.state),
            lambda: (f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001",),
            self.wall,
            reach=lambda: port.nat,
            life=new_life(self.wall(), self._rng),
        )
        self._gossip = Gossip(self._table, own_heartbeat, self._rng)
        context = Context(
            self.identity, swarm.run_id, replica.codec, replica.outbox.size, swarm.limits,
            staleness=settings.staleness, rng=self._rng, aside=self.aside,
        )  # fmt: skip
        pace = Pace(settings.course.inner_steps, settings.staleness, settings.patience, goal)
        self.rounds = Rounds(self.peer_id, replica, self, pace, self.emit, self.reputation.probation)
        self.exchange_service = ExchangeService(context, self.dial, self, self.receipts, self.judge, self.emit)  # type: ignore[arg-type] # see SimReceipts
        port.handlers[EXCHANGE] = self.outliving(self.exchange_service.handle)
        replica.applied = self._applied

    def follow_script(self, script: dict[int, tuple[PeerId, bool]]) -> None:
        """Exchange with those and nobody else: at a boundary at which the partner offers, wait for it."""
        self.script = script
        self.replica.waits = lambda: not script.get(self.replica.round, (None, True))[1]

    async def aside(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """wire.Aside, to which a stopped process does not get."""
        await past(self.port.frozen_until)
        return await at_once(work, *arguments)

    def outliving(self, handle: Handler) -> Handler:
        """As daemon.Node: a failure of our own is told, and costs the stream."""

        async def guarded(stream: Stream) -> None:
            try:
                await handle(stream)
            except LocalError as error:
                self.emit(Troubled(error.code, error.cause))
                await stream.reset()

        return guarded

    def wall(self) -> float:
        return WALL + trio.current_time() + self.clock_ahead

    def emit(self, event: Event) -> None:
        """As the daemon's: told to the log and to the oracle."""
        if self.port.up and not isinstance(event, StateChanged):
            self._swarm.told(self, event)

    @property
    def idle(self) -> bool:
        """Whether it is in no exchange."""
        return self.rounds._local_side is None

    # --- life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Gossip and take outer steps until the goal is reached; gossip goes on then, as a finished node's does."""
        async with trio.open_nursery() as self._nursery:
            self.port.spawn = self._nursery.start_soon
            self._nursery.start_soon(self._gossip_on)
            await sleep(self._rng.uniform(0.0, self._gossip.pause()))
            await self.rounds.run()
            self.state = "finished"
            self._swarm.finished(self)

    def kill(self) -> None:
        """End without a word."""
        self._swarm.network.kill(self.port)
        self._swarm.oracle.killed(self.peer_id)
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    # --- membership -------------------------------------------------------------------------------------

    async def _gossip_on(self) -> None:
        while True:
            now = trio.current_time()
            for change in self._gossip.beat(now):
                self.emit(change)
            for peer in self._gossip.targets(now, [*self._connected]):
                await self.swap(peer)
            await sleep(self._gossip.pause())

    async def swap(self, peer: PeerId) -> bool:
        """Swap views with `peer`; whether it could be reached."""
        swarm, now = self._swarm, trio.current_time
        other = swarm.by_peer[peer]
        way = swarm.network.delay(1000, relayed=swarm.network.relayed(self.port, other.port))
        await sleep(max(way, self.port.frozen_until - now()))
        if not swarm.network.joined(self.port, other.port) or other.port.frozen_until > now():
            self._connected.pop(peer, None)
            self._table.suspect(peer, now())
            return False
        answer, heard = other._gossip.reply(self.peer_id, self._gossip.question(now()), now())
        self._take(self._gossip.learn(peer, answer, now()))
        other._take(heard)
        self._table.trust(peer)
        for one, two in ((self, peer), (other, self.peer_id)):
            one._connected[two] = None
            while len(one._connected) > _CONNECTIONS:
                del one._connected[next(iter(one._connected))]
        return True

    def _take(self, heard: Heard) -> None:
        for change in heard.changes:
            self.emit(change)
        if heard.healed is not None:
            self.emit(heard.healed)
        for peer in heard.contact:
            if self._nursery is not None:
                self._nursery.start_soon(self.swap, peer)

    def members(self) -> list[Member]:
        return self._table.live(trio.current_time())

    # --- rounds.Mesh ------------------------------------------------------------------------------------

    def partner(self, own: Standing, avoid: Collection[PeerId]) -> PeerId | None:
        if self.script is not None:
            peer, offers = self.script.get(own.round, (None, False))
            return peer if offers and peer not in avoid else None
        now, members = trio.current_time(), self.members()
        shunned = {*avoid, *self._table.suspected(now), *self.reputation.shunned(self.wall())}
        carried = {member.peer_id for member in members if needs_relay(member, self.port.nat, ())}
        return choose(self._rng, members, own, self._swarm.settings.staleness, shunned, carried)

    async def offer(self, partner: PeerId, standing: Standing, subject: Subject, local_side: LocalSide) -> Ended:
        try:
            ended = await self.exchange_service.offer(partner, standing, subject, local_side)
        except (DiskFullError, DataDirError) as error:  # as node.peers.Peers
            self.emit(Troubled(error.code, error.cause))
            ended = Ended("aborted", partner, b"", error=error.code, reason=error.cause)
        self._note(ended)
        return ended

    def suspect(self, peer: PeerId) -> None:
        self._table.suspect(peer, trio.current_time())

    def judge(self, peer: PeerId, conduct: Conduct) -> None:
        self.reputation.judge(peer, conduct, self.wall())

    async def dial(self, peer: PeerId, protocol: str) -> Stream:
        try:
            stream = await self._swarm.network.dial(self.port)(peer, protocol)
        except (PeerUnavailableError, PeerTooSlowError):
            self.suspect(peer)
            raise
        self._table.trust(peer)
        return stream

    # --- types.Answerer: rounds answers, and the oracle hears of every snapshot and step -----------------

    def decide(self, offer: Offer) -> Answer:
        if self.script is not None and self.script.get(self.replica.round) != (offer.partner, False):
            return Busy(1.0, "another exchange comes first")
        return self.rounds.decide(offer)

    @property
    def local_side(self) -> LocalSide:
        return self.rounds.local_side

    async def ended(self, ended: Ended) -> None:
        self._note(ended)
        await self.rounds.ended(ended)

    def _note(self, ended: Ended) -> None:
        """Before anything is applied, or dropped."""
        if ended.outcome in ("committed", "in_doubt") and self.replica.snapshot_out is not None:
            self._session = ended.session.hex()
            self._swarm.oracle.snapshot(self._session, self.peer_id, self.replica.snapshot_out)

    def _applied(self, before: State, after: State, paired: bool) -> None:
        if not self.port.up:
            return  # killed: what is still cancelled here never happened
        if paired:
            self._swarm.oracle.paired(self._session, self.peer_id, before, after)
        else:
            self._swarm.oracle.solo(self.peer_id, before, after)
