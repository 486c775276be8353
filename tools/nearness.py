"""Print how far honest replicas' slow weights are apart, matrix by matrix: FAR of trainer/compare_donors.py lies beyond it.

    python -m tools.nearness [REPLICAS [STEPS]]

The rule: replicas of the lab's tiny model, in training on real text with the outer settings of the paper, which runs have by
default; told are the farthest pair in its farthest matrix and the nearest one, over all outer steps after the warm-up.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import torch

from nolocod.studies.lab.multi_replica import MultiReplica
from nolocod.studies.lab.trials import Trial
from nolocod.trainer.compare_donors import FAR, distance

RATES = (5e-4, 1e-3, 2e-3)


class Watched(MultiReplica):
    """Looks at its replicas after each outer step."""

    def __init__(self, trial: Trial, cache: Path) -> None:
        super().__init__(trial.manifest(), trial.settings, trial.replicas, cache)
        self.distances: list[tuple[float, float]] = []
        """At each outer step: of the nearest pair and of the farthest, each in its farthest matrix."""

    def _outer_step(self) -> list[tuple[int, int]]:
        waiting = super()._outer_step()
        matrices = [
            [tensor.clone() for _, tensor in replica.layout.split(replica.phi) if tensor.dim() > 1]
            for replica in self._replicas
        ]
        pairs = [max(map(distance, one, other)) for one, other in itertools.combinations(matrices, 2)]
        self.distances.append((min(pairs), max(pairs)))
        return waiting


def main(replicas: int = 8, steps: int = 2000) -> None:
    torch.set_num_threads(1)
    for rate in RATES:
        trial = Trial("NoLoCo, the paper's", replicas, 1, rate, model="tiny", steps=steps, held_out=1, points=1)
        with tempfile.TemporaryDirectory() as cache:
            watched = Watched(trial, Path(cache))
            watched.run()
        after = watched.distances[1 + round(trial.manifest().inner.warmup_rounds) :]
        near, far = min(one for one, _ in after), max(one for _, one in after)
        sys.stdout.write(f"learning rate {rate:g}: {near:.4f} to {far:.3f} of the norm; {FAR:.2f} is far\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
