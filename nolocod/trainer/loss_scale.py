"""A loss times a factor, so that small gradients are not zero in float16 (arXiv 1710.03740, section 3.2).

The rule: the factor falls as soon as a gradient is not finite, and rises after many that were; it lies on the device, and no
value is read back but now and then. Where even a factor of 1 is too high, the numbers themselves are, and float16 is not for
this model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_FIRST = 2.0**16
_FALL, _RISE = 0.25, 2.0
_RISE_AFTER = 2000
"""Steps in a row with a finite gradient."""
_LOOK_EVERY = 64
"""Steps, for the device is waited for."""


class LossScale:
    """Of one device. All devices of a node have the same, as a gradient of theirs is finite for all or none."""

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), _FIRST, device=device)
        self._finite = torch.zeros((), device=device)
        self._steps = 0

    def remove(self, gradients: list[Tensor]) -> None:
        """Take the factor out of the gradients of a loss that was multiplied by it."""
        if gradients:
            torch._foreach_mul_(gradients, self.factor.reciprocal())

    def follow(self, finite: Tensor) -> None:
        """After a step. `finite`: 1 if its gradient was, else 0."""
        self._finite = (self._finite + 1) * finite
        rises = self._finite >= _RISE_AFTER
        self._finite *= ~rises
        self.factor *= torch.where(finite == 0, _FALL, torch.where(rises, _RISE, 1.0))
        self._steps += 1

    @property
    def state(self) -> Tensor:
        """What a checkpoint holds."""
        return torch.stack([self.factor.cpu(), self._finite.cpu(), torch.tensor(float(self._steps))])

    def restore(self, state: Tensor) -> None:
        """Go on with that."""
        factor, finite, steps = state.tolist()
        self.factor.fill_(factor)
        self._finite.fill_(finite)
        self._steps = int(steps)

    @property
    def is_spent(self) -> bool:
        """Whether no factor was low enough. It waits for the device every 64 steps, and else says no."""
        return self._steps % _LOOK_EVERY == 0 and self.factor.item() < 1
