"""A whole simulated swarm: nodes, network, what happens to them, and what came of it.

The rule: `simulate` returns a report, and raises SimulationError if anything did not hold; in either case the same
`Plan` does the same again.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, TypeVar, cast

import trio

from nolocod.observe.events import ExchangeEnded, InnerSteps, OuterStep, PartitionHealed, PeerBanned, PeerLost, PeerSeen
from nolocod.proto.types import CHUNK_SIZE
from nolocod.studies.sim import clock
from nolocod.studies.sim.attackers import Attack, Attacker
from nolocod.studies.sim.journal import Journal
from nolocod.studies.sim.member import World
from nolocod.studies.sim.node import SimNode
from nolocod.studies.sim.replica import STEP_TOKENS, SimReplica

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.events import Event, NatClass
    from nolocod.studies.sim.member import SimMember
    from nolocod.studies.sim.network import Port
    from nolocod.studies.sim.scenarios import Partition, Plan, Scenario

S = TypeVar("S", bound="Swarm")

_NATS: tuple[NatClass, ...] = ("public", "cone", "symmetric")


@dataclass(frozen=True)
class Report:
    """What came of a simulation. Times in virtual seconds, but for `took` and `busy`: of this machine's clock and core."""

    plan: Plan
    digest: str
    events: int
    seconds: float
    paired: int
    solo: int
    hostile: int
    """Of the paired ones, those with an attacker."""
    outcomes: dict[str, int]
    exchange_seconds: float | None
    """Median of the committed ones."""
    checked: int
    half_applied: int
    spread: float
    """Standard deviation of a slow weight over the nodes at the end, root mean square over weights."""
    healed: int
    bans: int
    took: float
    busy: float
    violations: tuple[str, ...] = ()
    broken: int = 0

    @property
    def replay(self) -> str:
        """The command that does it again."""
        plan = self.plan
        extra = f" --probation {plan.probation}" if plan.probation else ""
        return f"nolocod simulate {plan.scenario} --nodes {plan.nodes} --rounds {plan.rounds} --seed {plan.seed}{extra}"


