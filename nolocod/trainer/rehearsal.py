"""Several replicas of one run in one process, exchanging in memory: what a codec or an overlap costs in loss.

The rule: everything is the product's own, the replicas and their messages; only the network is missing, and
with it time. Pairs are drawn anew for every outer step from the seed, everybody is paired, and all variants of
a seed train on the same tokens in the same order from the same weights.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from nolocod.identity import Identity
from nolocod.manifest import Codec, seal
from nolocod.terms import Subject
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.replica import Replica
from nolocod.trainer.source import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nolocod.manifest import Manifest


@dataclass(frozen=True)
class Variant:
    """How the replicas exchange. `late`: inner steps between the snapshot and the merge; 0 blocks."""

    name: str
    codec: Codec
    late: int = 0
    fragments: int = 1


@dataclass(frozen=True)
class Outcome:
    """Held-out losses in nats per token at the end: of the replicas' mean weights, and the mean of the replicas'
    own losses. `bytes_per_parameter` of all messages, by the parameters they were about; `skipped`: the share of
    blocks of which a partner could not decode the message."""

    averaged: float
    mean: float
    bytes_per_parameter: float
    skipped: float


def use_threads(count: int) -> None:
    """Let torch compute on so many threads in this process."""
    torch.set_num_threads(count)


class Rehearsal:
    """`count` replicas of `manifest`, whose `inner.steps` count from merge to merge of the same fragment."""

    def __init__(self, manifest: Manifest, variant: Variant, count: int, cache: Path) -> None:
        # As many inner steps from merge to merge of a fragment, and in all, whatever the number of fragments.
        inner, outer = manifest.inner, manifest.outer
        fragments = variant.fragments
        self._variant = variant
        self.manifest = msgspec.structs.replace(
            manifest,
            codec=variant.codec,
            inner=msgspec.structs.replace(inner, steps=inner.steps // fragments, warmup_rounds=inner.warmup_rounds * fragments),
            outer=msgspec.structs.replace(
                outer, rounds=outer.rounds * fragments, fragments=fragments, blocking=not variant.late
            ),
        )
        sealed = seal(self.manifest, Identity.generate())
        tokenizer = make_tokenizer(manifest.data)
        self._replicas = []
        for index in range(count):
            name = f"replica {index}"
            source = open_source(self.manifest, tokenizer, name, None, cache)
            replica = Replica(sealed, tokenizer.vocabulary, source, "cpu")
            replica.draw_as(name)
            self._replicas.append(replica)
        size = self._replicas[0].box_size
        self._boxes = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        self._rng = random.Random(manifest.seed)
        self._bytes = self._parameters = self._skipped = self._blocks = 0

    def run(self) -> Outcome:
        """Train to the run's goal and evaluate."""
        steps, late = self.manifest.inner.steps, self._variant.late
        waiting: list[tuple[int, int]] = []
        for _ in range(self.manifest.outer.rounds):
            self._train(late)
            self._merge(waiting)
            self._train(steps - late)
            waiting = list(self._pairs())
            self._snapshot(waiting)
        self._merge(waiting)
        return self._outcome()

    def _train(self, steps: int) -> None:
        for replica in self._replicas:
            for _ in range(steps):
                replica.step()

    def _pairs(self) -> Iterator[tuple[int, int]]:
        order = self._rng.sample(range(len(self._replicas)), len(self._replicas))
        return zip(order[::2], order[1::2], strict=False)

    def _snapshot(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            ages = self._replicas[pair[0]].ages
            fragment = ages.index(max(ages))
            dense = any(self._replicas[index].dense_due()[fragment] for index in pair)
            for index in pair:
                replica = self._replicas[index]
                description = replica.snapshot(self._boxes[index], Subject(fragment, dense))
                self._bytes += description.size
                self._parameters += replica.plan.fragments[fragment].size
                self._blocks += len(replica.plan.fragments[fragment].blocks)

    def _merge(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            found = []
            for own, other in (pair, pair[::-1]):
                found.append(self._replicas[own].inspect(self._boxes[own], self._boxes[other]))
            self._skipped += sum(int.from_bytes(one.skipped, "little").bit_count() for one in found)
            for (own, other), theirs in zip((pair, pair[::-1]), found[::-1], strict=True):
                round_number = self._replicas[other].standing.round
                self._replicas[own].apply(self._boxes[own], self._boxes[other], round_number, theirs.skipped)

    def _outcome(self) -> Outcome:
        mean = sum(replica.evaluate() for replica in self._replicas) / len(self._replicas)
        first = self._replicas[0]
        first.theta.copy_(torch.stack([replica.theta for replica in self._replicas]).mean(0))
        return Outcome(first.evaluate(), mean, self._bytes / self._parameters, self._skipped / self._blocks)
