"""`python -m tests.soak.week`: a week of a swarm in the simulator, in some minutes: does what its nodes remember grow?

The rule: the nodes' real decisions on a virtual clock, as in `nolocod simulate`, with phases of two minutes. Members end
without a word and others come, computers are as if asleep to others, lines are gone for hours, clocks are wrong by up to a
day. Counted are tasks, and the objects that the parts of a node hold; growth is that from the fourth day to the last. It is
an error if either grew by more than two in a hundred, or if anything did not hold that the simulator's oracle looks at.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import CodeType, CoroutineType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING

import trio

from nolocod.p2p.membership.table import Membership
from nolocod.studies.sim.scenarios import SCENARIOS, Plan, Scenario, slowed
from nolocod.studies.sim.swarm import Report, Swarm, simulate_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.studies.sim.journal import Journal
    from nolocod.studies.sim.node import SimNode

HOUR, DAY = 3600.0, 86_400.0
PHASE = 120.0
"""Seconds."""
GROWTH = 0.02
_EVERY = 2 * HOUR
"""Between two things that befall the swarm, on average."""
_GONE = 600.0
"""Seconds after which nothing of a killed node runs any more."""
_PARTS = ("table", "gossip", "loop", "exchange_service", "selection", "reputation")
"""Of a node."""
_BOUNDARY = (type, ModuleType, FunctionType, CodeType, FrameType, CoroutineType)


@dataclass(frozen=True)
class Look:
    """Of the nodes that are there, in the mean."""

    at: float
    objects: float
    tasks: float


class Week(Swarm):
    """What befalls it is drawn from the plan's seed."""

    def __init__(self, plan: Plan, scenario: Scenario, nursery: trio.Nursery, journal: Journal) -> None:
        super().__init__(plan, scenario, nursery, journal)
        self.looks: list[Look] = []
        self.befell: Counter[str] = Counter()
        self.ends = math.inf
        nursery.start_soon(self._disturb)
        nursery.start_soon(self._watch)

    async def _disturb(self) -> None:
        happenings = {"killed": self._replace, "slept": self._sleep, "cut off": self._cut, "wrong clock": self._mistake}
        while True:
            await trio.sleep(self.rng.expovariate(1 / _EVERY))
            training = [node for node in self.live()[1:] if node.state == "training"]
            if not training:
                return
            kind = self.rng.choice([*happenings])
            self.befell[kind] += 1
            node = self.rng.choice(training)
            self.nursery.start_soon(happenings[kind], node)

    async def _replace(self, node: SimNode) -> None:
        self.kill(node)
        self.begin(self.add(max(self.live(), key=lambda one: one.replica.round)))
        await trio.sleep(_GONE)
        node.table = Membership(node.peer_id, self.run_id, self.scenario.timing)  # others may still knock
        for name in (*_PARTS, "receipts", "_nursery"):
            if name != "table":
                delattr(node, name)
        node.port.handlers.clear()

    async def _sleep(self, node: SimNode) -> None:
        node.port.frozen_until = trio.current_time() + self.rng.uniform(300, 10 * HOUR)

    async def _cut(self, node: SimNode) -> None:
        node.port.side = 1 + node.number
        await trio.sleep(self.rng.uniform(60, 6 * HOUR))
        node.port.side = 0

    async def _mistake(self, node: SimNode) -> None:
        node.clock_ahead = self.rng.choice((-1, 1)) * self.rng.choice((5.0, 90.0, HOUR, DAY))
        await trio.sleep(self.rng.uniform(HOUR, 5 * HOUR))
        node.clock_ahead = 0.0

    async def _watch(self) -> None:
        while True:
            await trio.sleep(HOUR)
            here = self.live()
            held = sum(map(held_by, here)) / len(here)
            self.looks.append(Look(trio.current_time(), held, trio.lowlevel.current_statistics().tasks_living / len(here)))
            if trio.current_time() >= self.ends:
                self.done.set()


def held_by(node: SimNode) -> int:
    """Objects that its parts hold, of whatever type; what the simulator and trio have is not followed."""
    ends = (node.world, node.identity, node.port, node.replica, node.receipts)
    seen = {id(one) for one in (node, *ends)}
    left: list[object] = [getattr(node, part) for part in _PARTS]
    count = 0
    while left:
        one = left.pop()
        foreign = type(one).__module__.startswith(("nolocod.studies", "trio", "tests"))
        if id(one) in seen or foreign or isinstance(one, _BOUNDARY):
            continue
        seen.add(id(one))
        count += 1
        left += gc.get_referents(one)
    return count


def growth(looks: Sequence[Look], days: float) -> dict[str, float]:
    """Of what is counted, from the fourth day (of a shorter time: the fourth seventh) to the last, in the mean."""
    part = days * DAY / 7
    fourth, last = ([one for one in looks if first <= one.at / part < first + 1] for first in (3, 6))
    return {
        name: statistics.fmean(getattr(one, name) for one in last) / statistics.fmean(getattr(one, name) for one in fourth) - 1
        for name in ("objects", "tasks")
    }


def run(days: float, nodes: int, seed: int) -> tuple[Report, Week]:
    rough = SCENARIOS["rough"]
    outer = replace(rough.outer, step_seconds=PHASE / rough.outer.inner_steps)
    scenario = slowed(replace(rough, outer=outer, churn=0.0, partition=None, beats=4))

    def made(plan: Plan, scenario: Scenario, nursery: trio.Nursery, journal: Journal) -> Week:
        week = Week(plan, scenario, nursery, journal)
        week.ends = days * DAY
        return week

    return simulate_in(made, Plan("rough", nodes, round(2 * days * DAY / PHASE), seed), scenario)  # nobody reaches the goal


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.week", description=__doc__)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    report, week = run(options.days, options.nodes, options.seed)
    grew = growth(week.looks, options.days)
    befell = ", ".join(f"{count} {kind}" for kind, count in sorted(week.befell.items()))
    say(f"{options.nodes} nodes, {report.seconds / DAY:.1f} days in {report.took:.0f} s: {befell}")
    say(f"{report.paired} paired outer steps, {report.solo} alone, {report.checked} checked; {report.outcomes}")
    last = week.looks[-1]
    end = f"{last.objects:.0f} and {last.tasks:.1f} of a node at the end"
    say(f"growth: objects {grew['objects']:+.1%}, tasks {grew['tasks']:+.1%}; {end}")
    wrong = [*report.violations, *(f"{name} grew by {share:.1%}" for name, share in grew.items() if share > GROWTH)]
    for one in wrong:
        say(f"BROKEN: {one}")
    return int(bool(wrong))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
