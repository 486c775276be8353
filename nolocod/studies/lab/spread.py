"""`nolocod lab spread`: how far replicas drift apart, by learning rate, gamma and number of replicas.

The rule: two sources, told apart. Walks (`walks.py`) are cheap and many, and show the stability bound; trained
replicas (trials, as those of `nolocod lab compare`) show that the spread follows the learning rate
(arXiv 2506.10911, section 5.2).
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nolocod.studies.lab.trials import Trial, perform_all
from nolocod.studies.lab.walks import COUNTS, STEPS, walks
from nolocod.trainer.inner import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nolocod.studies.lab.trials import Book
    from nolocod.studies.lab.walks import Walk
    from nolocod.studies.multi_replica import Point

METHOD = "NoLoCo, the paper's"
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
GAMMAS = (0.1, 0.4, 0.7, 1.4)
"""Tried in training with the method's own alpha and beta; the bound is 1.5."""


@dataclass(frozen=True)
class Span:
    """How much is trained: `like` at other learning rates and with other gammas; and in `replicas`, over its course."""

    replicas: tuple[int, ...]
    seeds: tuple[int, ...]
    like: Trial


FULL = Span((4, 8, 16), (1, 2, 3), Trial(METHOD, 4, 0, 1e-3, model="tiny", steps=1000, phase=25, held_out=1, points=1))
REDUCED = Span((4,), (1, 2), Trial(METHOD, 4, 0, 1e-3, model="tiny", steps=600, phase=20, held_out=1, points=1))


@dataclass(frozen=True)
class Run:
    """One trained run, after warm-up: the learning rate and the spread (standard deviation of a weight over the
    replicas, root mean square over all weights) at each point."""

    replicas: int
    seed: int
    peak: float
    rates: tuple[float, ...]
    spreads: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Pearson's r of spread and learning rate."""
        return statistics.correlation(self.rates, self.spreads)

    @property
    def slope(self) -> float:
        """Of log variance on log learning rate, over the course of this run."""
        return _slope(self.rates, self.spreads)

    @property
    def mean(self) -> float:
        """Root mean square of the spread over the run."""
        return math.sqrt(statistics.fmean(spread**2 for spread in self.spreads))


def _facts(run: Run) -> dict[str, object]:
    return vars(run) | {"correlation": run.correlation, "slope": run.slope}


def _slope(rates: Sequence[float], spreads: Sequence[float]) -> float:
    """Of log variance on log learning rate, by least squares."""
    return statistics.linear_regression([math.log(rate) for rate in rates], [2 * math.log(one) for one in spreads]).slope


