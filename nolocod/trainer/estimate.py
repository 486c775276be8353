"""What a run would need of a node: memory, bytes, computing, before anything is allocated.

The rule: exact where it can be (parameters, weights, boxes, messages), and a formula with its source where not
(floating-point operations, activations). Nothing is trained; `speed` alone computes, for half a second.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nolocod.trainer import muon
from nolocod.trainer.capture import Plan
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.model import BYTES_ON_HOST, activations, bytes_on_device, fast_kind, layout_of, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.model import Layout

EFFICIENCY = 0.4
"""Share of a bare matrix product's speed that an inner step reaches, by habit of transformers of some size; small ones
reach less."""
_SECONDS = 0.5
_SIDE = 1024


@dataclass(frozen=True)
class Estimate:
    """Bytes and floating-point operations. `activations` is what one micro-batch keeps for its backward pass."""

    parameters: int
    trained: int
    """As many of them; the others are frozen beside an adapter."""
    inner_steps: int
    on_device: int
    activations: int
    on_host: int
    message: int
    """The largest message of an exchange, each way."""
    operations: float
    """Of one inner step."""

    def step_seconds(self, speed: float) -> float:
        """How long an inner step takes on a device of `speed` operations per second in matrix products."""
        return self.operations / (EFFICIENCY * speed)

    def round_seconds(self, speed: float) -> float:
        """Inner steps from one outer step to the next."""
        return self.inner_steps * self.step_seconds(speed)

    def fewest_steps(self, speed: float, rate: int) -> int:
        """Inner steps from one outer step to the next that leave the line free half of the time."""
        return math.ceil(2 * self.exchange_seconds(rate) / self.step_seconds(speed))

    def exchange_seconds(self, rate: int) -> float:
        """How long an exchange takes on a line of `rate` bytes per second each way; latency is nothing beside it."""
        return self.message / rate


def estimate(manifest: Manifest, base: Path | None = None, frozen: torch.dtype = torch.bfloat16) -> Estimate:
    """Work it out; `base` is the folder of the model that the run starts from, and `frozen` the type in which the device holds
    it beside an adapter. RunFileError if the model is not possible."""
    config = read_config(manifest, make_tokenizer(manifest.data, base).vocabulary)
    layout = layout_of(config, manifest.adapter)
    inner = manifest.inner
    plan = Plan(manifest.codec, manifest.outer, layout.fragments(manifest.outer.turns))
    return Estimate(
        parameters=layout.size + layout.frozen,
        trained=layout.size,
        inner_steps=inner.steps,
        on_device=bytes_on_device(layout, manifest, frozen),
        activations=activations(layout, int(config.vocab_size), manifest, inner.batch),
        on_host=BYTES_ON_HOST * layout.size + plan.exchange_size,
        message=plan.box_size,
        operations=operations(layout, manifest),
    )


def operations(layout: Layout, manifest: Manifest) -> float:
    """Of one inner step: 6 per parameter and token, and 12 layers hidden sequence per token for attention (arXiv 2204.02311,
    appendix B); what is frozen has no gradient."""
    inner = manifest.inner
    forward = 4 / 3 if manifest.data.kind == "preference" else 1.0  # one more of the three passes' worth, by the reference
    each = 6.0 * layout.size + 4.0 * layout.frozen + 12.0 * layout.states * inner.sequence
    optimizer = sum(map(muon.operations, layout.matrices)) if inner.optimizer == "muon" else 0.0
    return forward * inner.tokens_per_step * each + optimizer


def speed(device: torch.device) -> float:
    """Floating-point operations per second of a matrix product on `device`, in the type that training computes in there."""
    kind = fast_kind(device) if device.type == "cuda" else torch.float32
    one = torch.randn(_SIDE, _SIDE, dtype=kind, device=device)
    one @ one  # the first one loads what computes
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        one @ one
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
    return done * 2.0 * _SIDE**3 / (time.perf_counter() - began)
