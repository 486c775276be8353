"""Scenarios: what the nodes, the lines between them and their course are like; the named ones are `nolocod simulate`'s."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nolocod.p2p.timing import Timing
from nolocod.studies.sim.network import LineModel
from nolocod.studies.sim.replica import OuterSettings
from nolocod.studies.sim.signing import REAL_UP_TO


@dataclass(frozen=True)
class Partition:
    """From `begin` to `end`, in shares of the run's expected length, a `share` of the nodes is cut off from the rest."""

    begin: float
    end: float
    share: float = 0.5


@dataclass(frozen=True)
class Scenario:
    """What a scenario is made of. `unlike`: the standard deviation of the nodes' speeds over their mean (lognormal);
    `nats`: shares of public nodes, of those behind cone and behind symmetric NATs."""

    outer: OuterSettings = field(default_factory=OuterSettings)
    line: LineModel = field(default_factory=LineModel)
    timing: Timing = field(default_factory=Timing)
    unlike: float = 0.1
    fast: float = 0.0
    """So large a share of the nodes are `faster` than that, by a factor."""
    faster: float = 1.0
    nats: tuple[float, float, float] = (1.0, 0.0, 0.0)
    churn: float = 0.0
    """So large a share of the nodes end without a word, and as many new ones join, spread evenly over the run."""
    partition: Partition | None = None
    hostile: float = 0.0
    """So large a share of the nodes attack the others (attackers.py)."""
    beats: int = 1
    """Heartbeats of an inner phase, where gossip is slowed; by default those of a minute are five."""
    staleness: int = 12
    patience: float = 60.0


@dataclass(frozen=True)
class Plan:
    """All that decides what happens. `probation`, `judging`: manifest.Trust, its probation and reputation. `cheap`: signatures
    (signing.py); None lets the number of nodes decide."""

    scenario: str = "calm"
    nodes: int = 16
    rounds: int = 20
    seed: int = 0
    probation: int = 0
    judging: bool = True
    cheap: bool | None = None


def paced(scenario: Scenario, nodes: int) -> Scenario:
    """With gossip as slow as `nodes` on one machine need it."""
    return scenario if nodes <= REAL_UP_TO else slowed(scenario)


def slowed(scenario: Scenario) -> Scenario:
    """With the gossip of large simulations: `beats` in an inner phase, and members believed for fifteen, as by default."""
    beat = scenario.outer.inner_steps * scenario.outer.step_seconds / scenario.beats
    timing = replace(scenario.timing, heartbeat=beat, calm=beat, live=15 * beat, lasting=15 * beat)
    return replace(scenario, timing=timing)


SCENARIOS: dict[str, Scenario] = {
    "calm": Scenario(),
    "wan": Scenario(line=LineModel(latency=0.08, spread=1.0, loss=0.001, up=625_000.0, down=2_500_000.0), unlike=0.3),
    "nat": Scenario(nats=(0.3, 0.5, 0.2)),
    "partition": Scenario(partition=Partition(0.25, 0.5)),
    "churn": Scenario(churn=0.5),
    "unlike": Scenario(unlike=0.8),
    "two-speeds": Scenario(fast=0.125, faster=8.0),
    "rough": Scenario(
        outer=OuterSettings(inner_steps=20),
        line=LineModel(latency=0.15, spread=1.5, loss=0.01, up=125_000.0, down=625_000.0),
        nats=(0.3, 0.5, 0.2),
        unlike=0.5,
        churn=0.3,
        partition=Partition(0.4, 0.6),
    ),
    "hostile": Scenario(hostile=0.3, beats=4),
}
"""What each is made of: `calm` has 20 ms and fast lines, `wan` home lines over continents, `nat` every second node behind a
cone NAT and every fifth behind a symmetric one, `partition` a mesh that falls in two for a quarter of the time, `churn`
half of the nodes killed and as many new ones, `unlike` slow and fast machines, `two-speeds` one of
eight nodes eight times as fast, `rough` all of it; in
`hostile` three of ten nodes flood, capture and lie."""