@dataclass(frozen=True)
class Spread:
    """`by_rate`: runs of the same count of replicas with different peaks of the learning rate. `gammas`: the spread at
    the end of trained runs, seed by seed."""

    walks: tuple[Walk, ...]
    runs: tuple[Run, ...]
    by_rate: tuple[Run, ...]
    gammas: dict[float, tuple[float, ...]]

    def to_text(self) -> str:
        """Tables in Markdown."""
        return "\n".join((*self._walks(), *self._runs(), *self._by_rate(), *self._gammas()))

    def _walks(self) -> Iterator[str]:
        yield f"\nVariance between replicas that walk at random, after {STEPS} outer steps, in variances of one change"
        yield "(*grows*: it at least doubled in the second half):\n"
        yield f"| alpha | gamma | bound | {' | '.join(f'{count} replicas' for count in COUNTS)} |"
        yield "|---|---|---|" + "---|" * len(COUNTS)
        by_count = {(walk.alpha, walk.gamma, walk.count): walk for walk in self.walks}
        for alpha, gamma in dict.fromkeys((walk.alpha, walk.gamma) for walk in self.walks):
            row = [by_count[alpha, gamma, count] for count in COUNTS]
            cells = [f"{walk.variance:.3g}{' *grows*' if walk.grows else ''}" for walk in row]
            yield f"| {alpha:g} | {gamma:.3g} | {row[0].bound:.3g} | {' | '.join(cells)} |"

    def _runs(self) -> Iterator[str]:
        yield f"\nTrained replicas ({METHOD}), from warm-up to the end:\n"
        yield "| replicas | seed | r of spread and learning rate | slope of log variance on log learning rate, within the run |"
        yield "|---|---|---|---|"
        for run in self.runs:
            yield f"| {run.replicas} | {run.seed} | {run.correlation:.3f} | {run.slope:.2f} |"

    def _by_rate(self) -> Iterator[str]:
        yield f"\nTrained replicas ({METHOD}) with different learning rates (spread: root mean square over the run):\n"
        yield (
            "| replicas | seed | spread at each learning rate | slope of log variance on log learning rate, between runs "
            "| over all points of these runs | r over all points |"
        )
        yield "|---|---|---|---|---|---|"
        for seed, slope in self.slopes().items():
            runs = [run for run in self.by_rate if run.seed == seed]
            shown = ", ".join(f"{run.peak:g}: {run.mean:.2e}" for run in runs)
            pooled = self.pooled(seed)
            yield f"| {runs[0].replicas} | {seed} | {shown} | {slope:.2f} | {pooled.slope:.2f} | {pooled.correlation:.3f} |"

    def slopes(self) -> dict[int, float]:
        """Of log variance on the log of the peak learning rate, between the runs of each seed."""
        by_seed: dict[int, list[Run]] = {}
        for run in self.by_rate:
            by_seed.setdefault(run.seed, []).append(run)
        return {seed: _slope([run.peak for run in runs], [run.mean for run in runs]) for seed, runs in by_seed.items()}

    def pooled(self, seed: int) -> Run:
        """The points of all runs of `seed` that differ by their peak, as if they were one run's."""
        runs = [run for run in self.by_rate if run.seed == seed]
        rates = tuple(rate for run in runs for rate in run.rates)
        spreads = tuple(spread for run in runs for spread in run.spreads)
        return Run(runs[0].replicas, seed, max(run.peak for run in runs), rates, spreads)

    def _gammas(self) -> Iterator[str]:
        yield "\nSpread at the end of trained runs by gamma, each seed:\n"
        yield "| gamma | spread |"
        yield "|---|---|"
        for gamma, ends in self.gammas.items():
            yield f"| {gamma:g} | {', '.join(f'{one:.2e}' for one in ends)} |"

    def to_json(self) -> str:
        return json.dumps(
            {
                "walks": [vars(walk) for walk in self.walks],
                "runs": [_facts(run) for run in self.runs],
                "slopes": self.slopes(),
                "pooled": [_facts(self.pooled(seed)) for seed in self.slopes()],
                "gammas": self.gammas,
            }
        )


def spread(span: Span, book: Book, workers: int, tell: Callable[[str], None]) -> Spread:
    """Do what is not done yet, and show it."""
    like, seeds = span.like, span.seeds
    often = like.steps // like.phase
    watched = [replace(like, replicas=count, seed=seed, points=often) for count in span.replicas for seed in seeds]
    by_rate = [replace(like, learning_rate=rate, seed=seed, points=often) for seed in seeds for rate in RATES]
    by_gamma = {gamma: [replace(like, seed=seed, gamma=gamma) for seed in seeds] for gamma in GAMMAS}
    perform_all([*watched, *by_rate, *(trial for some in by_gamma.values() for trial in some)], book, workers, tell)

    def runs(trials: list[Trial]) -> tuple[Run, ...]:
        return tuple(_run(trial, book[trial]) for trial in trials)

    ends = {gamma: tuple(book[trial][-1].spread for trial in some) for gamma, some in by_gamma.items()}
    return Spread(walks(), runs(watched), runs(by_rate), ends)


def _run(trial: Trial, points: list[Point]) -> Run:
    """The last inner step before each point has its learning rate; those of the warm-up are left out."""
    manifest = trial.manifest()
    after = [point for point in points if point.round > manifest.inner.warmup_rounds + 1]
    rates = tuple(learning_rate(manifest, point.round - 1, manifest.inner.steps) for point in after)
    return Run(trial.replicas, trial.seed, trial.learning_rate, rates, tuple(point.spread for point in after))
