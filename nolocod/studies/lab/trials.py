"""Single training runs of replicas in one process, by whatever method: their settings. tools/trials.py performs them.

The rule: the outer step, the codecs and the model are the product's own; a trial differs from a run by its settings only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from nolocod.run import presets
from nolocod.studies.lab.methods import BY_NAME, Method

if TYPE_CHECKING:
    from nolocod.run.manifest import Manifest

MODELS: dict[str, dict[str, Any]] = {
    "micro": presets.llama(48, 2, 2, 128),
    "tiny": presets.MODELS["tiny"],
    "0.4m": presets.llama(96, 3, 4, 256),
    "small": presets.MODELS["small"],
    "10m": presets.MODELS["10m"],
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
    """In place of the method's own, as what follows."""
    beta: float | None = None
    gamma: float | None = None
    late: int | None = None
    fragments: int | None = None
    optimizer: Literal["muon", "adamw"] = "adamw"
    """As in a run file, and so is the schedule: the same for every method."""
    schedule: Literal["wsd", "cosine", "constant"] = "cosine"
    device: str = "cpu"
    """As torch names it. On a GPU the inner steps compute in bfloat16, as a node's do."""

    @property
    def settings(self) -> Method:
        given = {key: getattr(self, key) for key in ("alpha", "beta", "gamma", "late", "fragments")}
        return replace(BY_NAME[self.method], **{key: value for key, value in given.items() if value is not None})

    @property
    def inner_steps(self) -> int:
        """From one outer step to the next."""
        return round(self.phase * self.settings.every)

    def manifest(self) -> Manifest:
        method = self.settings
        phase = self.inner_steps
        run = presets.local_run(
            MODELS[self.model], rounds=self.steps // phase, inner_steps=phase, seed=self.seed, own_text=False
        )
        change = msgspec.structs.replace
        inner = change(
            run.inner, learning_rate=self.learning_rate, batch=self.batch, sequence=self.sequence,
            warmup_rounds=self.steps * 0.04 / phase, optimizer=self.optimizer, schedule=self.schedule,
        )  # fmt: skip
        outer = change(run.outer, alpha=method.alpha, beta=method.beta, gamma=method.gamma)
        # what trust costs is measured elsewhere (`nolocod lab attacks`)
        trust = change(run.trust, clip=0.0)
        return change(run, inner=inner, outer=outer, trust=trust, evaluation=change(run.evaluation, batches=self.held_out))
