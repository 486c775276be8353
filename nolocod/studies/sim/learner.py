"""Simulated replicas that really learn: the product's own, some thousand weights, on real text.

The rule: only time is made up. Inner steps are taken when the clock has come past them, all at once, and everything that
an outer step does is trainer/replica.py's. Such a swarm has no defences, so that the oracle's form is what must come out.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import torch

from nolocod.identity import Identity
from nolocod.proto.types import Standing
from nolocod.run import presets
from nolocod.run.manifest import seal
from nolocod.studies.sim.replica import MemoryBox, SimReplica, State
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.replica import Replica
from nolocod.trainer.source import open_source

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from torch import Tensor

    from nolocod.proto.types import Applied, Description, Inspection, Subject
    from nolocod.run.manifest import Manifest
    from nolocod.studies.sim.replica import OuterSettings


class LearningSetup:
    """What all learners of a simulation share: the run, and where its text is kept."""

    room = 1e-5
    """By how much float32 may differ from the oracle's numbers."""

    def __init__(self, outer: OuterSettings, rounds: int, seed: int, cache: Path) -> None:
        self._outer = outer
        self._cache = cache
        self._sealed = seal(_run(outer, rounds, seed), Identity.generate())
        self._tokenizer = make_tokenizer(self._sealed.manifest.data)
        torch.set_num_threads(1)  # more would add up in another order

    def learner(self, number: int, speed: float, rng: random.Random) -> Learner:
        manifest = self._sealed.manifest
        source = open_source(manifest, self._tokenizer, f"replica {number}", None, self._cache)
        replica = Replica(self._sealed, self._tokenizer.vocabulary, source, "cpu")
        return Learner(self._outer, speed, rng, replica)

    @staticmethod
    def loss(replicas: list[SimReplica]) -> float:
        """The mean of their held-out losses, in nats per token."""
        return statistics.fmean(replica.loss() for replica in replicas if isinstance(replica, Learner))


def _run(outer: OuterSettings, rounds: int, seed: int) -> Manifest:
    run = presets.local_run(
        presets.llama(16, 1, 2, 44), rounds=rounds, inner_steps=outer.inner_steps, seed=seed, own_text=False
    )
    change = msgspec.structs.replace
    return change(
        run,
        inner=change(run.inner, batch=2, sequence=32, learning_rate=1e-2),
        outer=change(run.outer, alpha=outer.alpha, beta=outer.beta, gamma=outer.gamma),
        trust=presets.UNDEFENDED,
        codec="float32",  # the oracle knows nothing of what a codec rounds
    )


class Learner(SimReplica):
    """outer.loop.Trainer around a real replica."""

    def __init__(self, outer: OuterSettings, speed: float, rng: random.Random, replica: Replica) -> None:
        super().__init__(outer, speed, rng, size=0)
        self.codec = replica.manifest.codec
        self.outbox, self.inbox = MemoryBox(replica.plan.box_size), MemoryBox(replica.plan.box_size)
        self._replica = replica

    @property
    def standing(self) -> Standing:
        return self._replica.standing

    @property
    def state(self) -> State:
        own = self._replica
        phi, delta, theta = (tuple(tensor.tolist()) for tensor in (own.phi, own.delta, own.theta))
        return State(phi, delta, theta)

    def take_over(self, donor: SimReplica) -> None:
        if not isinstance(donor, Learner):
            raise AssertionError("a learner cannot begin where something else is")
        own, other = self._replica, donor._replica
        own.phi.copy_(other.phi)
        own.theta.copy_(other.phi)
        own.standing = Standing(other.standing.round, 0, other.standing.loss)
        self.round = own.standing.round

    def loss(self) -> float:
        """Mean held-out loss of the fast weights, in nats per token."""
        return self._replica.evaluate()

    def _advance(self, steps: int) -> None:
        for _ in range(steps):
            self._replica.step()
        self._replica.report()

    def _write(self, state: State, subject: Subject) -> Description:
        return self._replica.prepare(_tensor(self.outbox), subject)

    def _look(self, state: State, *, probation: bool) -> Inspection:
        return self._replica.inspect(_tensor(self.outbox), _tensor(self.inbox), probation=probation)

    def _pair(self, before: State, partner_round: int, skipped: bytes) -> Applied:
        return self._told(self._replica.apply(_tensor(self.outbox), _tensor(self.inbox), partner_round, skipped))

    def _alone(self, before: State) -> Applied:
        return self._told(self._replica.solo())

    def _told(self, applied: Applied) -> Applied:
        self.round = applied.round
        return replace(applied, seconds=0.0)  # this machine's, and not the simulation's

    def _forget(self) -> None:
        super()._forget()
        self._replica.discard()


def _tensor(box: MemoryBox) -> Tensor:
    return torch.frombuffer(box.content, dtype=torch.uint8)
