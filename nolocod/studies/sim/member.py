"""A simulated node as a member of its swarm: the product's membership table and gossip; and what all nodes share.

A swap of views is the product's question and answer carried over in one piece, without a stream: a thousand nodes swap all
the time.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import blake3
import trio

from nolocod.observe.events import StateChanged
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import OwnHeartbeat, new_life
from nolocod.p2p.membership.table import Membership
from nolocod.proto.limits import Limits
from nolocod.proto.types import Standing
from nolocod.studies.sim.clock import sleep
from nolocod.studies.sim.network import Network
from nolocod.studies.sim.oracle import Oracle
from nolocod.studies.sim.signing import REAL_UP_TO, Signing

if TYPE_CHECKING:
    from nolocod.identity import PeerId
    from nolocod.observe.events import Event
    from nolocod.p2p.membership.gossip import Heard
    from nolocod.studies.sim.network import Port
    from nolocod.studies.sim.scenarios import Plan, Scenario

WALL = 1_700_000_000.0
"""The time of day at which every simulation begins."""
_CONNECTIONS = 256
"""Peers that a node stays connected to, as p2p.host's limit."""
_PER_MESSAGE = 475
"""Bytes that a message costs beside its content: signature, names, negotiation, yamux, noise; 445 to 500 on real sockets."""


class World:
    """What the nodes of one simulation share. `nursery`: all that happens in it."""

    def __init__(self, plan: Plan, scenario: Scenario, nursery: trio.Nursery) -> None:
        self.plan = plan
        self.scenario = scenario
        self.nursery = nursery
        self.limits = Limits()
        self.run_id = blake3.blake3(f"simulated run {plan.seed}".encode()).hexdigest()
        self.signing = Signing(plan.seed, cheap=plan.nodes > REAL_UP_TO if plan.cheap is None else plan.cheap)
        self.rng = random.Random(f"{plan.seed} swarm")
        self.network = Network(scenario.line, random.Random(f"{plan.seed} network"))
        self.oracle = Oracle(scenario.outer)
        self.by_peer: dict[PeerId, SimMember] = {}

    def told(self, member: SimMember, event: Event) -> None:
        """Every event of every node."""

    def finished(self, member: SimMember) -> None:
        """`member` reached the goal."""


class SimMember:
    """Number `number` of `world`, with its place in the network. `life`: how often it was started again."""

    def __init__(self, world: World, number: int, port: Port, life: int = 0) -> None:
        self.world = world
        self.number = number
        self.port = port
        self.identity = world.signing.identity(number)
        self.peer_id: PeerId = self.identity.peer_id
        self.state = "training"
        self.told_phase = 0.0
        """What it says that a phase takes it, in seconds."""
        self.clock_ahead = 0.0
        """Seconds by which its time of day is wrong."""
        self.connected: dict[PeerId, None] = {}
        self.table = Membership(self.peer_id, world.run_id, world.scenario.timing)
        self.host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        """Where it is reached: in a private network, so each is an address group of its own."""
        self._rng = random.Random(f"{world.plan.seed} node {number}" + (f" life {life}" if life else ""))
        own_heartbeat = OwnHeartbeat(
            self.identity, world.run_id, lambda: (self.standing, self.state), lambda: (f"/ip4/{self.host}/tcp/4001",),
            self.wall, reach=lambda: port.nat, life=new_life(self.wall(), self._rng), phase=lambda: self.told_phase,
        )  # fmt: skip
        self.gossip = Gossip(self.table, own_heartbeat, self._rng)
        self._nursery: trio.Nursery | None = None  # all that runs for this node
        world.by_peer[self.peer_id] = self

    @property
    def standing(self) -> Standing:
        return Standing(0, 0, 0.0)

    def wall(self) -> float:
        return WALL + trio.current_time() + self.clock_ahead

    def emit(self, event: Event) -> None:
        """As the daemon's: told to the log and to the oracle."""
        if self.port.up and not isinstance(event, StateChanged):
            self.world.told(self, event)

    async def run(self, known: PeerId | None = None) -> None:
        """Join through `known`, and gossip until it is killed, whatever else it does."""
        async with trio.open_nursery() as self._nursery:
            self.port.spawn = self._nursery.start_soon
            if known is not None:
                await self.swap(known)
            self._nursery.start_soon(self._gossip_on)
            await self.take_part()

    async def take_part(self) -> None:
        """What it does besides gossip."""

    def kill(self) -> None:
        """End without a word; its connections end with it."""
        self.world.network.kill(self.port)
        for peer in self.connected:
            self.world.by_peer[peer].connected.pop(self.peer_id, None)
        self.world.oracle.killed(self.peer_id)
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def _gossip_on(self) -> None:
        while True:
            now = trio.current_time()
            for change in self.gossip.beat(now):
                self.emit(change)
            for peer in self.gossip.targets(now, [*self.connected]):
                await self.swap(peer)
            await sleep(self.gossip.pause())

    async def swap(self, peer: PeerId) -> bool:
        """Swap views with `peer`; whether it could be reached."""
        network, now = self.world.network, trio.current_time
        other = self.world.by_peer.get(peer)
        if other is None:  # somebody invented it
            await sleep(network.delay(1000, relayed=False))
            self.suspect(peer)
            return False
        if self.table.objection(peer) or other.table.objection(self.peer_id):
            await trio.lowlevel.checkpoint()
            return False
        way = network.delay(1000, relayed=network.relayed(self.port, other.port))
        await sleep(max(way, self.port.frozen_until - now()))
        if not network.joined(self.port, other.port) or other.port.frozen_until > now():
            self.connected.pop(peer, None)
            self.suspect(peer)
            return False
        question = self.gossip.question(now())
        answer, heard = other.gossip.reply(self.peer_id, question, now())
        self.port.sent += question.ByteSize() + _PER_MESSAGE
        other.port.sent += answer.ByteSize() + _PER_MESSAGE
        self._take(self.gossip.learn(peer, answer, now()))
        other._take(heard)
        self.meet(other)
        for one, two in ((self, peer), (other, self.peer_id)):
            one.connected[two] = None
            if len(one.connected) > _CONNECTIONS:
                oldest = next(iter(one.connected))
                del one.connected[oldest]
                self.world.by_peer[oldest].connected.pop(one.peer_id, None)
        return True

    def _take(self, heard: Heard) -> None:
        for change in heard.changes:
            self.emit(change)
        if heard.healed is not None:
            self.emit(heard.healed)
        for peer in heard.contact:
            if self._nursery is not None:
                self._nursery.start_soon(self.swap, peer)

    def meet(self, other: SimMember) -> None:
        """We reached `other`: the membership of both hears how, as connections tell it on a real host."""
        relayed = self.world.network.relayed(self.port, other.port)
        self.table.met(other.peer_id, "relayed" if relayed else "direct", "" if relayed else other.host)
        other.table.met(self.peer_id, "relayed" if relayed else "inbound", "" if relayed else self.host)

    def suspect(self, peer: PeerId) -> None:
        self.table.suspect(peer, trio.current_time())
