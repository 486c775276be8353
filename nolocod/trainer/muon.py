"""NorMuon for the layers' matrices: momentum whose singular values are all made about one, as Muon's (arXiv 2502.16982), and
then rows of alike size (arXiv 2510.05491); columns where a matrix has more of these, as its rows are alike already.

The rule: an update of RMS 0.2 whatever the matrix's shape, so that one learning rate serves these matrices and what AdamW
trains beside them. `torch.optim.Muon` computes as much one matrix at a time, in bfloat16 where a CPU has none, and cannot
leave a step out without asking the device; here equal shapes go together, state and all, in the fastest type that the device
multiplies: as many operations per shape, however many matrices have it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
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
        self.momentum, self.squares = ([torch.empty(0)] * len(shapes) for _ in range(2))
        self._stacks: list[_Stack] = []
        for shape in dict.fromkeys(shapes):
            alike = [index for index, one in enumerate(shapes) if one == shape]
            count = max(1, _MOST // shape.numel())
            for start in range(0, len(alike), count):
                self._stacks.append(self._stack(shape, alike[start : start + count], matrices))

    def _stack(self, shape: torch.Size, numbers: Sequence[int], matrices: Sequence[Tensor]) -> _Stack:
        """Of the matrices with these `numbers`."""
        here = [matrices[number] for number in numbers]
        rows = len(here[0])
        momentum = here[0].new_zeros((len(here), *here[0].shape), requires_grad=False)
        squares = here[0].new_full((len(here), *lines(shape, rows)), _mean_square(shape), requires_grad=False)
        for number, one, other in zip(numbers, momentum, squares, strict=True):
            self.momentum[number], self.squares[number] = one, other
        return _Stack(shape, here, momentum, squares)

    def _orthogonal(self, stack: Tensor, rows: int) -> Tensor:
        return orthogonal(stack)

    def _columns(self, stack: Tensor, rows: int) -> Tensor:
        """The mean squares of the columns of matrices with so many `rows`."""
        return stack.square().sum(1, keepdim=True) / rows

    @torch.no_grad()
    def step(self, rate: float, decay: float, finite: Tensor) -> None:
        """Take one step at learning rate `rate` with weight decay `decay`; none, bit for bit, where `finite` is 0 (float32)."""
        kept, takes = 1 - finite * (rate * decay), finite > 0
        for stack in self._stacks:
            shape, momentum, squares = stack.shape, stack.momentum, stack.squares
            gradients = torch.stack([torch.zeros_like(one) if one.grad is None else one.grad for one in stack.matrices])
            # One that is not finite must not touch the momentum; the update that this gives is multiplied by 0.
            gradients = torch.where(takes, gradients, momentum)
            momentum.lerp_(gradients, 1 - MOMENTUM)
            updates = self._orthogonal(gradients.lerp_(momentum, MOMENTUM), shape[0]).float()
            found = updates.square().mean(2, keepdim=True) if _by_rows(shape) else self._columns(updates, shape[0])
            squares.lerp_(torch.where(takes, found, squares), 1 - _MEMORY)
            sizes = squares.clamp(min=_LEAST * _mean_square(shape)).rsqrt() * (finite * (-rate * _UPDATE))
            torch.mul(updates, sizes, out=gradients)  # whose rows lie as the matrices' do: one kernel adds them all
            torch._foreach_mul_(stack.matrices, kept)
            torch._foreach_add_(stack.matrices, gradients.unbind())


@dataclass(frozen=True)
class _Stack:
    """What is computed together: matrices of one `shape`, whole, and their state, a row of it each."""

    shape: torch.Size
    matrices: list[Tensor]
    momentum: Tensor
    squares: Tensor


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
    """Bytes that a step takes beside gradients and momentum, in float32: of the matrices that go together their directions, and
    three more in the iteration."""
    together = (min(count, max(1, _MOST // math.prod(shape))) * math.prod(shape) for shape, count in Counter(shapes).items())
    return 4 * 4 * max(together, default=0)


def operations(shape: tuple[int, ...]) -> float:
    """Floating-point operations of one step for a matrix of `shape`."""
    small, large = sorted(shape)
    return _STEPS * (4.0 * small**2 * large + 2.0 * small**3)
