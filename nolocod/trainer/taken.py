"""What training takes of this machine: memory by part, waits for text, and how much of its devices' speed.

The rule: nothing here is asked for in an inner step. Each card's speed was measured once, before the first; that of a processor
is not, which others use too. Of a loop that is its caller's own nobody knows what it takes.
"""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch

from nolocod.observe.events import MemoryTaken
from nolocod.trainer.estimate import operations
from nolocod.trainer.inner import KINDS, Inner
from nolocod.trainer.prefetch import Prefetched

if TYPE_CHECKING:
    from nolocod.trainer.replica import Replica


class Taken:
    """By `replica`, whose steps are ours or its caller's."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._waited = 0.0  # that were told
        self._is_ours = isinstance(replica.inner, Inner)
        self._step = operations(replica.layout, replica.manifest)
        self._speed = replica.speed if self._is_ours else 0.0

    def waited(self) -> float:
        """Seconds for text since this was asked the last time."""
        source, told = self._replica.source, self._waited
        self._waited = source.waited if isinstance(source, Prefetched) else 0.0
        return self._waited - told

    def mfu(self, steps: int, seconds: float) -> float | None:
        """Of so many inner steps with the run's tokens in so much time."""
        return steps * self._step / (seconds * self._speed) if self._speed and seconds else None

    def memory(self) -> MemoryTaken | None:
        replica, inner = self._replica, self._replica.inner
        if not isinstance(inner, Inner):
            return None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return MemoryTaken(
            weights=sum(one.nbytes for one in replica.model.parameters()),
            gradients=sum(one.nbytes for one in replica.model.parameters() if one.requires_grad),
            optimizer=sum(one.nbytes for kind in KINDS for one in inner.state(kind).values()),
            outer=replica.phi.nbytes + replica.delta.nbytes,
            exchange=replica.plan.exchange_size,
            peak=torch.cuda.max_memory_allocated(replica.device) if replica.device.type == "cuda" else most,
        )
