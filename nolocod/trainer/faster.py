"""Where messages are made fastest: by compiled loops for large models, on a GPU where that is faster. Tried as a trainer loads.

The rule: both meet each other in exchanges of random weights, and must come out with the same slow weights. What does not work
here, has no memory left or reads a single value otherwise is left: it is the processor then, and torch's operations.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec import WITH_LOOPS
from nolocod.outer.codec.blocks import BLOCK, fragments_of
from nolocod.trainer.capture import Capture, Plan, Weights
from nolocod.trainer.made_on import AT_ONCE, COMPILED, PROCESSOR, MadeOn

if TYPE_CHECKING:
    from collections.abc import Callable

WORTH = 1 << 25
"""Values from which on loops are compiled: what compiles them takes a second to load, and 150 MB."""
_TURNS = 4
"""Exchanges: the first one is with distances that nobody knows, the second one warms up."""
_WARM_UP = 2
_PHI, _CHANGE = 0.02, 1e-3
_SAME = 1e-6
"""Most that rounding makes of it, a hundredth of the codec's steps."""


def faster(plan: Plan, device: torch.device) -> MadeOn:
    """Where a replica that trains on `device` makes its messages."""
    near = on_processor(plan, sum(fragment.size for fragment in plan.fragments))
    return chosen(plan, MadeOn(device, AT_ONCE), near) if device.type == "cuda" else near


def on_processor(plan: Plan, size: int) -> MadeOn:
    """How it does messages of so many values."""
    return COMPILED if plan.codec in WITH_LOOPS and size >= WORTH and _met(plan, PROCESSOR, COMPILED) else PROCESSOR


def chosen(plan: Plan, far: MadeOn, near: MadeOn = PROCESSOR, clock: Callable[[], float] = time.perf_counter) -> MadeOn:
    """`far` if it is faster."""
    took = _met(plan, near, far, clock)
    return far if took and took[1] < took[0] else near


def _met(plan: Plan, near: MadeOn, other: MadeOn, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float] | None:
    """Seconds that exchanges took both; None if `other` does not do."""
    sizes = (2 * other.at_once * BLOCK,)
    tried = Plan(plan.codec, plan.settings, fragments_of(sizes, 1))
    generator = torch.Generator().manual_seed(0)
    try:
        both = [_Tried(tried, made_on, generator) for made_on in (near, other)]
        for turn in range(_TURNS):
            for one in both:
                one.write(turn, clock)
            for one, partner in (both, both[::-1]):
                one.meet(partner, clock)
    except Exception:  # noqa: BLE001 - an operation that it does not have, no numbers, a compiler that fails, or that is not there
        return None
    own, others = both
    if others.ran_out or not (own.weights.phi - others.weights.phi).abs().max() < _SAME:
        return None
    return sum(own.took[_WARM_UP:]), sum(others.took[_WARM_UP:])


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
