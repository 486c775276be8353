"""Write the tables of docs/outer-step.md about unlike machines: whom nodes meet, when they end, and what it does to the loss.

    python -m tools.unlike [--workers N]

The rule: the simulator's nodes, all the product's own but time and network, with a run file's defaults. The first table is of
32 nodes whose replicas are a few numbers; the second of 16 that learn. Machines that are alike are given the inner steps that
unlike ones took on average, as nearly as turns let them; what both took at last stands in the table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from nolocod.observe.events import OuterStep
from nolocod.run.manifest import Trust
from nolocod.studies.lab.attacks import NONE, AttackTrial, simulated
from nolocod.studies.pages import Place
from nolocod.studies.sim.replica import OuterSettings
from nolocod.studies.sim.scenarios import SCENARIOS, Plan
from nolocod.studies.sim.swarm import Swarm, simulate_in

if TYPE_CHECKING:
    from nolocod.observe.events import Event
    from nolocod.studies.sim.member import SimMember
    from nolocod.studies.sim.swarm import Report

PAGE = Path(__file__).resolve().parent.parent / "docs" / "outer-step.md"
SEEDS = (1, 2)
TWO_SPEEDS, LOGNORMAL = "an eighth of them 8 times as fast", "speeds lognormal, sigma 0.5"
KINDS: dict[str, dict[str, Any]] = {TWO_SPEEDS: {"fast": 0.125, "faster": 8.0}, LOGNORMAL: {"unlike": 0.53}}
"""A sigma of 0.5 makes a standard deviation of 0.53 of the mean."""
OUTER = OuterSettings(inner_steps=15)
"""Of the nodes that meet."""
_ROUNDS, _LEARNING = 30, 100
"""Of nodes that meet, and of nodes that learn."""
_RULE = "|---|---|---|"


@dataclass(frozen=True)
class Learnt:
    """Of nodes that learn: their mean held-out loss at the end, and inner steps of each in a round of the whole model; a larger
    step counts as so many."""

    loss: float
    inner_steps: float

    def __str__(self) -> str:
        return f"{self.loss:.4f}; {self.inner_steps:.1f}"


class Meeting(Swarm):
    """Counts who meets whom, when nodes end, and how far they come apart. Fast is who is faster than the mean of all."""

    def __init__(self, *given: Any) -> None:  # noqa: ANN401 - a Swarm's
        super().__init__(*given)
        self.pairs: Counter[tuple[bool, bool]] = Counter()
        self.ends: list[float] = []
        self.apart = 0
        """Rounds from the first node to the last one, at most."""

    def told(self, member: SimMember, event: Event) -> None:
        super().told(member, event)
        if isinstance(event, OuterStep):
            rounds = [node.replica.round for node in self.nodes]
            self.apart = max(self.apart, max(rounds) - min(rounds))
            if event.partner is not None:
                self.pairs[self.is_fast(member), self.is_fast(self.by_peer[event.partner])] += 1

    def is_fast(self, member: Any) -> bool:  # noqa: ANN401 - a SimNode
        rates = [1 / node.replica.speed for node in self.nodes]
        return bool(1 / member.replica.speed > statistics.mean(rates))

    def finished(self, member: SimMember) -> None:
        super().finished(member)
        self.ends.append(trio.current_time())

    @property
    def cross(self) -> float:
        """Of a fast node's pairs the share with slow ones, against chance."""
        chance = sum(not self.is_fast(node) for node in self.nodes) / (len(self.nodes) - 1)
        cross, among = self.pairs[True, False], self.pairs[True, True]
        return cross / (cross + among) / chance

    @property
    def ended(self) -> tuple[float, float]:
        """When the first node ended, and the last one, of the time that the median machine plans."""
        speed = statistics.median(node.replica.speed for node in self.nodes)
        planned = self.plan.rounds * self.scenario.outer.inner_steps * speed
        return min(self.ends) / planned, max(self.ends) / planned


def met(kind: str, seed: int, nodes: int = 32, outer: OuterSettings = OUTER) -> tuple[Report, Meeting]:
    """Nodes that run to their end."""
    plan = Plan(nodes=nodes, rounds=_ROUNDS * outer.turns, seed=seed, cheap=True)
    return simulate_in(Meeting, plan, replace(SCENARIOS["calm"], outer=outer, **KINDS[kind]))


def meet(kind: str, seed: int) -> tuple[float, float, float]:
    """Meeting.cross and Meeting.ended."""
    _, swarm = met(kind, seed)
    return swarm.cross, *swarm.ended


def learn(seed: int, phase: int, scenario: dict[str, Any]) -> Learnt:
    """Train 16 nodes for a hundred rounds of `phase` inner steps of the median machine."""
    trial = AttackTrial(NONE, Trust(), honest=16, hostile=0, seed=seed, head_start=10, rounds=_LEARNING, phase=phase)
    with tempfile.TemporaryDirectory() as cache:
        _, swarm = simulated(trial, Path(cache), replace(trial.scenario, **scenario))
        return Learnt(statistics.mean(swarm.losses()), swarm.inner_steps.total() / trial.honest / trial.rounds)


def compare(kind: str, seed: int) -> tuple[Learnt, Learnt]:
    """Unlike machines, and machines that are alike with as many tokens."""
    unlike = learn(seed, 24, KINDS[kind])
    return unlike, learn(seed, 3 * round(unlike.inner_steps / 3), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    places = [Place(PAGE, name, "Run this in the project's own folder.") for name in ("unlike-meet", "unlike-learn")]
    cells = [(kind, seed) for kind in KINDS for seed in SEEDS]
    with ProcessPoolExecutor(options.workers) as pool:
        meetings = list(pool.map(meet, *zip(*cells, strict=True)))
        learnt = list(pool.map(compare, *zip(*cells, strict=True)))
    head = [
        "| 32 nodes | a fast node's pairs with slow ones, against chance | first and last end, of the median's plan |",
        _RULE,
    ]
    rows = [
        f"| {kind}, seed {seed} | {share:.2f} | {first:.2f}, {last:.2f} |"
        for (kind, seed), (share, first, last) in zip(cells, meetings, strict=True)
    ]
    places[0].fill("\n".join([*head, *rows]))
    head = ["| 16 nodes | loss; inner steps | all alike: loss; inner steps (unlike against alike) |", _RULE]
    rows = [
        f"| {kind}, seed {seed} | {one} | {other} ({one.loss / other.loss - 1:+.2%}) |"
        for (kind, seed), (one, other) in zip(cells, learnt, strict=True)
    ]
    places[1].fill("\n".join([*head, *rows]))


if __name__ == "__main__":
    main()
