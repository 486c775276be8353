"""The share of the time in which the trainer computes: after each inner step it rests for the remainder.

The rule: a rest is no pause. What the parent asks for in it is done at once, and a share that is set counts at once too.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from queue import SimpleQueue

    from nolocod.trainer import pipe
    from nolocod.trainer.replica import Replica

_SLICE = 0.05
"""Seconds of a rest between two looks at what else there is to do."""


class Duty:
    """`share` may be set at any time, from 0 (excluded) to 1."""

    share = 1.0

    def __init__(self) -> None:
        self._ended, self._took = 0.0, 0.0  # the last inner step

    def step(self, replica: Replica) -> float:
        """Take an inner step; returns its seconds."""
        began = perf_counter()
        replica.step()
        if self.share < 1 and replica.device.type == "cuda":
            import torch

            torch.cuda.synchronize(replica.device)  # else the card would compute in the rest what was only asked of it
        self._ended = perf_counter()
        self._took = self._ended - began
        return self._took

    @property
    def left(self) -> float:
        """Seconds of rest that are left."""
        return max(0.0, self._ended + self._took * (1 / self.share - 1) - perf_counter())

    def next(self, requests: SimpleQueue[pipe.Request | None], *, wait: bool) -> pipe.Request | None:
        """The next request: when there is one if it is to `wait`, else within a part of the rest; queue.Empty if none came."""
        return requests.get() if wait else requests.get(timeout=min(self.left, _SLICE))
