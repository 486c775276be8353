"""NorMuon for the layers' matrices: momentum whose singular values are all made about one, as Muon's (arXiv 2502.16982), and
then rows of alike size (arXiv 2510.05491); columns where a matrix has more of these, as its rows are alike already.

The rule: an update of RMS 0.2 whatever the matrix's shape, so that one learning rate serves these matrices and what AdamW
trains beside them. `torch.optim.Muon` computes as much one matrix at a time, in bfloat16 where a CPU has none, and cannot
leave a step out without asking the device; here equal shapes go together, in the fastest type that the device multiplies.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch

from nolocod.trainer.model import fast_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MOMENTUM = 0.95
_MEMORY, _LEAST = 0.95, 0.01
"""Of a line's mean square: how much of it is kept at a step, and the least share of the matrix's that counts as a line's. A
line without a gradient stays at 0, and one with next to none is made ten times as large at most."""
_UPDATE = 0.2
"""Root mean square of an update's elements, as AdamW's are as a rule."""
_STEPS, _A, _B, _C = 5, 3.4445, -4.7750, 2.0315
"""Of Newton and Schulz, and their polynomial's coefficients."""
_MOST = 1 << 24
"""Elements that are computed at once."""


class Muon:
    """The optimizer of `matrices`, which have two dimensions each. Of each, in their order: `momentum`; and `squares`, the mean
    squares of the rows of what is made of it, over the last steps (rows, 1), or of its columns if it has more (1, columns)."""

    def __init__(self, matrices: Sequence[Tensor], shapes: Sequence[torch.Size]) -> None:
        """Of matrices of these `shapes`, whole as they are here, or some rows of each (shards.py)."""
        self.momentum = [torch.zeros_like(matrix, requires_grad=False) for matrix in matrices]
        self.squares = [
            matrix.new_full(lines(shape, len(matrix)), _mean_square(shape), requires_grad=False)
            for matrix, shape in zip(matrices, shapes, strict=True)
        ]
        self._stacks: list[tuple[torch.Size, list[tuple[Tensor, Tensor, Tensor]]]] = []
        states = list(zip(matrices, self.momentum, self.squares, strict=True))
        for shape in dict.fromkeys(shapes):
            alike = [state for state, one in zip(states, shapes, strict=True) if one == shape]
            count = max(1, _MOST // shape.numel())
            self._stacks += [(shape, alike[start : start + count]) for start in range(0, len(alike), count)]

    def _orthogonal(self, stack: Tensor, rows: int) -> Tensor:
        return orthogonal(stack)

    def _columns(self, stack: Tensor, rows: int) -> Tensor:
        """The mean squares of the columns of matrices with so many `rows`."""
        return stack.square().sum(1, keepdim=True) / rows

    @torch.no_grad()
    def step(self, rate: float, decay: float, finite: Tensor) -> None:
        """Take one step at learning rate `rate` with weight decay `decay`; none, bit for bit, where `finite` is 0 (float32)."""
        kept, takes = 1 - finite * (rate * decay), finite > 0
        for shape, stack in self._stacks:
            directions = []
            for matrix, momentum, _ in stack:
                gradient = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
                # One that is not finite must not touch the momentum; the update that this gives is multiplied by 0.
                gradient = torch.where(takes, gradient, momentum)
                momentum.lerp_(gradient, 1 - MOMENTUM)
                directions.append(gradient.lerp_(momentum, MOMENTUM))
            updates = self._orthogonal(torch.stack(directions), shape[0]).float()
            found = updates.square().mean(2, keepdim=True) if _by_rows(shape) else self._columns(updates, shape[0])
            sizes = finite * (-rate * _UPDATE)
            for (matrix, _, squares), update, new in zip(stack, updates, found, strict=True):
                squares.lerp_(torch.where(takes, new, squares), 1 - _MEMORY)
                matrix.mul_(kept).addcmul_(update, squares.clamp(min=_LEAST * _mean_square(shape)).rsqrt() * sizes)


def _by_rows(shape: Sequence[int]) -> bool:
    """Whether it is rows that are made alike of a matrix of `shape`, or columns."""
    return shape[0] >= shape[1]


def lines(shape: Sequence[int], rows: int) -> tuple[int, int]:
    """The shape of `squares` where so many `rows` are here of a matrix of `shape`."""
    return (rows, 1) if _by_rows(shape) else (1, shape[1])


def _mean_square(shape: Sequence[int]) -> float:
    """Of the elements of a matrix of `shape` whose singular values are one."""
    return 1 / max(shape)


def orthogonal(stack: Tensor) -> Tensor:
    """Bring the singular values of each matrix of `stack` near 1."""
    wide = stack if stack.size(1) <= stack.size(2) else stack.mT
    found = wide.to(fast_kind(stack.device))
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), found, beta=_A)
    return found if wide is stack else found.mT


def scratch(shapes: Sequence[tuple[int, ...]]) -> int:
    """Bytes that a step takes beside gradients and momentum, in float32: of the matrices that go together their directions, the
    stack of these, and two more in the iteration."""
    together = (min(count, max(1, _MOST // math.prod(shape))) * math.prod(shape) for shape, count in Counter(shapes).items())
    return 4 * 4 * max(together, default=0)


def operations(shape: tuple[int, ...]) -> float:
    """Floating-point operations of one step for a matrix of `shape`."""
    small, large = sorted(shape)
    return _STEPS * (4.0 * small**2 * large + 2.0 * small**3)
