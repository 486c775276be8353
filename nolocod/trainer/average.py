"""One model of several members' weights: who of them counts, and the mean.

The rule: each member's file is looked at as a newcomer looks at its donor's (names, shapes, finite values, held-out loss), and
all of them beside each other: whoever is far from most of the others is left out, and so is whoever is much worse on held-out
text. Files are mapped and read in pieces, so that the members' number costs no memory; where one model has to be whole (for its
loss, and the mean), there is one at a time.
"""

from __future__ import annotations

import math
import statistics
import sys
from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.blocks import pieces
from nolocod.trainer import checkpoint, compare_donors, offline
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.model import layout_of, read_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from nolocod.identity import PeerId
    from nolocod.run.manifest import Sealed

_WORSE = 1.25
"""Times the median member's loss on the same text is what a member's may be: in first rounds honest ones are a tenth apart."""


class Members:
    """The weights of members of the run `sealed`. `data`: text on this machine; where there is none and the run needs it, no
    loss is measured."""

    def __init__(self, sealed: Sealed, data: Path | None, cache: Path, base: Path | None) -> None:
        """`base`: the folder of the model that the run starts from, if it starts from one."""
        self.sealed, self._data, self._cache, self._base = sealed, data, cache, base
        tokenizer = make_tokenizer(sealed.manifest.data, base)
        self._layout = layout_of(read_config(sealed.manifest, tokenizer.vocabulary), sealed.manifest.adapter)
        self.losses: dict[PeerId, float] = {}
        """Held out, of those that were looked at; of none if there is no text."""

    @property
    def size(self) -> int:
        """Bytes of one member's file, but for what its head says."""
        tensors = dict(self._layout.split(torch.empty(self._layout.size, device="meta")))
        kinds = self._layout.donated(self.sealed.manifest.weights)
        return len(checkpoint.head_of(tensors, {"run_id": self.sealed.run_id}, kinds)) + checkpoint.size_of(tensors, kinds)

    def admit(self, peer: PeerId, path: Path) -> None:
        """Look at one alone. RejectedTensorError if it is none of this run, or not finite."""
        compare_donors.donated(path, self._layout, self.sealed.manifest.weights)
        if not self.sealed.manifest.data.from_node or self._data is not None:
            loss = self.loss(self.mean([path]))
            self.losses[peer] = loss if math.isfinite(loss) else math.inf

    def objections(self, files: Mapping[PeerId, Path]) -> dict[PeerId, str]:
        """Why some of those that were admitted do not count, seen beside the others."""
        found = {peer: why for peer, why in zip(files, self._far([*files.values()]), strict=True) if why}
        usual = statistics.median_low(self.losses[peer] for peer in files) if self.losses else 0.0
        for peer in files.keys() & self.losses.keys():
            if self.losses[peer] > min(usual * _WORSE, sys.float_info.max):
                found[peer] = f"its held-out loss is {self.losses[peer]:.2f}, where the median member's is {usual:.2f}"
        return found

    def _far(self, files: list[Path]) -> list[str]:
        """Of each, which of its matrices is far from most of the others' (compare_donors.FAR); "" if none."""
        replicas, why = [checkpoint.read_tensors(path) for path in files], [""] * len(files)
        worst = [compare_donors.FAR] * len(files)
        for name in [name for name, tensor in replicas[0].items() if tensor.dim() > 1] if len(files) > 1 else ():
            gram = torch.zeros(len(files), len(files), dtype=torch.float64)
            for piece in pieces(replicas[0][name].numel()):
                part = torch.stack([tensors[name].reshape(-1)[piece] for tensors in replicas]).double()
                gram += part @ part.T
            squares = gram.diagonal()
            norms = torch.maximum(squares[:, None], squares[None]).sqrt()
            apart = (squares[:, None] + squares[None] - 2 * gram).clamp(min=0).sqrt() / norms.clamp(min=1e-30)
            for index in range(len(files)):
                others = torch.cat([apart[index, :index], apart[index, index + 1 :]])
                if (usual := others.median().item()) > worst[index]:  # of two in the middle the lower one
                    worst[index] = usual
                    why[index] = f"{name} is {usual:.2f} of its norm from most others', where {compare_donors.FAR:.2f} is far"
        return why

    def mean(self, files: list[Path]) -> Tensor:
        """The flat mean of the weights in `files`."""
        replicas, mean = [checkpoint.read_tensors(path) for path in files], torch.empty(self._layout.size)
        for name, view in self._layout.split(mean):
            flat = view.reshape(-1)
            for piece in pieces(flat.numel()):
                flat[piece] = torch.stack([tensors[name].reshape(-1)[piece].float() for tensors in replicas]).mean(0)
        return mean

    def loss(self, flat: Tensor) -> float:
        """Held-out loss of flat weights."""
        return offline.loss_of(self.sealed, flat, self._data, self._cache, self._base)
