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
    "125m": presets.llama(768, 12, 12, 3072),
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
    decay: float = 0.5
    """The last part of the rounds, in which "wsd" goes to zero."""
    documents: Literal["apart", "joined"] = "joined"
    device: str = "cpu"
    """As torch names it. On a GPU the inner steps compute in bfloat16, as a node's do."""

    @property
    def settings(self) -> Method:
        given = {key: value for key in ("alpha", "beta", "gamma") if (value := getattr(self, key)) is not None}
        return replace(BY_NAME[self.method], **given)

    @property
    def inner_steps(self) -> int:
        """From one merge to the next of the same part."""
        return round(self.phase * self.settings.every)

    @property
    def turns(self) -> int:
        """Parts that are exchanged in turn."""
        said = self.fragments or self.settings.turns
        return self.inner_steps if said < 0 else said or presets.usual_turns(self.inner_steps)

    @property
    def lateness(self) -> int:
        """Inner steps by which a merge comes late."""
        return self.late if self.late is not None else self.settings.busy * self.inner_steps // self.turns

    def manifest(self) -> Manifest:
        method = self.settings
        phase = self.inner_steps
        run = presets.local_run(
            MODELS[self.model], rounds=self.steps // phase, inner_steps=phase, seed=self.seed, own_text=False
        )
        change = msgspec.structs.replace
        inner = change(
            run.inner, learning_rate=self.learning_rate, batch=self.batch, sequence=self.sequence,
            warmup_rounds=self.steps * 0.04 / phase, optimizer=self.optimizer, schedule=self.schedule, decay=self.decay,
        )  # fmt: skip
        outer = change(run.outer, turns=self.turns, alpha=method.alpha, beta=method.beta, gamma=method.gamma)
        trust, data = change(run.trust, clip=method.clip), change(run.data, documents=self.documents)
        evaluation = change(run.evaluation, batches=self.held_out)
        return change(run, inner=inner, outer=outer, trust=trust, data=data, evaluation=evaluation)
