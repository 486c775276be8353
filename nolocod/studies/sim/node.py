"""One simulated node: the product's outer loop, exchanges and membership around a modelled replica.

The rule: this is the wiring of the daemon (p2p.mesh, node.daemon, node.peers) with nothing decided in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import trio

from nolocod.errors import PeerTooSlowError, PeerUnavailableError
from nolocod.outer.loop import LoopSettings, OuterLoop
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.membership.peer_scoring import Reputation
from nolocod.p2p.membership.peer_selection import PeerSelection
from nolocod.p2p.membership.run_clock import believed_round, pace_in
from nolocod.p2p.nat.classify import needs_relay
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.studies.sim.clock import sleep
from nolocod.studies.sim.member import SimMember
from nolocod.studies.sim.replica import STEP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nolocod.identity import PeerId
    from nolocod.p2p.membership.peer_scoring import Conduct
    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.receipt import Receipt
    from nolocod.proto.types import Answer, Ended, LocalSide, Member, Offer, Standing
    from nolocod.studies.sim.member import World
    from nolocod.studies.sim.network import Port
    from nolocod.studies.sim.replica import SimReplica, State

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimReceipts:
    """p2p.exchange.receipts.ReceiptStore in memory."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Receipt] = {}
        self.votes: dict[bytes, Receipt] = {}

    def add(self, receipt: Receipt) -> None:
        self.kept[receipt.session] = receipt
        self.settle(receipt.session)

    def find(self, session: bytes) -> Receipt | None:
        return self.kept.get(session)

    def vote(self, vote: Receipt) -> None:
        self.votes[vote.session] = vote

    def settle(self, session: bytes) -> None:
        self.votes.pop(session, None)

    def doubts(self) -> list[Receipt]:
        return [*self.votes.values()]


class SimNode(SimMember):
    """Number `number` of `world`, that trains until its round is `goal`."""

    def __init__(
        self, world: World, number: int, port: Port, replica: SimReplica, goal: int,
        *, life: int = 0, receipts: SimReceipts | None = None,
    ) -> None:  # fmt: skip
        self.replica = replica  # first of all: what a member says of itself comes from it
        super().__init__(world, number, port, life)
        scenario, plan = world.scenario, world.plan
        self.receipts = receipts or SimReceipts()
        self.reputation = Reputation(self.emit, plan.probation, plan.judging)
        self.table.committed = self.reputation.committed
        self.table.ban = lambda peer: self.reputation.objection(peer, self.wall())
        facts = self.table.size, lambda: self.table.answers, lambda: self.reputation.shunned(self.wall())
        self.selection = PeerSelection(self.peer_id, self._rng, self.reputation, *facts)
        self._session = ""
        context = Context(
            self.identity, world.run_id, replica.codec, replica.outbox.size, world.limits,
            fragments=scenario.outer.turns, staleness=scenario.staleness, rng=self._rng, aside=self.aside, clock=self.wall,
        )  # fmt: skip
        outer = scenario.outer
        settings = LoopSettings(outer.inner_steps, scenario.staleness, scenario.patience, goal, STEP_TOKENS, outer.turns)
        self.loop = OuterLoop(self.peer_id, replica, self, settings, self.emit, self.reputation.probation)
        self.exchange_service = ExchangeService(context, self.dial, self, self.receipts, self.judge, self.emit)  # type: ignore[arg-type] # see SimReceipts
        port.handlers[EXCHANGE] = self._handle
        replica.applied = self._applied

    @property
    def standing(self) -> Standing:
        return self.replica.standing

    async def aside(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """wire.Aside without a thread: the virtual clock does not wait for one."""
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    async def _handle(self, stream: Stream) -> None:
        """As the daemon's host, that has no stream of a banned peer."""
        if self.table.objection(stream.remote):
            await stream.reset()
        else:
            await self.exchange_service.handle(stream)

    @property
    def idle(self) -> bool:
        """Whether it is in no exchange."""
        return self.loop._local_side is None

    async def take_part(self) -> None:
        """Take outer steps until the goal is reached; gossip goes on then, as a finished node's does."""
        if self._nursery is not None:
            self._nursery.start_soon(self.exchange_service.doubts.run)
        await sleep(self._rng.uniform(0.0, self.gossip.pause()))
        await self.loop.run()
        self.state = "finished"
        self.world.finished(self)

    def members(self) -> list[Member]:
        return self.table.live(trio.current_time())

    # --- outer.sides.Mesh ------------------------------------------------------------------------------------

    def partner(self, own: Standing, avoid: Collection[PeerId], apart: Collection[PeerId]) -> PeerId | None:
        now, members = trio.current_time(), self.members()
        shunned = {*avoid, *self.table.suspected(now)}
        carried = {member.peer_id for member in members if needs_relay(member, self.port.nat, ())}
        return self.selection.draw(members, own, self.world.scenario.staleness, shunned, carried, apart)

    def admits(self, peer: PeerId, own: Standing, apart: Collection[PeerId], *, late: bool) -> bool:
        known, staleness = self.table.known(peer, trio.current_time()), self.world.scenario.staleness
        return known and self.selection.admits(peer, self.members(), own, staleness, apart, late=late)

    def met(self, peer: PeerId, *, offered: bool) -> None:
        self.selection.met(peer, self.members(), offered=offered)

    def believed(self, peer: PeerId, told: int, phase: float) -> int:
        return believed_round(self.members(), phase, peer, told)

    def pace(self, number: int, phase: float) -> tuple[float, int]:
        self.told_phase = phase
        return pace_in(self.table, trio.current_time(), number, phase)

    async def offer(self, partner: PeerId, standing: Standing, subject: int, local_side: LocalSide) -> Ended:
        ended = await self.exchange_service.offer(partner, standing, subject, local_side)
        self._note(ended)
        return ended

    def judge(self, peer: PeerId, conduct: Conduct) -> None:
        self.reputation.judge(peer, conduct, self.wall())

    async def dial(self, peer: PeerId, protocol: str) -> Stream:
        try:
            stream = await self.world.network.dial(self.port)(peer, protocol)
        except (PeerUnavailableError, PeerTooSlowError):
            self.suspect(peer)
            raise
        self.meet(self.world.by_peer[peer])
        return stream

    # --- types.Answerer: rounds answers, and the oracle hears of every snapshot and step -----------------

    def decide(self, offer: Offer) -> Answer:
        return self.loop.decide(offer)

    @property
    def local_side(self) -> LocalSide:
        return self.loop.local_side

    async def ended(self, ended: Ended) -> None:
        self._note(ended)
        await self.loop.ended(ended)

    def _note(self, ended: Ended) -> None:
        """Before anything is applied, or dropped."""
        if ended.outcome in ("committed", "in_doubt") and self.replica.captured is not None:
            self._session = ended.session.hex()
            self.world.oracle.snapshot(self._session, self.peer_id, self.replica.captured)

    def _applied(self, before: State, after: State, paired: bool) -> None:
        if not self.port.up:
            return  # killed: what is still cancelled here never happened
        if paired:
            self.world.oracle.paired(self._session, self.peer_id, before, after, self.replica.span)
        else:
            self.world.oracle.solo(self.peer_id, before, after, self.replica.span)
