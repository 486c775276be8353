"""How long an exchange takes among few nodes and among many: the product's own exchanges, in the simulator.

The rule: swarms of every size have the same lines, latencies, pace and signatures, and about as many nodes are simulated
of each, in several swarms where they are small; seconds are of the simulator's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nolocod.studies.lab.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Record = Results["Crowd", "Took"]

_NODES = 256
"""Simulated of each size, at least."""
_LATENCY = 0.08
"""Seconds of a message's way, on average, as between continents."""


@dataclass(frozen=True)
class Crowd:
    """One swarm; `spread`: the standard deviation of latencies over their mean."""

    nodes: int
    spread: float
    seed: int
    rounds: int = 8


@dataclass(frozen=True)
class Took:
    """What came of it: `seconds` from offer to commit, the mean of the `committed` exchanges; and offers that were made for
    them. `alone`: outer steps without a partner."""

    committed: int
    seconds: float
    offers: int
    alone: int


@dataclass(frozen=True)
class Row:
    """All swarms of one size and spread."""

    nodes: int
    spread: float
    seconds: float
    offers: float
    """For each exchange."""
    alone: float
    """The share of outer steps without a partner."""


def record(kept: Path) -> Record:
    """The swarms in the file `kept`."""
    return Results(kept, (Crowd, Took))


def crowds(counts: tuple[int, ...], spreads: tuple[float, ...]) -> list[Crowd]:
    """The largest first: they take longest."""
    sizes = [(count, spread) for count in sorted(counts, reverse=True) for spread in spreads]
    return [Crowd(count, spread, seed) for count, spread in sizes for seed in range(max(1, _NODES // count))]


def gather(crowd: Crowd) -> Took:
    """Simulate it."""
    from nolocod.studies.sim.scenarios import SCENARIOS  # trio and the daemon's parts: the lab's models do without them
    from nolocod.studies.sim.swarm import Plan, simulate, slowed

    calm = SCENARIOS["calm"]
    settings = replace(calm, weather=replace(calm.weather, latency=_LATENCY, spread=crowd.spread))
    plan = Plan("calm", crowd.nodes, crowd.rounds, crowd.seed, cheap=True)
    report = simulate(plan, slowed(settings))
    return Took(report.outcomes["committed"], report.exchange_mean or 0.0, sum(report.outcomes.values()), report.solo)


def rows(found: Record, wanted: list[Crowd], workers: int, tell: Callable[[str], None]) -> tuple[Row, ...]:
    """Simulate those of `wanted` that were not simulated yet; a row for each size and spread."""

    def done(number: int, count: int, crowd: Crowd, took: Took) -> None:
        tell(f"{number} of {count}: {crowd.nodes} nodes, latencies vary by {crowd.spread:g}: {took.seconds:.3f} s an exchange")

    found.perform(wanted, gather, workers, done)
    by_size: dict[tuple[int, float], list[Took]] = {}
    for crowd in wanted:
        by_size.setdefault((crowd.nodes, crowd.spread), []).append(found[crowd])
    sizes = sorted(by_size, key=lambda size: size[::-1])
    return tuple(_row(nodes, spread, by_size[nodes, spread]) for nodes, spread in sizes)


def _row(nodes: int, spread: float, took: list[Took]) -> Row:
    committed, alone = sum(one.committed for one in took), sum(one.alone for one in took)
    seconds = sum(one.seconds * one.committed for one in took) / committed
    return Row(nodes, spread, seconds, sum(one.offers for one in took) / committed, alone / (2 * committed + alone))
