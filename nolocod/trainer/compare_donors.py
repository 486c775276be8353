"""Whether the weights that one donor gave are near those of other donors, by samples of theirs.

The rule: replicas of an honest swarm differ, but seldom in any matrix by two thirds of its norm. A donor is far off where
one of its matrices is farther than that from every sample. How far two samples are apart is no measure for less: two donors
that have just exchanged differ by a hundredth. Vectors (biases, gains) are left to the loss: they begin alike everywhere, at
zero or one, and may have little in common later. Being far off is no proof of a lie, as the two halves of a swarm that
was parted are far apart too: loss has the last word (node/weights.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from nolocod.errors import CheckpointError, RejectedTensorError
from nolocod.trainer.checkpoint import read_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

    from nolocod.proto.types import SnapshotParts
    from nolocod.trainer.model import Layout

FAR = 2 / 3
"""Of a tensor's norm. One whose matrix is zeroed is 1 from all, one that is half noise 0.7. How far honest replicas are apart:
`python -m tools.nearness`, told in docs/security.md."""


def donated(path: Path, layout: Layout, weights: str) -> dict[str, Tensor]:
    """The slow weights in a donor's file, mapped. RejectedTensorError if they do not fit the model, are not in what the run
    has `weights` in, or not finite."""
    try:
        tensors = read_tensors(path)
    except CheckpointError as error:
        raise RejectedTensorError(f"they are not weights: {error.cause}") from error
    if tensors.keys() != set(layout.names):
        raise RejectedTensorError("the donor's weights have other names than this run's model.")
    kinds = layout.donated(weights)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        given = tensors[name]
        if given.shape != shape or given.dtype != kinds[name] or not given.isfinite().all():
            raise RejectedTensorError(f"the donor's {name} does not fit, or is not finite.")
    return tensors


def objection(own: Iterable[tuple[str, Tensor]], samples: Sequence[SnapshotParts]) -> str:
    """Why `own` (names and tensors, of the donor in question) is too far from all samples; "" if it is not.

    A sample that is not of this model, or not finite, does not count.
    """
    named = dict(own)
    others = [other for sample in samples if (other := _read(sample, named)) is not None]
    worst, why = FAR, ""
    for name in [name for name, tensor in named.items() if tensor.dim() > 1] if others else ():
        common = _common([spans[name] for _, spans in others])
        mine, *theirs = (_part(tensor, common) for tensor in (named[name], *(tensors[name] for tensors, _ in others)))
        apart = min(distance(mine, other) for other in theirs)
        if apart > worst:
            worst, why = apart, f"{name} is {apart:.2f} of its norm from the nearest of {len(theirs)}, where {FAR:.2f} is far"
    return why


def distance(one: Tensor, other: Tensor) -> float:
    """||one - other|| by the greater of their norms: 0 for equals, 1 where one is zero, 2 for the opposite."""
    norm = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / norm if norm else 0.0


def _read(sample: SnapshotParts, named: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[range]]] | None:
    """Its tensors, of which all but the sampled is zeros, and which of their values were sampled; None if it does not fit."""
    try:
        tensors = read_tensors(sample.path)
    except CheckpointError:
        return None
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: tensor.shape for name, tensor in named.items()}:
        return None
    with sample.path.open("rb") as handle:  # read_tensors found its head in order
        head = int.from_bytes(handle.read(8), "little")
        fields = json.loads(handle.read(head))
    spans: dict[str, list[range]] = {}
    for name, tensor in tensors.items():
        begin, end = (8 + head + offset for offset in fields[name]["data_offsets"])
        width = tensor.element_size()
        spans[name] = [_values(begin, max(begin, start), min(end, start + length), width) for start, length in sample.spans]
        if tensor.dtype not in (torch.float32, torch.bfloat16) or not _part(tensor, spans[name]).isfinite().all():
            return None
    return tensors, spans


def _values(begin: int, start: int, end: int, width: int) -> range:
    """The values of a tensor that begins at `begin` which lie in the bytes from `start` to `end` of its file, each `width`."""
    return range(-(-(start - begin) // width), max((end - begin) // width, 0))


def _common(several: Sequence[Sequence[range]]) -> list[range]:
    """What is in all: heads may be longer by a few bytes in one file than in the other."""
    return [range(max(one.start for one in ranges), min(one.stop for one in ranges)) for ranges in zip(*several, strict=False)]


def _part(tensor: Tensor, ranges: Iterable[range]) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat[one.start : max(one.start, one.stop)].cpu().float() for one in ranges])
