"""What an outer step does with theta where that lies on a GPU: it waits in the card's queue, behind the inner steps there.

The rule: nobody waits for the card but `wait`, which is called beside training, and between two inner steps nothing crosses the
bus that could be brought before (ahead.py). What could not comes by a pinned copy of its own, in pieces, so that the card needs
little memory for it: phi and delta may change as soon as a call returns, `kept` after `wait` alone. The arithmetic is what
capture.py does block by block, where theta is near.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from nolocod.errors import TrainerError
from nolocod.outer import step
from nolocod.outer.codec.base import rounded_with
from nolocod.outer.codec.blocks import pieces
from nolocod.trainer.ahead import Brought
from nolocod.trainer.bus import at, sent

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.run.manifest import Outer
    from nolocod.trainer.ahead import Ahead


class Queued:
    """Theta where a capture's fragment lies, a view; `kept` is the capture's, in main memory; the seed draws the rounding, on
    the device. `brought`: what is there of phi, which becomes the kept change, and of delta."""

    def __init__(self, theta: Tensor, kept: Tensor, seed: int, ahead: Ahead, brought: Brought | None) -> None:
        self._theta, self.kept, self._ahead = theta, kept, ahead
        self._brought = brought or _nothing()
        self._pinned = theta.is_cuda
        self._random = torch.Generator(theta.device).manual_seed(seed)
        self._sum = torch.empty((), pin_memory=self._pinned)
        self._last: list[torch.cuda.Event] = []

    def keep(self, phi: Tensor) -> None:
        """Have the change theta - phi kept. It is there after `wait`."""
        total, far = torch.zeros((), device=self._theta.device), self._brought.phi
        if far is None:
            self._ahead.join()  # an earlier capture may be on its way to the same memory
        for piece in pieces(len(phi)):
            change = self._theta[piece] - self._there(phi, piece, far)
            total += change.sum()
            if self.kept.dtype == torch.bfloat16:
                noise = torch.randint(0, 1 << 16, change.shape, dtype=torch.int32, generator=self._random, device=change.device)
                rounded_with(noise, change)
            if far is None:
                self._bring_back(piece, change)
            else:
                far[piece].copy_(change)
        self._sum.copy_(total, non_blocking=self._pinned)
        self._mark()
        if far is not None:
            with self._ahead.behind():
                for piece in pieces(len(phi)):
                    self._bring_back(piece, far[piece])
                self._mark()

    def _there(self, near: Tensor, piece: slice, brought: Tensor | None) -> Tensor:
        """A piece of what is `near`, on the device: `brought`, or by a copy of its own."""
        return sent(near[piece], self._theta.device) if brought is None else brought[piece]

    def _bring_back(self, piece: slice, change: Tensor) -> None:
        self.kept[piece].copy_(change.to(self.kept.dtype), non_blocking=self._pinned)

    def check(self) -> None:
        """Wait for the kept change. TrainerError if it is not finite."""
        self.wait()
        if not math.isfinite(self._sum.item()):
            raise TrainerError("the weights are not finite.")

    def add_own_part(self, delta: Tensor, settings: Outer, sign: int) -> None:
        for piece in pieces(len(delta)):
            change = partial(self._change, piece)
            step.add_own_part(self._theta[piece], self._there(delta, piece, self._brought.delta), change, settings, sign)
        self._mark()

    def _change(self, piece: slice) -> Tensor:
        """The kept one, as float32 on the device."""
        return self._there(self.kept, piece, self._brought.phi).float()

    def bring_late(self) -> None:
        """What theta is still to get lies in `kept` now: have it there when it is added. Beside training."""
        self._ahead.bring_late(self._brought, self.kept)

    def add_kept(self) -> None:
        """What theta is still to get, which `kept` holds now. The next capture is kept behind this in the card's queue."""
        for piece in pieces(len(self.kept)):
            self._theta[piece].add_(self._there(self.kept, piece, self._brought.late))
        self._end()

    def copy(self, phi: Tensor) -> None:
        """Have theta be where `phi` is."""
        for piece in pieces(len(phi)):
            self._theta[piece].copy_(sent(phi[piece], self._theta.device))
        self._end()

    def _end(self) -> None:
        """What was brought is not read any more: the next capture may have the memory."""
        self._mark()
        self._brought = _nothing()

    def wait(self) -> None:
        """Until all that was asked for is done."""
        with at(self._theta.device):
            for one in self._last:
                one.synchronize()

    def _mark(self) -> None:
        """Here ends what was asked for so far."""
        if (last := self._ahead.mark()) is not None:
            self._last.append(last)


def _nothing() -> Brought:
    return Brought(0, slice(0), None, None)
