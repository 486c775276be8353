"""Hostile members of a simulated swarm: they flood, capture and lie all at once, and act as one.

The rule: what they say goes by the product's own messages, and they know more than real ones could: when a node takes offers,
and of whom. Each tells invented members, false ages and endless phases, and has all figures in its favour; they offer to every
node as soon as half of its inner phase is over, and take every offer, so that who is drawn is their partner.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.peer_selection import FEW, meet, near
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Accept, Answer, Busy, Description, Ended, Offer, Standing
from nolocod.studies.sim.clock import sleep
from nolocod.studies.sim.node import SimNode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from nolocod.observe.events import Event
    from nolocod.studies.sim.member import World
    from nolocod.studies.sim.network import Port
    from nolocod.studies.sim.replica import SimReplica

_INVENTED, _FIRST = 100, 1 << 20
"""Identities that never run, and the number of the first."""


class FalseNews(Gossip):
    """Tells of members that there are not, and that the others were silent for nearly too long."""

    invented: Callable[[], list[bytes]] = list

    def _message(
        self, now: float, without: Collection[bytes], *, answer: bool, first: Sequence[tuple[bytes, float]] = ()
    ) -> pb.Gossip:
        true = super()._message(now, without, answer=answer, first=first)
        false = self._rng.sample(self.invented(), self._timing.view // 2)
        silent = true.heartbeats[1 : self._timing.view + 1 - len(false)]
        ages = [0] * (1 + len(false)) + [int(900 * self._table.lasts(now))] * len(silent)
        return pb.Gossip(heartbeats=[true.heartbeats[0], *false, *silent], ages=ages, answer=answer)


class Attacker(SimNode):
    """One of them; it is LocalSide and Answerer of its own exchanges, and applies nothing."""

    phase, wary, credit = math.inf, False, 1.0

    def __init__(self, world: World, victims: Sequence[SimNode], number: int, port: Port, replica: SimReplica) -> None:
        self._victims = victims  # its first heartbeat tells their round
        super().__init__(world, number, port, replica, 0)
        self.told_phase = 1e6
        self.outbox, self.inbox = replica.outbox, replica.inbox
        self.victim: SimNode | None = None
        """Its partner, while it is in an exchange."""
        self.gossip: FalseNews = FalseNews(self.table, self.gossip._own_heartbeat, self._rng)
        world.oracle.killed(self.peer_id)  # it tells nothing

    def emit(self, event: Event) -> None:
        """Nobody asks what it thinks."""

    @property
    def standing(self) -> Standing:
        return Standing(max((node.replica.round for node in self._victims), default=0), 1 << 40, 1e-3)

    async def take_part(self) -> None:
        """Press its news on one node after another, four times as often as others."""
        while True:
            await sleep(self.gossip.pause() / 4)
            await self.swap(self._rng.choice(self._victims).peer_id)

    def may(self, victim: SimNode) -> bool:
        return self.victim is None and victim.table.objection(self.peer_id) is None

    async def attack(self, victim: SimNode) -> str:
        """Offer to `victim`; returns the outcome."""
        standing = self.engage(victim, victim.replica.round)
        subject = victim.loop._subject(self.peer_id)
        try:
            return (await self.exchange_service.offer(victim.peer_id, standing, subject, self)).outcome
        finally:
            await self.ended()

    def decide(self, offer: Offer) -> Answer:
        victim = next((node for node in self._victims if node.peer_id == offer.partner), None)
        if self.victim is not None or victim is None:
            return Busy(0.1, "in another exchange")
        return Accept(self.engage(victim, offer.standing.round))

    def engage(self, victim: SimNode, number: int) -> Standing:
        """What it says of itself in an exchange with `victim`, whose round is `number`."""
        self.victim = victim
        return replace(self.standing, round=number)

    @property
    def local_side(self) -> Attacker:
        return self

    async def ended(self, _: Ended | None = None) -> None:
        self.victim = None
        await self.replica.discard()

    async def capture(self, subject: int) -> Description:
        return await self.replica.capture(subject)

    async def inspect(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""


class Attack:
    """`count` attackers of `victims`, who are there already; `begin` lets them loose. `place`: what node `number` is given."""

    def __init__(
        self, world: World, victims: Sequence[SimNode], place: Callable[[int], tuple[Port, SimReplica]], count: int,
        kind: type[Attacker] = Attacker,
    ) -> None:  # fmt: skip
        self._world, self._victims = world, victims
        numbers = range(len(victims), len(victims) + count)
        self._attackers = [kind(world, victims, number, *place(number)) for number in numbers]
        self.peers = {attacker.peer_id for attacker in self._attackers}
        self._invented = [self._invent(number) for number in range(_INVENTED)]
        self._news: tuple[float, list[bytes]] = (-math.inf, [])

    def begin(self) -> None:
        for attacker in self._attackers:
            attacker.gossip.invented = self._latest
            self._world.nursery.start_soon(attacker.run, self._victims[0].peer_id)
        for victim in self._victims:
            self._world.nursery.start_soon(self._hunt, victim)

    def _invent(self, number: int) -> OwnHeartbeat:
        first, identity = self._victims[0], self._world.signing.identity(_FIRST + number)
        said = lambda: (Standing(first.replica.round + 1000, 1 << 40, 1e-3), "training")  # noqa: E731 - one of two arguments
        return OwnHeartbeat(identity, self._world.run_id, said, lambda: (f"/ip4/10.255.0.{number}/tcp/1",), first.wall)

    def _latest(self) -> list[bytes]:
        """Heartbeats of the invented, new ones every beat."""
        if trio.current_time() - self._news[0] >= self._world.scenario.timing.heartbeat:
            self._news = trio.current_time(), [one.heartbeat() for one in self._invented]
        return self._news[1]

    async def _hunt(self, victim: SimNode) -> None:
        """Offer at the half phase of `victim`, one after the other whose hour it is, and again until its step is taken."""
        own, hunters = victim.peer_id, self._world.rng.sample(self._attackers, len(self._attackers))
        while True:
            replica, number = victim.replica, victim.replica.round
            missing = replica.outer.inner_steps / 2 - replica.steps_since_outer
            if missing <= 0 and victim.idle:
                members = victim.members()
                _, count = victim.selection.count(members, near(members, victim.standing, self._world.scenario.staleness))
                may = [one for one in hunters if one.may(victim) and (count <= FEW or meet(one.peer_id, own, number, count))]
                if may:
                    hunters.remove(may[0])
                    hunters.append(may[0])
                    if await may[0].attack(victim) == "committed":
                        continue
            await sleep(replica.step_seconds * (missing if missing > 0 else replica.outer.inner_steps / 10))
