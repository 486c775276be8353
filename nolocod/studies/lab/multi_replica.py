"""Several replicas of one run in one process, exchanging in memory: what a method costs in loss.

The rule: replicas, messages and outer step are the product's own; only the network is missing, and with it time. Pairs
are drawn anew for every outer step from the seed, everybody is paired (of an odd count one takes a solo step), and all
methods of a seed train on the same tokens in the same order from the same weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from nolocod.identity import Identity
from nolocod.outer import step
from nolocod.run.manifest import seal
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.model import Place, pick_device
from nolocod.trainer.replica import Replica
from nolocod.trainer.source import open_source

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from nolocod.run.manifest import Manifest
    from nolocod.studies.lab.methods import Method
    from nolocod.trainer.windows import Position, Source


@dataclass(frozen=True)
class Point:
    """How the replicas stand after `round` outer steps: held-out losses in nats per token, and how far apart they are
    (`spread`: the standard deviation of a weight over the replicas, root mean square over all weights)."""

    round: int
    averaged: float
    mean: float
    worst: float
    spread: float


class MultiReplica:
    """`count` replicas of `manifest`, whose `inner.steps` count from merge to merge of the same fragment."""

    def __init__(
        self,
        manifest: Manifest,
        method: Method,
        count: int,
        cache: Path,
        device: str = "cpu",
        base: Path | None = None,
    ) -> None:
        """`device`: as torch names it. `base`: the folder of the model to start from."""
        change = msgspec.structs.replace
        self._method = method
        manifest = change(manifest, codec=method.codec)
        tokenizer = make_tokenizer(manifest.data, base)
        sources: list[Source] = [open_source(manifest, tokenizer, f"replica {index}", None, cache) for index in range(count)]
        if method.scheme == "gradients":
            sources = [_Together(sources)]
            manifest = change(manifest, inner=change(manifest.inner, batch=count * manifest.inner.batch))
        sealed = seal(manifest, Identity.generate())
        self.manifest = sealed.manifest
        self._replicas = []
        for index, source in enumerate(sources):
            replica = Replica(sealed, tokenizer.vocabulary, source, Place(pick_device(device), base))
            replica.draw_as(f"replica {index}")
            self._replicas.append(replica)
        size = self._replicas[0].plan.box_size
        self._boxes = [torch.zeros(size, dtype=torch.uint8) for _ in self._replicas]
        self._rng = random.Random(manifest.seed)

    def run(self, watch: int = 0, late: int = 0) -> list[Point]:
        """Train to the run's goal; the last point is the end, and one more is taken every `watch` outer steps. A merge comes
        `late` inner steps late, of those between two outer steps at most."""
        steps = self.manifest.inner.steps
        points: list[Point] = []
        waiting: list[tuple[int, int]] = []
        for number in range(1, self.manifest.outer.rounds + 1):
            self._train(late)
            self._merge(waiting)
            self._train(steps - late)
            waiting = self._outer_step(waits=late > 0)
            if watch and number % watch == 0 and number < self.manifest.outer.rounds:
                points.append(self._point(number))
        self._merge(waiting)
        return [*points, self._point(self.manifest.outer.rounds)]

    def _outer_step(self, *, waits: bool) -> list[tuple[int, int]]:
        """Take it, or begin it: returns the pairs whose messages wait to be merged."""
        match self._method.scheme:
            case "pairs":
                order = self._rng.sample(range(len(self._replicas)), len(self._replicas))
                pairs = list(zip(order[::2], order[1::2], strict=False))
                for alone in order[2 * len(pairs) :]:
                    self._replicas[alone].solo()
                self._snapshot(pairs)
                if waits:
                    return pairs
                self._merge(pairs)
            case "all":
                self._all_at_once()
            case _:
                for replica in self._replicas:
                    replica.pass_boundary()
        return []

    def _all_at_once(self) -> None:
        """One group of everybody: the outer step of DiLoCo, where all slow weights are and stay the same."""
        settings, count = self.manifest.outer, len(self._replicas)
        total = torch.zeros_like(self._replicas[0].phi)
        for replica in self._replicas:
            total += step.message(replica.phi, replica.theta.cpu(), settings)
        for replica in self._replicas:
            mean = torch.mul(total, 1 / count).sub_(replica.phi, alpha=settings.gamma)  # beta times the mean change
            step.step(replica.phi, replica.delta, total, count, settings)
            if self._method.nesterov:  # phi has had delta already: what momentum makes of it next, in place of what it was
                replica.phi.add_(mean).add_(replica.delta, alpha=settings.alpha - 1)
            replica.theta.copy_(replica.phi)
            replica.pass_boundary()

    def _train(self, steps: int) -> None:
        for replica in self._replicas:
            for _ in range(steps):
                replica.step()

    def _snapshot(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            subject = self._replicas[pair[0]].subject
            for index in pair:
                self._replicas[index].prepare(self._boxes[index], subject)

    def _merge(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            both = (pair, pair[::-1])
            found = [self._replicas[own].inspect(self._boxes[other]) for own, other in both]
            for (own, other), theirs in zip(both, found[::-1], strict=True):
                round_number = self._replicas[other].standing.round
                self._replicas[own].apply(self._boxes[other], round_number, theirs.skipped)

    def _point(self, number: int) -> Point:
        own = [replica.evaluate() for replica in self._replicas]
        first = self._replicas[0]
        kept = first.theta.clone()
        everybody = torch.stack([replica.theta for replica in self._replicas])
        first.theta.copy_(everybody.mean(0))
        averaged = first.evaluate()
        first.theta.copy_(kept)
        spread = everybody.var(0, correction=0).mean().sqrt().item()
        return Point(number, averaged, sum(own) / len(own), max(own), spread)


class _Together:
    """The windows of several sources at once: what all replicas would train on at one step. Held out is what one holds out."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def take(self, count: int) -> NDArray[np.int64]:
        return np.concatenate([source.take(count // len(self._sources)) for source in self._sources])

    def held_out(self, count: int) -> NDArray[np.int64]:
        return self._sources[0].held_out(count // len(self._sources))

    @property
    def position(self) -> Position:
        return self._sources[0].position

    def seek(self, position: Position) -> None:
        for source in self._sources:
            source.seek(position)
