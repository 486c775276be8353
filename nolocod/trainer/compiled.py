"""A model's layers compiled by torch, where the node's owner wants it (`--compile`).

The rule: each layer is compiled by itself when it is first used, and the others of its kind use the same; so it takes no longer
for many layers than for one. It is tried before the node trains: where it cannot be, as without a C++ compiler, the layers
compute as they did.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FORMS = 256
"""Layers that may each want a form of their own before torch stops compiling them."""


def compile_layers(model: torch.nn.Module, compute: Callable[[], None]) -> bool:
    """Have the layers of `model` compiled, which `compute` uses, forwards and backwards; whether they are."""
    from torch import _dynamo

    _dynamo.config.recompile_limit = _FORMS
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # it would tell of all that it tries
    found = layers(model)
    for layer in found:
        layer.compile()
    try:
        compute()
    except Exception:  # noqa: BLE001 - compilers fail in many ways, and nothing is lost without
        for layer in found:
            layer._compiled_call_impl = None
        return False
    return bool(found)


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that the model is a row of: its longest list of modules of one class."""
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    alike = [one for one in lists if len(Counter(map(type, one))) == 1]
    return [*max(alike, key=len, default=())]


def keep_in(cache: Path) -> None:
    """Keep what is compiled below `cache`, for the next start; and compile in this process, as others would outlive it."""
    told = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ.update(told | dict(os.environ))
