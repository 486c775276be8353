"""What this machine's libraries made of the run's model, for peers to compare with what theirs did (proto/types.Built).

The rule: two nodes tell the same layout exactly where an element of the flat tensor is the same weight to both.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING

import blake3
import torch
from transformers import __version__ as transformers_version

from nolocod.errors import OwnTensorsError
from nolocod.proto.built import DIGEST_SIZE, differences
from nolocod.proto.types import Built

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.checkpoint import State
    from nolocod.trainer.model import Layout


def layout_digest(layout: Layout) -> bytes:
    """Of names, shapes and types, in their order."""
    tensors = [[name, list(shape), "float32"] for name, shape in zip(layout.names, layout.shapes, strict=True)]
    return blake3.blake3(json.dumps(tensors).encode()).digest(DIGEST_SIZE)


def _libraries(manifest: Manifest) -> str:
    libraries = f"torch {version('torch')}, transformers {transformers_version}"
    return libraries if manifest.adapter is None else f"{libraries}, peft {version('peft')}"


def check_kept(state: State, manifest: Manifest, layout: Layout) -> None:
    """OwnTensorsError if the tensors of a checkpoint are not this machine's."""
    own = Built(layout_digest(layout), libraries=_libraries(manifest))
    if state.layout not in (b"", own.layout):
        raise OwnTensorsError(differences(own, Built(state.layout, libraries=state.libraries)))


def built_of(manifest: Manifest, layout: Layout, phi: Tensor) -> Built:
    """`phi`: the flat tensor with the values that the run starts from, which the owner's program gives in a run of its own."""
    weights = b"" if manifest.is_own else blake3.blake3(phi.view(torch.uint8).numpy().data).digest(DIGEST_SIZE)
    return Built(layout_digest(layout), weights, _libraries(manifest))
