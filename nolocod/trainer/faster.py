"""Whether messages are made faster on a GPU than on the processor: tried as a trainer loads.

The rule: both meet each other in exchanges of random weights, and must come out with the same slow weights. Where the GPU is
slower, has no memory left or reads a single value otherwise, it is the processor.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nolocod.errors import RejectedTensorError
from nolocod.outer.codec.blocks import BLOCK, fragments_of
from nolocod.trainer.capture import Capture, Plan, Weights
from nolocod.trainer.made_on import AT_ONCE, PROCESSOR, MadeOn

if TYPE_CHECKING:
    from collections.abc import Callable

_TURNS = 4
"""Exchanges: the first one is with distances that nobody knows, the second one warms up."""
_WARM_UP = 2
_PHI, _CHANGE = 0.02, 1e-3
_SAME = 1e-6
"""Most that rounding makes of it, a hundredth of the codec's steps."""


def faster(plan: Plan, device: torch.device) -> MadeOn:
    """Where a replica that trains on `device` makes its messages."""
    return chosen(plan, MadeOn(device, AT_ONCE)) if device.type == "cuda" else PROCESSOR


def chosen(plan: Plan, far: MadeOn, clock: Callable[[], float] = time.perf_counter) -> MadeOn:
    """`far` or the processor."""
    sizes = (2 * far.at_once * BLOCK,)
    tried = Plan(plan.codec, plan.settings, fragments_of(sizes, 1))
    generator = torch.Generator().manual_seed(0)
    both = [_Tried(tried, made_on, generator) for made_on in (PROCESSOR, far)]
    try:
        for turn in range(_TURNS):
            for one in both:
                one.write(turn, clock)
            for one, other in (both, both[::-1]):
                one.meet(other, clock)
    except (RuntimeError, RejectedTensorError):  # an operation that it does not have, or no numbers
        return PROCESSOR
    near, there = both
    if there.ran_out or not (near.weights.phi - there.weights.phi).abs().max() < _SAME:
        return PROCESSOR
    return far if sum(there.took[_WARM_UP:]) < sum(near.took[_WARM_UP:]) else PROCESSOR


@dataclass
class _Tried:
    """Random weights, whose messages are made there."""

    plan: Plan
    made_on: MadeOn
    generator: torch.Generator
    took: list[float] = field(default_factory=list)
    """Seconds of each exchange."""
    ran_out: bool = False

    def __post_init__(self) -> None:
        size = self.plan.fragments[0].size
        phi = torch.randn(size, generator=torch.Generator().manual_seed(1)) * _PHI
        self.weights = Weights.of(phi.clone(), phi, torch.zeros(size), self.plan.fragments, made_on=self.made_on)
        self.outbox, self.inbox = (torch.zeros(self.plan.box_size, dtype=torch.uint8) for _ in range(2))

    def write(self, turn: int, clock: Callable[[], float]) -> None:
        self.weights.theta.add_(torch.randn(self.weights.theta.shape, generator=self.generator), alpha=_CHANGE)
        self.capture = Capture(self.plan, self.weights, 0, turn)
        self.capture.keep()
        began = clock()
        self.capture.write(self.outbox)
        self.took.append(clock() - began)

    def meet(self, other: _Tried, clock: Callable[[], float]) -> None:
        self.inbox.copy_(other.outbox)
        began = clock()
        self.capture.inspect(self.inbox)
        self.capture.step(self.inbox, b"")
        self.took[-1] += clock() - began
        self.ran_out |= self.capture.ran_out
        self.capture.merge(trained_on=False)
