"""Print how far honest replicas' slow weights are apart, matrix by matrix: FAR of trainer/compare_donors.py lies beyond it.

    python -m tools.nearness [REPLICAS [STEPS]]

The rule: replicas of the lab's tiny model, in training on real text with Muon and with the outer settings of the paper, which
runs have by default. Told are the farthest pair in its farthest matrix and the nearest one, over all outer steps after the
warm-up, and how many of the donors that a newcomer could ask at these steps look far beside samples of two others.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from nolocod.studies.lab.multi_replica import MultiReplica
from nolocod.studies.lab.trials import Trial
from nolocod.trainer.compare_donors import FAR, distance

RATES = (1e-3, 3e-3)


class Watched(MultiReplica):
    """Looks at its replicas after each outer step."""

    def __init__(self, trial: Trial, cache: Path) -> None:
        super().__init__(trial.manifest(), trial.settings, trial.replicas, cache)
        self.distances: list[tuple[float, float]] = []
        """At each outer step: of the nearest pair and of the farthest, each in its farthest matrix."""
        self.far: list[float] = []
        """At each outer step: of all choices of a donor and two others, the share in which it looks far."""

    def _outer_step(self, *, waits: bool) -> list[tuple[int, int]]:
        waiting = super()._outer_step(waits=waits)
        matrices = [
            [tensor.clone() for _, tensor in replica.layout.split(replica.phi) if tensor.dim() > 1]
            for replica in self._replicas
        ]
        apart = {
            (one, other): torch.tensor([distance(*two) for two in zip(matrices[one], matrices[other], strict=True)])
            for one, other in itertools.permutations(range(len(matrices)), 2)
        }
        pairs = [float(found.max()) for found in apart.values()]
        self.distances.append((min(pairs), max(pairs)))
        chosen = [
            bool((torch.minimum(apart[donor, one], apart[donor, other]) > FAR).any())
            for donor in range(len(matrices))
            for one, other in itertools.combinations({*range(len(matrices))} - {donor}, 2)
        ]
        self.far.append(sum(chosen) / len(chosen))
        return waiting


def main(replicas: int = 8, steps: int = 2000) -> None:
    torch.set_num_threads(1)
    for rate in RATES:
        like = Trial("NoLoCo, the paper's", replicas, 1, rate, model="tiny", steps=steps, held_out=1, points=1)
        trial = replace(like, optimizer="muon", schedule="wsd")
        with tempfile.TemporaryDirectory() as cache:
            watched = Watched(trial, Path(cache))
            watched.run()
        first = 1 + round(trial.manifest().inner.warmup_rounds)
        near, far = (pick(both) for pick, both in zip((min, max), zip(*watched.distances[first:], strict=True), strict=True))
        share = statistics.mean(watched.far[first:])
        sys.stdout.write(
            f"learning rate {rate:g}: {near:.4f} to {far:.3f} of the norm; {FAR:.2f} is far, for {share:.1%} of donors\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
