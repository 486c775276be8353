"""`python -m tests.bench.sizes MILLIONS ... [--device cuda]`: an outer step's arithmetic for weights of so many values,
in ns for each.

The rule: all that one node does in an exchange about a fifth of its weights but the moving of bytes, on one core, in a process
of its own; with --device, messages are made and read there, and the rest stays on the core; with --compiled, by the loops that
large models have on the core. The message that comes is the one that went.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import torch

from nolocod.run.manifest import Outer
from nolocod.trainer.capture import Capture, Plan, Weights
from nolocod.trainer.made_on import AT_ONCE, COMPILED, PROCESSOR, MadeOn
from nolocod.trainer.model import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

TURNS = 5
_MATRIX = 2000, 2000
_PIECE = 1 << 20
_CHANGE = 1e-3


def measured(values: float, made_on: MadeOn) -> dict[str, float]:
    """Of each part the median of so many turns."""
    layout = _layout(max(1, round(values / (_MATRIX[0] * _MATRIX[1]))))
    plan = Plan("modulo8", Outer(alpha=0.2, beta=1.0, gamma=1.0), layout.fragments(TURNS))
    phi, theta, delta = (torch.zeros(layout.size) for _ in range(3))
    for piece in torch.split(phi, _PIECE):
        piece.normal_(0, 0.02)
    for own, slow in zip(torch.split(theta, _PIECE), torch.split(phi, _PIECE), strict=True):
        own.normal_(0, _CHANGE).add_(slow)
    weights = Weights.of(theta, phi, delta, plan.fragments, made_on=made_on)
    memory = torch.frombuffer(mmap.mmap(-1, plan.boxes_size), dtype=torch.uint8)
    outbox, inbox = memory[plan.outbox_offset :], memory[: plan.box_size]
    told: dict[str, list[float]] = {}
    for turn in range(-TURNS, TURNS):  # the first ones warm up, and have no distances yet: they travel in two bytes
        seconds = _exchange(plan, weights, turn, outbox, inbox)
        for name, took in seconds.items() if turn >= 0 else ():
            told.setdefault(name, []).append(took)
    return {name: statistics.median(times) for name, times in told.items()}


def _layout(count: int) -> Layout:
    return Layout(tuple(f"{number:06d}" for number in range(count)), (_MATRIX,) * count, (), 0)


def _exchange(plan: Plan, weights: Weights, turn: int, outbox: torch.Tensor, inbox: torch.Tensor) -> dict[str, float]:
    """Nanoseconds of each part, for each value."""
    took: dict[str, float] = {}

    def timed(name: str, part: Callable[[], T]) -> T:
        began = time.perf_counter()
        done = part()
        took[name] = time.perf_counter() - began
        return done

    def kept() -> Capture:
        capture = Capture(plan, weights, turn % TURNS, turn + 1)
        capture.keep()
        return capture

    capture = timed("capture", kept)
    timed("own part", capture.start)
    size = timed("write", lambda: capture.write(outbox)).size
    inbox[:size].copy_(outbox[:size].clone())  # they share memory
    timed("inspect", lambda: capture.inspect(inbox))
    timed("step", lambda: capture.step(inbox, b""))
    timed("merge", lambda: capture.merge(trained_on=True))
    return {name: seconds / capture.fragment.size * 1e9 for name, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("millions", type=float, nargs="+")
    parser.add_argument("--device", default="cpu", help="where messages are made")
    parser.add_argument("--compiled", action="store_true", help="by compiled loops")
    options = parser.parse_args()
    if len(options.millions) > 1:  # each has a process, whose memory nobody used before
        given = ["--device", options.device, *["--compiled"] * options.compiled]
        for size in options.millions:
            subprocess.run([sys.executable, "-m", "tests.bench.sizes", str(size), *given], check=True)
        return
    torch.set_num_threads(1)
    near = COMPILED if options.compiled else PROCESSOR
    size, made_on = options.millions[0], near if options.device == "cpu" else MadeOn(torch.device(options.device), AT_ONCE)
    took = measured(size * 1e6, made_on)
    parts = ", ".join(f"{name} {ns:.2f}" for name, ns in took.items())
    sys.stdout.write(f"{size:g} M values, ns for each on {made_on}: {parts}; in all {sum(took.values()):.2f}\n")


if __name__ == "__main__":
    main()
