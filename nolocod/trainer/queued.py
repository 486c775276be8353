"""What an outer step does with theta where that lies on a GPU: it waits in the card's queue, behind the inner steps there.

The rule: nobody waits for the card but `wait`, which is called beside training. What comes from main memory goes by a pinned
copy of its own, so phi and delta may change as soon as a call returns; `kept` may after `wait` alone. It all goes in pieces, so
that the card needs little memory for it. The arithmetic is what capture.py does block by block, where theta is near.
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
from nolocod.trainer.devices import sent

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.run.manifest import Outer


class Queued:
    """Theta where a capture's fragment lies, a view; `kept` is the capture's, in main memory; the seed draws the rounding, on
    the device."""

    def __init__(self, theta: Tensor, kept: Tensor, seed: int) -> None:
        self._theta, self.kept = theta, kept
        self._pinned = theta.is_cuda
        self._random = torch.Generator(theta.device).manual_seed(seed)
        self._sum = torch.empty((), pin_memory=self._pinned)
        self._last: torch.cuda.Event | None = None

    def keep(self, phi: Tensor) -> None:
        """Have the change theta - phi kept. It is there after `wait`."""
        total = torch.zeros((), device=self._theta.device)
        for piece in pieces(len(phi)):
            change = self._theta[piece] - sent(phi[piece], self._theta.device)
            total += change.sum()
            if self.kept.dtype == torch.bfloat16:
                noise = torch.randint(0, 1 << 16, change.shape, dtype=torch.int32, generator=self._random, device=change.device)
                change = rounded_with(noise, change).bfloat16()
            self.kept[piece].copy_(change, non_blocking=self._pinned)
        self._sum.copy_(total, non_blocking=self._pinned)
        self._mark()

    def check(self) -> None:
        """Wait for the kept change. TrainerError if it is not finite."""
        self.wait()
        if not math.isfinite(self._sum.item()):
            raise TrainerError("the weights are not finite.")

    def add_own_part(self, delta: Tensor, settings: Outer, sign: int) -> None:
        device = self._theta.device
        for piece in pieces(len(delta)):
            change = partial(self._change, piece)
            step.add_own_part(self._theta[piece], sent(delta[piece], device), change, settings, sign)
        self._mark()

    def _change(self, piece: slice) -> Tensor:
        """The kept one, as float32 on the device."""
        return sent(self.kept[piece], self._theta.device).float()

    def add_kept(self) -> None:
        """What theta is still to get, which `kept` holds now. The next capture is kept behind this in the card's queue."""
        for piece in pieces(len(self.kept)):
            self._theta[piece].add_(sent(self.kept[piece], self._theta.device))

    def copy(self, phi: Tensor) -> None:
        """Have theta be where `phi` is."""
        for piece in pieces(len(phi)):
            self._theta[piece].copy_(sent(phi[piece], self._theta.device))

    def wait(self) -> None:
        """Until all that was asked for is done."""
        if self._last is not None:
            self._last.synchronize()

    def _mark(self) -> None:
        if self._pinned:
            last = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
            last.record(torch.cuda.current_stream(self._theta.device))
            self._last = last
