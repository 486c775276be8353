"""What lies on one device: the model, theta, of which its parameters are views, and the optimizer. In shards: shards.py.

The rule: every device of a node makes the same out of the run alone, so that theta, the optimizer's state and what each step
trains on are all that they must be told (ranks.py). Phi, delta and what exchanges take are the leader's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import blake3
import torch

from nolocod.errors import UnsupportedModelError
from nolocod.trainer.base_model import initial
from nolocod.trainer.capture import Plan
from nolocod.trainer.compiled import compile_layers
from nolocod.trainer.inner import Inner, sum_losses
from nolocod.trainer.model import check_length, check_memory, fast_kind, flatten, layout_of, read_config, step_kind
from nolocod.trainer.objective import objective_of
from nolocod.trainer.speed import speed

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.model import Place
    from nolocod.trainer.objective import Objective


class DevicePart:
    """The run's initial weights on a device, ready to train."""

    def __init__(self, manifest: Manifest, vocabulary: int, place: Place, *, leads: bool) -> None:
        """Raises RunFileError or ModelTooLargeError before anything large is allocated."""
        if place.bits != 16 and manifest.adapter is None:
            raise UnsupportedModelError("--base-bits is for runs that train an adapter, and this one trains the whole model.")
        self.device, self.name = place.device, str(place.device)
        config = read_config(manifest, vocabulary)
        check_length(config, manifest.inner.sequence)
        self.layout = layout_of(config, manifest.adapter)
        # first without boxes: of a model that is much too large even the list of its blocks takes a gigabyte
        at_once = check_memory(self.layout, config.vocab_size, manifest, 0, place)
        self.plan = Plan.of(manifest, self.layout)
        if leads:
            at_once = check_memory(self.layout, config.vocab_size, manifest, self.plan.exchange_size, place)
        self._group = place.group
        self._build(manifest, config, place, at_once, leads=leads)
        self.model.train()
        try_out = partial(self.inner.try_out, manifest.inner.sequence)
        if place.compiles and place.shards == 1 and compile_layers(self.model, try_out):
            self.name += " (compiled)"
        own = torch.tensor(_known_speed(self.device), dtype=torch.float64, device=self.device)
        if self._group is not None:
            self._group.add(own)  # when all are ready
        self.speed = own.item()

    speed: float
    """Operations per second of all devices' matrix products (speed.py); 0 on processors, which others use too."""
    inner: Inner
    model: torch.nn.Module
    theta: Tensor
    objective: Objective

    def _build(
        self,
        manifest: Manifest,
        config: Any,  # noqa: ANN401 - transformers has no common typed base
        place: Place,
        at_once: int,
        *,
        leads: bool,
    ) -> None:
        self.model = initial(manifest, config, place.base, fast_kind(self.device), place.bits)
        flat = torch.empty(self.layout.size, device=self.device)
        self.theta = flatten(dict(self.model.named_parameters()), self.layout, flat)
        self.model.to(self.device)  # the buffers, and what is frozen; the others are there already
        self.objective = objective_of(manifest, self.model)
        self.inner = Inner(self.model, manifest, self.device, at_once, self.objective)
        self._scale_loss()
        if place.spares_memory:
            self.inner.spare_memory()
        if self._group is not None:
            self.inner.share(self._group.add)

    def _scale_loss(self) -> None:
        """If this device or another computes in float16. All must ask."""
        whole = int(step_kind(self.device) != torch.float16)
        if not (whole if self._group is None else self._group.least(whole)):
            self.inner.scale_loss()

    def bring(self, span: slice) -> None:
        """Have the leader's `theta` hold there what inner steps made of it."""

    def take(self, span: slice) -> None:
        """Bring this device there where the leader's `theta` is."""
        assert self._group is not None
        self._group.spread(self.theta[span])

    def give(self, kind: str, span: slice) -> None:
        """Have the leader see what this device has (group.Give)."""

    def step(self, windows: Tensor, rate: float, weight: int | None = None, idle: int = 0) -> None:
        """Take an inner step, or this device's part of it (Inner.step)."""
        self.inner.step(windows, rate, weight, idle)

    def evaluate(self, windows: Tensor, idle: int = 0) -> float:
        """The mean loss of these windows and those of the other devices."""
        self.model.eval()
        loss, weight = sum_losses(self.model, windows, self.inner.at_once, self.device, self.objective, idle)
        self.model.train()
        if self._group is not None:
            sums = torch.tensor([loss, weight], dtype=torch.float64, device=self.device)
            self._group.add(sums)
            loss, weight = sums.tolist()
        return loss / weight


def _known_speed(device: torch.device) -> float:
    return speed(device) if device.type == "cuda" else 0.0


def draws(manifest: Manifest, name: str) -> int:
    """The seed of what `name` draws in training."""
    return int.from_bytes(blake3.blake3(f"draws {manifest.seed} {name}".encode()).digest(7), "big")
