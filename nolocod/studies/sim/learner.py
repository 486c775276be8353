"""Simulated nodes that learn: replicas that are the product's own, of some ten thousand weights, on real text; their attackers.

The rule: only time, the network and attackers are made up. Inner steps are taken when the clock has come past them, all at
once; what is captured, inspected, applied and merged late is trainer/replica.py's. Their states are closed to the oracle, which
then says who applied what, and no more. What would end a node's process ends that node alone.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import torch
import trio

from nolocod.errors import LocalError, PeerUnavailableError, TrainerError
from nolocod.identity import Identity
from nolocod.observe.events import OuterStep
from nolocod.outer import step
from nolocod.outer.codec.base import HEADER
from nolocod.p2p.membership.run_clock import median_round
from nolocod.proto.limits import SLOWEST_STEP
from nolocod.proto.types import describe
from nolocod.run.manifest import seal, wire_name
from nolocod.studies.sim import clock
from nolocod.studies.sim.attackers import Attacker
from nolocod.studies.sim.replica import MemoryBox, SimReplica, State
from nolocod.studies.sim.swarm import Swarm
from nolocod.trainer.replica import open_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from nolocod.observe.events import Event
    from nolocod.proto.types import Applied, Description, Inspection, Standing
    from nolocod.run.manifest import Manifest
    from nolocod.studies.sim.member import SimMember
    from nolocod.studies.sim.network import Port
    from nolocod.studies.sim.node import SimNode
    from nolocod.studies.sim.replica import OuterSettings
    from nolocod.trainer.replica import Replica

ATTACKS = ("not finite", "huge", "sign flip", "noise", "drift", "stale", "clock", "stall")
"""What each is: docs/attacks.md."""
_RADIUS = 1.5
"""Of the usual distance: what attackers take for the clip radius, so that attacks on runs without one are the same."""
_LOOK = 5.0
"""As node.training_session: seconds between two looks at how far the others are."""
STARVED, LONELY = 0.9, 0.25
"""Fewer outer steps than this share of the inner phases that it, or the median machine if that is slower, has in its time, and
a smaller share with honest partners: starved."""


class Learner(SimReplica):
    """outer.sides.Trainer around the replica `own`."""

    def __init__(self, outer: OuterSettings, speed: float, own: Replica) -> None:
        super().__init__(outer, speed, random.Random(0), size=0)
        self.own = own
        self.codec = wire_name(own.manifest.codec)
        self.outbox, self.inbox = MemoryBox(own.plan.box_size), MemoryBox(own.plan.box_size)
        self.round = own.standing.round
        self.broke: Callable[[], None] = lambda: None
        """Told that training broke: the node ends before anybody hears how its exchange ended."""

    @property
    def standing(self) -> Standing:
        return replace(self.own.standing, step_seconds=self.step_seconds)

    async def enlarge(self, times: int) -> None:
        await super().enlarge(times)
        self.own.times = times

    def _advance(self, steps: int) -> None:
        for _ in range(steps):
            self.own.step()
        try:
            self.own.report()
        except LocalError:
            self.broke()
            raise

    def _write(self, state: State) -> Description:
        return self.own.prepare(_tensor(self.outbox), self._subject)

    def _look(self, state: State, *, probation: bool) -> Inspection:
        return self.own.inspect(_tensor(self.inbox), probation=probation)

    def _pair(self, before: State, run_round: int, skipped: bytes) -> Applied:
        return self.own.apply(_tensor(self.inbox), run_round, skipped)

    def _alone(self, before: State, run_round: int) -> Applied:
        return self.own.solo(run_round, self._subject)

    async def discard(self) -> None:
        if self.captured is not None:  # training went on with it
            self._train()
        await super().discard()

    def _forget(self) -> None:
        super()._forget()
        self.own.discard()


def _tensor(box: MemoryBox) -> Tensor:
    return torch.frombuffer(box.content, dtype=torch.uint8)


class Forger(Attacker):
    """An attacker whose messages do harm, one tactic of its swarm's after another, or that gives none."""

    world: LearningSwarm
    tactic = ""

    def engage(self, victim: SimNode, number: int) -> Standing:
        self.tactic = next(self.world.tactics)
        standing = super().engage(victim, number + (self.world.scenario.staleness if self.tactic == "clock" else 0))
        return replace(standing, step_seconds=SLOWEST_STEP) if self.tactic == "stall" else standing

    async def capture(self, subject: int) -> Description:
        victim = self.victim
        assert victim is not None  # it is engaged
        await self._stall()
        while victim.replica.captured is None:
            await clock.sleep(victim.replica.step_seconds / 8)
        free = [node for node in self._victims if node.idle and node.state == "training"]
        try:
            return self.world.forge(self.tactic, subject, victim, self._rng.choice(free or [victim]), self.outbox)
        except TrainerError as error:
            raise PeerUnavailableError("the victim's weights are not finite any more.") from error

    async def inspect(self) -> bytes:
        if await self._stall():
            raise PeerUnavailableError("it is called off.")
        return await super().inspect()

    async def _stall(self) -> bool:
        """Nearly as long as any part of this exchange may take."""
        stalls, victim, size = self.tactic == "stall", self.victim, self.outbox.size
        assert victim is not None  # it is engaged
        side = victim.loop.local_side
        steps = victim.replica.step_seconds, SLOWEST_STEP
        limits = self.world.limits.paced(side.phase, size, steps, side.credit, wary=side.wary)
        await clock.sleep(0.9 * (limits.snapshot_seconds + limits.accept_seconds) if stalls else 0.0)
        return stalls


