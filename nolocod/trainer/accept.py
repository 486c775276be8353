"""The accept test: would our held-out loss be worse with a partner's message than without it?

The rule: both candidates are the slow weights after the outer step, paired and solo, in a model of their own, so that
training may go on beside. Both are tried on the same held-out windows, drawn by chance each time, so that nobody knows
which; refused is what is worse by more than the run's margin and by more than three standard errors of the difference.
Most messages do no harm at all, which a few of the windows tell: the others are tried where they leave a doubt.

A partner may be some rounds behind, and while much is learnt in a round that alone makes its message harmful beside ours.
So it may cost as much as our own last rounds brought, as many as a partner may be behind, and one.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.errors import HarmfulTensorError
from nolocod.trainer.inner import mean_loss

if TYPE_CHECKING:
    import random

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.snapshot import Snapshot
    from nolocod.trainer.windows import Source

BATCHES = 8
"""Micro-batches of held-out text in one test ..."""
FIRST = 3
"""... and of them, those that are tried first."""
POOL = 16
"""Of so many times as many windows they are drawn."""
ONE_IN = 8
"""Partners that nothing speaks against are tested by chance, one in so many; tested are all others."""
SUSPICIOUS = 0.5
"""One whose difference counts for less than this reaches far beyond the usual."""
_SIGMAS = 3.0


@dataclass(frozen=True)
class Candidates:
    """The model that candidates are tried in: `flat` holds its parameters, on its device."""

    model: torch.nn.Module
    flat: Tensor

    def losses(self, windows: NDArray[np.int64], batch: int) -> list[float]:
        """Mean loss of each micro-batch, in nats per token."""
        parts = [windows[start : start + batch] for start in range(0, len(windows), batch)]
        return [mean_loss(self.model, part, batch, self.flat.device) for part in parts]


class AcceptTest:
    """`margin` in nats per token; `chance` draws windows and whom to test."""

    def __init__(self, candidates: Candidates, manifest: Manifest, chance: random.Random) -> None:
        self._candidates = candidates
        self._margin = manifest.trust.accept
        self._rounds = manifest.outer.staleness + 1
        self._batch = manifest.inner.batch
        self.chance = chance
        candidates.model.eval()

    def due(self, weight: float, *, probation: bool) -> bool:
        """Whether a partner whose difference counts for `weight` is to be tested."""
        return probation or weight < SUSPICIOUS or self.chance.randrange(ONE_IN) == 0

    def pool(self, source: Source) -> NDArray[np.int64]:
        """The windows that are drawn from. The first call may stream for minutes, which no exchange has."""
        return source.held_out(BATCHES * POOL * self._batch)

    def check(self, snapshot: Snapshot, boxes: tuple[Tensor, Tensor], phi: Tensor, source: Source) -> None:
        """HarmfulTensorError if the step with the partner does harm. `boxes`: outbox and inbox; after `inspect`."""
        pool = self.pool(source)
        chosen = self.chance.sample(range(len(pool)), min(len(pool), BATCHES * self._batch))
        first = FIRST * self._batch
        alone: list[float] = []
        paired: list[float] = []
        for part in (chosen[:first], chosen[first:]):
            alone += self._losses(snapshot, boxes, phi, pool[part], paired=False)
            paired += self._losses(snapshot, boxes, phi, pool[part], paired=True)
            worse, error = _mean_and_error([after - own for own, after in zip(alone, paired, strict=True)])
            if worse + _SIGMAS * error <= self._margin:
                return
        self._candidates.flat.copy_(phi)
        before = self._candidates.losses(pool[chosen], self._batch)
        learnt = statistics.mean(before) - statistics.mean(alone)
        allowed = max(self._margin, self._rounds * learnt)
        if not worse <= max(allowed, _SIGMAS * error):
            raise HarmfulTensorError(
                f"our held-out loss would be worse by {worse:.4f} with it (+- {error:.4f}); {allowed:.4f} is allowed."
            )

    def _losses(
        self, snapshot: Snapshot, boxes: tuple[Tensor, Tensor], phi: Tensor, windows: NDArray[np.int64], *, paired: bool
    ) -> list[float]:
        """Of the slow weights after the outer step with the partner, or alone."""
        flat = self._candidates.flat
        flat.copy_(phi)
        snapshot.rehearse(*boxes, flat, paired=paired)
        return self._candidates.losses(windows, self._batch)


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """With the standard error of the mean."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.mean(values), error
