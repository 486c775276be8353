"""The product's trainer process, whose inner step moves all weights at random.

The rule: nothing else is otherwise. Two trainers of 500 M parameters need more than 24 GB with an optimizer, and their inner
steps minutes; what an exchange takes does not depend on why the weights differ.
"""

from __future__ import annotations

import torch

from nolocod.trainer import worker
from nolocod.trainer.replica import Replica

_PIECE = 1 << 20
_MOVE = 1e-4


def _move(self: Replica) -> None:
    self.train_on()
    for piece in torch.split(self.weights.theta, _PIECE):
        piece.add_(torch.randn(len(piece)), alpha=_MOVE)
    self.count()


if __name__ == "__main__":
    Replica.step = _move  # type: ignore[method-assign] # whoever opens it knows the class by its name
    worker.main()
