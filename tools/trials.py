"""Trials are performed, each once, and kept: what tools/compare.py and tools/choices.py have in common.

The rule: every replica, and the processes beside this one, has one thread.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nolocod.studies.lab.multi_replica import MultiReplica, Point
from nolocod.studies.lab.results import Results
from nolocod.studies.lab.trials import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Book = Results[Trial, list[Point]]

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
TUNING_SEED = 100
"""Not among those that are compared."""


def perform(trial: Trial) -> list[Point]:
    """Train."""
    torch.set_num_threads(1)
    manifest = trial.manifest()
    watch = max(1, manifest.outer.rounds * manifest.outer.turns // trial.points)
    with tempfile.TemporaryDirectory(prefix="nolocod-lab-") as cache:
        return MultiReplica(manifest, trial.settings, trial.replicas, Path(cache), trial.device).run(watch, trial.lateness)


def book(kept: Path) -> Book:
    """The trials in the file `kept`; the last point of each is its end."""
    return Results(kept, (Trial, list[Point]))


def perform_all(trials: Iterable[Trial], found: Book, workers: int, tell: Callable[[str], None]) -> None:
    """Do those that were not done yet, the longest first."""

    def done(number: int, count: int, trial: Trial, points: list[Point]) -> None:
        what = f"{trial.method}, {trial.replicas} replicas, seed {trial.seed}, learning rate {trial.learning_rate:g}"
        tell(f"{number} of {count}: {what}: {points[-1].mean:.4f}")

    longest_first = sorted(set(trials), key=lambda trial: (-trial.replicas * trial.steps, repr(trial)))
    found.perform(longest_first, perform, workers, done)
