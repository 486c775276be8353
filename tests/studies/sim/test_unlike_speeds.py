"""Unlike machines are one swarm: they meet each other, end together, and nobody falls behind or runs away."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from nolocod.observe.events import OuterStep
from nolocod.studies.sim.replica import OuterSettings
from nolocod.studies.sim.scenarios import SCENARIOS, Plan
from nolocod.studies.sim.swarm import Swarm, simulate

if TYPE_CHECKING:
    from nolocod.observe.events import Event
    from nolocod.studies.sim.member import SimMember
    from nolocod.studies.sim.scenarios import Scenario

PLAN = Plan(nodes=32, rounds=120, seed=2, cheap=True)
OUTER = OuterSettings(inner_steps=15)
APART = 8 * OUTER.turns
"""Rounds from the first to the last node, at most."""
LOGNORMAL = 0.53
"""The standard deviation over the mean that a sigma of 0.5 makes."""


class Watched(Swarm):
    """A swarm of which each step and each end is noted."""

    def __init__(self, *given: Any) -> None:  # noqa: ANN401 - a Swarm's
        super().__init__(*given)
        self.ends: list[float] = []
        self.apart = 0
        self.pairs: Counter[tuple[bool, bool]] = Counter()
        self.learned: Counter[int] = Counter()

    def fast(self, member: Any) -> bool:  # noqa: ANN401 - a SimNode
        return bool(member.replica.speed < 0.7)

    def told(self, member: SimMember, event: Event) -> None:
        super().told(member, event)
        if isinstance(event, OuterStep):
            self.learned[member.number] += event.inner_steps
            rounds = [node.replica.round for node in self.nodes]
            self.apart = max(self.apart, max(rounds) - min(rounds))
            if event.partner is not None:
                self.pairs[self.fast(member), self.fast(self.by_peer[event.partner])] += 1

    def finished(self, member: SimMember) -> None:
        super().finished(member)
        self.ends.append(trio.current_time())


def watched(scenario: Scenario) -> Watched:
    made: list[Watched] = []

    def make(*given: Any) -> Watched:  # noqa: ANN401 - a Swarm's
        made.append(Watched(*given))
        return made[0]

    report = simulate(PLAN, replace(scenario, outer=OUTER), made=make)
    assert report.violations == ()
    return made[0]


def within_fifteen_hundredths(swarm: Watched) -> bool:
    """Of the end that the median machine plans."""
    planned = PLAN.rounds * OUTER.inner_steps * statistics.median(node.replica.speed for node in swarm.nodes)
    return 0.85 * planned < min(swarm.ends) and max(swarm.ends) < 1.15 * planned


def test_nodes_that_are_eight_times_as_fast_meet_the_others_and_end_with_them() -> None:
    """Where each took its outer steps in its own time, they had a third of them alone, and ended in a seventh of the time."""
    swarm = watched(SCENARIOS["two-speeds"])
    chance = 28 / 31
    cross, among = swarm.pairs[True, False], swarm.pairs[True, True]
    assert cross / (cross + among) >= 0.8 * chance
    assert swarm.apart <= APART
    assert within_fifteen_hundredths(swarm)
    fast = statistics.mean(swarm.learned[node.number] for node in swarm.nodes if swarm.fast(node))
    slow = statistics.mean(swarm.learned[node.number] for node in swarm.nodes if not swarm.fast(node))
    assert fast > 6 * slow, "nobody waits: what is faster trains more between two outer steps"


def test_machines_of_all_speeds_end_within_fifteen_hundredths_of_the_planned_time() -> None:
    swarm = watched(replace(SCENARIOS["calm"], unlike=LOGNORMAL))
    assert swarm.apart <= APART
    assert within_fifteen_hundredths(swarm)
