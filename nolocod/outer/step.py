"""The NoLoCo outer step on flat tensors: pure arithmetic, no model, no network.

The rule: one tensor per peer is enough. Each side sends s = beta (theta - phi) + gamma phi, and from the
sum of the group's messages every member computes (arXiv 2506.10911, Eq. 2 with the signs of Eq. 32)

    delta <- alpha delta + sum / n - gamma phi,    phi <- phi + delta.

Everything works element by element, so callers may pass pieces of the model one after another and never
hold a second model-sized tensor. All tensors of one call share shape, dtype (float32, or float64 in tests)
and device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from nolocod.run.manifest import Outer


def message(phi: Tensor, theta: Tensor, settings: Outer, out: Tensor | None = None) -> Tensor:
    """Return s = beta (theta - phi) + gamma phi, in `out` if given (which may be `theta` itself)."""
    return message_of_change(torch.sub(theta, phi, out=out), phi, settings, out)


def message_of_change(change: Tensor, phi: Tensor, settings: Outer, out: Tensor | None) -> Tensor:
    """Return s, made of `change` = theta - phi, in `out` if given (which may be `change` itself)."""
    if settings.beta == 1:  # the same, in one pass
        return torch.add(change, phi, alpha=settings.gamma, out=out)
    return torch.mul(change, settings.beta, out=out).add_(phi, alpha=settings.gamma)


def step(phi: Tensor, delta: Tensor, total: Tensor, n: int, settings: Outer) -> None:
    """Take the outer step in place on `phi` and `delta`.

    `total` is the sum of the messages of the `n` members of the group, this node's own included; a solo
    step is n = 1.
    """
    delta.mul_(settings.alpha).add_(total, alpha=1 / n).sub_(phi, alpha=settings.gamma)
    phi.add_(delta)


def add_own_part(theta: Tensor, delta: Tensor, change: Callable[[], Tensor], settings: Outer, sign: int = 1) -> None:
    """Add alpha delta - (1 - beta) change to `theta`, or take it away (`sign` -1): what a solo step would add, and a paired one
    adds without the partner. `change` is asked for where it counts.

    theta may have it as soon as the messages are made (an eager update, as in arXiv 2502.12996), before `step`.
    """
    theta.add_(delta, alpha=sign * settings.alpha)
    if settings.beta != 1:
        theta.sub_(change(), alpha=sign * (1 - settings.beta))


def late_part(total: Tensor, n: int, exact: Tensor, out: Tensor | None = None) -> Tensor:
    """Return total / n - s, where `exact` is this node's own message s before any rounding to the wire.

    theta, with `add_own_part` and this added, is where `step` brings phi, and what was trained meanwhile besides. Between two
    partners it is (s_j - s_i) / 2.
    """
    return torch.mul(total, 1 / n, out=out).sub_(exact)
