"""Replicas that walk at random: the stability of the outer step, without training.

The rule: between outer steps every weight of every replica changes by noise of unit variance; what follows is the
product's own outer step (`outer.py`) with a new random partner each time. The variance between replicas then stays
bounded only if 0 < gamma < 2 (1 - alpha^2), and is smallest at gamma = 1 - alpha^2. Two replicas always meet each other
and show nothing: it takes many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nolocod.outer import step

ALPHAS = (0.0, 0.2, 0.5, 0.9)
COUNTS = (2, 8, 64)
STEPS = 300
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.05, 1.25)
"""Of the bound: the values of gamma that are tried."""
BETA = 0.7
_WEIGHTS = 256
"""Of each replica: what is told is a mean over them."""


@dataclass(frozen=True)
class Settings:
    """As `outer.Settings`; a manifest may have no gamma outside of the bound, and it is the bound that is looked at."""

    alpha: float
    beta: float
    gamma: float


@dataclass(frozen=True)
class Walk:
    """Variance over `count` replicas of the slow weights after STEPS outer steps, in variances of one change, and after
    half as many."""

    count: int
    alpha: float
    gamma: float
    half_way: float
    variance: float

    @property
    def bound(self) -> float:
        """Where gamma lets the spread between many replicas grow without end."""
        return 2 * (1 - self.alpha**2)

    @property
    def grows(self) -> bool:
        """Whether it at least doubled in the second half."""
        return self.variance > 2 * self.half_way


def walks(seed: int = 0) -> tuple[Walk, ...]:
    """All of ALPHAS, at SHARES of the bound, for COUNTS of replicas; the same seed gives the same figures."""
    settings = [Settings(alpha, BETA, share * 2 * (1 - alpha**2)) for alpha in ALPHAS for share in SHARES]
    return tuple(walk(count, one, seed) for one in settings for count in COUNTS)


def walk(count: int, settings: step.Settings, seed: int) -> Walk:
    """Take `count` replicas, an even number, through STEPS outer steps."""
    draw = torch.Generator().manual_seed(seed)
    shape = (count, _WEIGHTS)
    phi, delta = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    half_way = math.nan
    for number in range(1, STEPS + 1):
        theta = phi + torch.randn(shape, generator=draw, dtype=torch.float64)
        order = torch.randperm(count, generator=draw)
        one, other = order[::2], order[1::2]
        messages = step.message(phi, theta, settings)
        total = torch.empty_like(messages)
        total[one] = total[other] = messages[one] + messages[other]
        step.step(phi, delta, total, 2, settings)
        if number == STEPS // 2:
            half_way = _variance(phi)
    return Walk(count, settings.alpha, settings.gamma, half_way, _variance(phi))


def _variance(phi: torch.Tensor) -> float:
    return phi.var(0, correction=0).mean().item()