class Swarm(World):
    """Nodes that train; what happens to them is counted."""

    attackers: type[Attacker] = Attacker

    def __init__(self, plan: Plan, scenario: Scenario, nursery: trio.Nursery, journal: Journal) -> None:
        super().__init__(plan, scenario, nursery)
        self.journal = journal
        self.nodes: list[SimNode] = []
        self.attack: Attack | None = None
        """Made once all nodes are there."""
        self.outcomes: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.inner_steps: Counter[int] = Counter()
        """Of each node, those that its outer steps were of; a larger one counts as so many."""
        self.others: Counter[type] = Counter()
        self.durations: list[float] = []
        self.done = trio.Event()
        self._left: set[int] = set()

    def add(self, donor: SimNode | None = None) -> SimNode:
        """A new node, that is not running yet, with the weights of `donor`."""
        number = len(self.nodes)
        port, replica = self.place(number)
        if donor is not None:
            replica.take_over(donor.replica)
        node = SimNode(self, number, port, replica, self.plan.rounds)
        node.loop.follow(InnerSteps(1, STEP_TOKENS, 0.0, 0.0, replica.speed))
        self.nodes.append(node)
        self._left.add(number)
        return node

    def place(self, number: int) -> tuple[Port, SimReplica]:
        """What node `number` is given."""
        scenario = self.scenario
        rng = random.Random(f"{self.plan.seed} replica {number}")
        variance = math.log1p(scenario.unlike**2)
        speed = scenario.outer.step_seconds * self.rng.lognormvariate(-variance / 2, math.sqrt(variance))
        speed /= scenario.faster if number and number <= scenario.fast * self.plan.nodes else 1
        nat = "public" if number == 0 else self.rng.choices(_NATS, scenario.nats)[0]
        port = self.network.add(self.signing.identity(number).peer_id, nat)
        return port, SimReplica(scenario.outer, speed, rng, chunk=min(CHUNK_SIZE, self.limits.chunk_bytes))

    def begin(self, node: SimNode) -> None:
        """Let it join through a node that is there."""
        self.nursery.start_soon(self._live, node)

    async def _live(self, node: SimNode) -> None:
        up = [other for other in self.nodes if other.port.up and other is not node]
        others = [other for other in up if other.number < node.number] or up  # who came after may know nobody but us
        via = others[0] if others and node.number % 2 else self.rng.choice(others) if others else None
        await node.run(via.peer_id if via else None)

    def live(self) -> list[SimNode]:
        return [node for node in self.nodes if node.port.up]

    def kill(self, node: SimNode) -> None:
        node.kill()
        self.finished(node)

    def finished(self, member: SimMember) -> None:
        """`member` reached the goal, or will not."""
        self._left.discard(member.number)
        if not self._left:
            self.done.set()

    async def quiet(self) -> None:
        """Wait until no exchange is under way."""
        while self.oracle.waits or not all(node.idle for node in self.live()):  # noqa: ASYNC110 - asked of hundreds of parts
            await trio.sleep(1.0)

    def told(self, member: SimMember, event: Event) -> None:
        self.journal.note(trio.current_time(), member.number, event)
        match event:
            case PeerSeen() | PeerLost():  # most are
                pass
            case ExchangeEnded():
                self.oracle.follow(member.peer_id, event)
                self.outcomes[event.outcome] += event.initiator
                if event.outcome == "committed" and event.initiator:
                    self.durations.append(event.seconds)
            case OuterStep():
                self.steps[event.kind] += 1
                self.inner_steps[member.number] += event.inner_steps * cast("SimNode", member).replica.times
                self.steps["hostile"] += self.attack is not None and event.partner in self.attack.peers
            case PartitionHealed() | PeerBanned():
                self.others[type(event)] += 1

    # --- what happens to them -----------------------------------------------------------------------------

    @property
    def expected_seconds(self) -> float:
        """About how long the run takes."""
        outer = self.scenario.outer
        return self.plan.rounds * outer.inner_steps * outer.step_seconds

    async def churn(self) -> None:
        count = round(self.scenario.churn * self.plan.nodes)
        for _ in range(count):
            await trio.sleep(self.expected_seconds / (count + 1))
            candidates = [node for node in self.live()[1:] if node.state == "training"]
            if candidates:
                self.kill(self.rng.choice(candidates))
            self.begin(self.add(max(self.live(), key=lambda node: node.replica.round)))

    async def partition(self, partition: Partition) -> None:
        await trio.sleep(partition.begin * self.expected_seconds)
        for node in self.rng.sample(self.nodes, round(partition.share * len(self.nodes))):
            node.port.side = 1
        await trio.sleep((partition.end - partition.begin) * self.expected_seconds)
        for node in self.nodes:
            node.port.side = 0

    def report(self, took: float, busy: float) -> Report:
        kept = [node.replica.state.phi for node in self.live()]
        variances = [statistics.pvariance(weights) for weights in zip(*kept, strict=True)] or [0.0]
        return Report(
            plan=self.plan, digest=self.journal.digest, events=self.journal.lines, seconds=trio.current_time(),
            paired=self.steps["paired"], solo=self.steps["solo"], hostile=self.steps["hostile"],
            outcomes=dict(sorted(self.outcomes.items())),
            exchange_seconds=statistics.median(self.durations) if self.durations else None, checked=self.oracle.checked,
            half_applied=self.oracle.half, spread=math.sqrt(statistics.fmean(variances)),
            healed=self.others[PartitionHealed], bans=self.others[PeerBanned], took=took, busy=busy,
            violations=tuple(self.oracle.violations), broken=self.oracle.broken,
        )  # fmt: skip


def simulate(plan: Plan, scenario: Scenario, log: IO[bytes] | None = None) -> Report:
    """Run `plan`; the report has `violations` if something did not hold."""
    return simulate_in(Swarm, plan, scenario, log)[0]


def simulate_in(
    made: Callable[[Plan, Scenario, trio.Nursery, Journal], S], plan: Plan, scenario: Scenario, log: IO[bytes] | None = None
) -> tuple[Report, S]:
    """The same in a swarm that `made` makes, which is returned too."""
    return clock.run(lambda: _simulated(made, plan, scenario, Journal(log)), plan.seed)


async def _simulated(
    made: Callable[[Plan, Scenario, trio.Nursery, Journal], S], plan: Plan, scenario: Scenario, journal: Journal
) -> tuple[Report, S]:
    began, busy_before = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        swarm = made(plan, scenario, nursery, journal)
        with swarm.signing.checked():
            hostile = round(scenario.hostile * plan.nodes)
            for _ in range(plan.nodes - hostile):
                swarm.add()
            if hostile:
                swarm.attack = Attack(swarm, swarm.nodes, swarm.place, hostile, swarm.attackers)
            for node in swarm.nodes:
                swarm.begin(node)
            if swarm.attack is not None:
                swarm.attack.begin()
            if scenario.churn:
                nursery.start_soon(swarm.churn)
            if scenario.partition is not None:
                nursery.start_soon(swarm.partition, scenario.partition)
            with trio.move_on_after(10 * swarm.expected_seconds + 3600) as scope:
                await swarm.done.wait()
            if scope.cancelled_caught:
                swarm.oracle.blame(f"{len(swarm._left)} nodes never reached round {plan.rounds}")
            with trio.move_on_after(2 * swarm.limits.doubt_seconds):  # for exchanges that the last ones accepted
                await swarm.quiet()
            swarm.oracle.end()
            report = swarm.report(time.perf_counter() - began, time.process_time() - busy_before)
            nursery.cancel_scope.cancel()
    return report, swarm
