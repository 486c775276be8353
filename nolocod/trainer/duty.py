"""The share of the time in which the trainer computes: after each inner step it rests for the remainder.

The rule: a rest is no pause. What the parent asks for in it is done at once, and a share that is set counts at once too.
On a processor that others use too, a step's time is what it computed: a rest for the time that it stood in line would take from
a busy machine a hundredth where a tenth is allowed.
Where there is no rest, a GPU is asked for one inner step more than it has done, and times are by its own clock.
"""

from __future__ import annotations

from time import perf_counter, thread_time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nolocod.trainer.replica import Replica

_SLICE = 0.05
"""Seconds of a rest between two looks at what else there is to do."""


class Duty:
    """`share` may be set at any time, from 0 (excluded) to 1."""

    share = 1.0

    def __init__(self) -> None:
        self._ended = self._computed = 0.0  # of the last inner step
        self._asked: tuple[torch.cuda.Event, torch.cuda.Event] | None = (
            None  # where the one that may be under way begins and ends
        )

    def step(self, replica: Replica) -> float:
        """Take an inner step; returns its seconds, or those of the one before."""
        began, computed = perf_counter(), thread_time()
        took = None
        if replica.device.type == "cuda":
            took = self._ahead(replica)
        else:
            replica.step()
        self._ended = perf_counter()
        took = took or self._ended - began
        alone = replica.device.type == "cpu" and len(replica.devices) == 1  # who waits for another device has it compute
        self._computed = thread_time() - computed if alone else took
        return took

    def _ahead(self, replica: Replica) -> float | None:
        """Ask the card for an inner step, and wait for the one before; returns the seconds of that, None if there is none.
        With a rest, wait for this one: else the card would compute then what was only asked of it."""
        import torch

        with torch.cuda.device(replica.device):
            begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            replica.step()
            end.record()
        before, self._asked = self._asked, (begin, end)
        if self.share < 1:
            before, self._asked = self._asked, None
        if before is None:
            return None
        before[1].synchronize()
        return float(before[0].elapsed_time(before[1])) / 1000

    @property
    def rest(self) -> float:
        """Seconds that follow the last inner step."""
        return self._computed * (1 / self.share - 1)

    @property
    def left(self) -> float:
        """Seconds of rest that are left."""
        return max(0.0, self._ended + self.rest - perf_counter())

    @property
    def slice(self) -> float:
        """Seconds for which to look for what else there is to do."""
        return min(self.left, _SLICE)
