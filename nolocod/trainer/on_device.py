"""What lies on one device: the model, theta, of which its parameters are views, and the optimizer.

The rule: every device of a node makes the same out of the run alone, so that theta, the optimizer's state and what each step
trains on are all that they must be told (ranks.py). Phi, delta and what exchanges take are the leader's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import blake3

from nolocod.errors import UnsupportedModelError
from nolocod.trainer.base_model import initial
from nolocod.trainer.capture import Plan
from nolocod.trainer.inner import Inner
from nolocod.trainer.model import check_length, check_memory, fast_kind, flatten, layout_of, read_config
from nolocod.trainer.objective import objective_of

if TYPE_CHECKING:
    from nolocod.run.manifest import Manifest
    from nolocod.trainer.model import Place


class DevicePart:
    """The run's initial weights on a device, ready to train."""

    def __init__(self, manifest: Manifest, vocabulary: int, place: Place, *, leads: bool) -> None:
        """Raises RunFileError or ModelTooLargeError before anything large is allocated."""
        if place.bits != 16 and manifest.adapter is None:
            raise UnsupportedModelError("--base-bits is for runs that train an adapter, and this one trains the whole model.")
        self.device = place.device
        config = read_config(manifest, vocabulary)
        check_length(config, manifest.inner.sequence)
        self.layout = layout_of(config, manifest.adapter)
        # first without boxes: of a model that is much too large even the list of its blocks takes a gigabyte
        at_once = check_memory(self.layout, config.vocab_size, manifest, 0, place)
        self.plan = Plan.of(manifest, self.layout)
        if leads:
            at_once = check_memory(self.layout, config.vocab_size, manifest, self.plan.exchange_size, place)
        self.model = initial(manifest, config, place.base, fast_kind(self.device), place.bits)
        self.theta = flatten(dict(self.model.named_parameters()), self.layout, self.device)
        self.model.to(self.device)  # the buffers, and what is frozen; the others are there already
        self.objective = objective_of(manifest, self.model)
        self.inner = Inner(self.model, manifest, self.device, at_once, self.objective)
        if place.spares_memory:
            self.inner.spare_memory()
        self.model.train()


def draws(manifest: Manifest, name: str) -> int:
    """The seed of what `name` draws in training."""
    return int.from_bytes(blake3.blake3(f"draws {manifest.seed} {name}".encode()).digest(7), "big")
