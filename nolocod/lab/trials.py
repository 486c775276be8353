"""Single training runs, many of them: each is done once, and its result kept as one JSON line.

The rule: a trial's result follows from its settings alone, all of which are its key; so a command that was broken off
goes on where it was, and one that was finished prints its table at once.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nolocod import presets
from nolocod.lab.methods import BY_NAME, Method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nolocod.manifest import Manifest
    from nolocod.trainer.rehearsal import Point

MODELS: dict[str, dict[str, Any]] = {
    "tiny": presets.MODELS["tiny"],
    "0.4m": presets.llama(96, 3, 4, 256),
    "small": presets.MODELS["small"],
}


@dataclass(frozen=True)
class Trial:
    """One run of `replicas` for `steps` inner steps each, an outer step every `phase`, from `seed`."""

    method: str
    replicas: int
    seed: int
    learning_rate: float
    model: str = "0.4m"
    steps: int = 3000
    phase: int = 50
    batch: int = 4
    sequence: int = 64
    held_out: int = 64
    """Micro-batches of text that nobody trains on, at every evaluation."""
    points: int = 6
    """How often it is evaluated, the end included."""
    alpha: float | None = None
    """These three take the place of the method's own."""
    beta: float | None = None
    gamma: float | None = None

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def settings(self) -> Method:
        return BY_NAME[self.method]

    def manifest(self) -> Manifest:
        method = self.settings
        phase = self.phase * method.every
        run = presets.local_run(
            MODELS[self.model], rounds=self.steps // phase, inner_steps=phase, seed=self.seed, own_text=False
        )
        replace = msgspec.structs.replace
        inner = replace(
            run.inner, learning_rate=self.learning_rate, batch=self.batch, sequence=self.sequence,
            warmup_rounds=self.steps * 0.04 / phase,
        )  # fmt: skip
        outer = replace(
            run.outer,
            alpha=method.alpha if self.alpha is None else self.alpha,
            beta=method.beta if self.beta is None else self.beta,
            gamma=method.gamma if self.gamma is None else self.gamma,
        )
        # what trust costs is measured elsewhere (`nolocod lab attacks`)
        trust = replace(run.trust, clip=0.0, direction=0.0, accept=0.0)
        return replace(run, inner=inner, outer=outer, trust=trust, evaluation=replace(run.evaluation, batches=self.held_out))


def perform(trial: Trial) -> list[Point]:
    """Train. Every replica, and the processes beside this one, has one thread."""
    from nolocod.trainer.rehearsal import Rehearsal, Variant, use_threads  # torch: the package is imported without it

    use_threads(1)
    method, manifest = trial.settings, trial.manifest()
    watch = max(1, manifest.outer.rounds // trial.points)
    variant = Variant(method.name, method.codec, method.late, method.fragments, method.scheme)
    with tempfile.TemporaryDirectory(prefix="nolocod-lab-") as cache:
        rehearsal = Rehearsal(manifest, variant, trial.replicas, Path(cache), watch)
        rehearsal.run()
    return rehearsal.points


class Book:
    """The results of trials, in the file `kept` and in memory."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._found: dict[str, list[Point]] = {}
        if kept.exists():
            from nolocod.trainer.rehearsal import Point  # as above

            for line in kept.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                key = json.dumps(asdict(Trial(**entry["trial"])), sort_keys=True)
                self._found[key] = [Point(**point) for point in entry["points"]]

    def __contains__(self, trial: Trial) -> bool:
        return trial.key in self._found

    def points(self, trial: Trial) -> list[Point]:
        """The last one is the end. KeyError for a trial that was not performed."""
        return self._found[trial.key]

    def perform(self, trials: Iterable[Trial], workers: int, tell: Callable[[str], None]) -> None:
        """Do those that were not done yet, `workers` at a time, the longest first."""
        left = sorted({trial for trial in trials if trial not in self}, key=lambda trial: -trial.replicas * trial.steps)
        if not left:
            return
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("spawn").Pool(workers) as pool, self._kept.open("a", encoding="utf-8") as handle:
            for number, (trial, points) in enumerate(pool.imap_unordered(_performed, left), 1):
                self._found[trial.key] = points
                entry = {"trial": asdict(trial), "points": [asdict(point) for point in points]}
                handle.write(json.dumps(entry) + "\n")
                handle.flush()
                loss = points[-1].mean
                tell(
                    f"{number} of {len(left)}: {trial.method}, {trial.replicas} replicas, seed {trial.seed}, "
                    f"learning rate {trial.learning_rate:g}: {loss:.4f}"
                )


def _performed(trial: Trial) -> tuple[Trial, list[Point]]:
    return trial, perform(trial)