class LearningSwarm(Swarm):
    """All replicas go on from the weights of one that took `head_start` outer steps alone."""

    attackers = Forger

    def __init__(self, manifest: Manifest, head_start: int, attacks: Sequence[str], cache: Path, *given: Any) -> None:  # noqa: ANN401 - a Swarm's
        super().__init__(*given)
        torch.set_num_threads(1)  # more would add up in another order
        self._sealed, self._cache = seal(manifest, Identity.from_secret(bytes(32))), cache
        self._first = open_replica(self._sealed, "first", None, cache)
        for _ in range(head_start * manifest.outer.turns):
            for _ in range(self._sealed.manifest.inner.steps):
                self._first.step()
            self._first.solo()
        self._beginning = self._first.phi.clone()
        self._generator = torch.Generator().manual_seed(manifest.seed)
        self._drift = self._direction(self._beginning.numel())
        self.tactics = cycle(attacks)
        self.ended = 0
        """Nodes that broke down."""
        self.behind: set[int] = set()
        """Nodes that were so far behind the others, by what they knew, that they would have fetched weights."""
        self.replicas: dict[int, Replica] = {}
        self.taken: defaultdict[int, list[tuple[float, bool]]] = defaultdict(list)
        """The outer steps of each node, each turn of several at once for itself: when, and whether with an honest partner."""

    def place(self, number: int) -> tuple[Port, SimReplica]:
        port, replica = super().place(number)
        own = first = self._first
        if number < self.plan.nodes - round(self.scenario.hostile * self.plan.nodes):
            own = self.replicas[number] = open_replica(self._sealed, f"replica {number}", None, self._cache)
            own.draw_as(f"replica {number}")
            own.theta.copy_(first.theta)
            own.phi.copy_(first.phi)
            own.inner.restore({name: one.clone() for name, one in first.inner.moments().items()}, first.inner.optimizer_steps)
            own.standing = first.standing
        return port, Learner(self.scenario.outer, replica.speed, own)

    def add(self, donor: SimNode | None = None) -> SimNode:
        node = super().add(donor)
        cast("Learner", node.replica).broke = lambda: self.kill(node)
        return node

    async def _live(self, node: SimNode) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look, node)
                await super()._live(node)
        except* LocalError:
            self.ended += 1
            self.kill(node)

    async def _look(self, node: SimNode) -> None:
        while node.state == "training":
            await clock.sleep(_LOOK)
            if median_round(node.members()) - node.replica.round > self.scenario.staleness:
                self.behind.add(node.number)

    def told(self, member: SimMember, event: Event) -> None:
        super().told(member, event)
        if isinstance(event, OuterStep):
            hostile = self.attack.peers if self.attack else ()
            taken = trio.current_time(), event.partner not in (None, *hostile)
            self.taken[member.number] += [taken] * len(cast("SimNode", member).replica.among)

    def starved(self) -> list[int]:
        """Nodes that had too few outer steps, or too few with honest partners."""
        found = []
        median = statistics.median(node.replica.speed for node in self.nodes)
        for node in self.nodes:
            steps, phase = self.taken[node.number], self.scenario.outer.inner_steps * max(median, node.replica.speed)
            due = steps[-1][0] / phase if steps else math.inf
            if len(steps) < STARVED * due or sum(honest for _, honest in steps) < LONELY * len(steps):
                found.append(node.number)
        return found

    def losses(self) -> list[float]:
        """Held out, of each; nothing if a node ended."""
        return [] if self.ended else [self.replicas[node.number].evaluate() for node in self.nodes]

    def forge(self, attack: str, subject: int, victim: SimNode, other: SimNode, box: MemoryBox) -> Description:
        """Fill the `box` of one who knows all replicas, and sees the victim's capture before it writes. `other`: an honest node
        that is in no exchange, or the victim."""
        own, settings = self._first, self._first.manifest.outer
        seen, honest = self.replicas[victim.number], self.replicas[other.number]
        if other is not victim:
            other.replica._train()  # as far as the clock has come
        span, change = seen.captured
        theirs = step.message_of_change(change, seen.phi[span], settings, None)
        radius, phi = _RADIUS * seen.usual_distance(), honest.phi[span]
        match attack:
            case "huge":
                wanted = theirs + 1e6 * radius * self._direction(theirs.numel())
            case "sign flip":
                wanted = settings.gamma * phi - settings.beta * (honest.theta[span] - phi)
            case "noise":
                wanted = theirs + 3 * radius * self._direction(theirs.numel())
            case "drift":
                wanted = theirs + radius * self._drift[span] / self._drift[span].norm()
            case "stale":
                wanted = settings.gamma * self._beginning[span]
            case _:
                wanted = step.message(phi, honest.theta[span], settings)
        own.phi.copy_(seen.phi)
        own.theta[span] = (wanted - settings.gamma * own.phi[span]) / settings.beta + own.phi[span]
        description = own.prepare(_tensor(box), subject)
        if attack == "not finite":
            _tensor(box)[HEADER:].fill_(255)
            with memoryview(box.content) as content:
                return describe(content[: description.size])
        return description

    def _direction(self, size: int) -> Tensor:
        drawn = torch.randn(size, generator=self._generator)
        return drawn.div_(drawn.norm())
