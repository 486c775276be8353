"""The adapter of a run: beside layers of a published model, which stays as it was, two small matrices each, so that a layer W
computes W + alpha/rank B A (LoRA, arXiv 2106.09685).

The rule: what such a run trains, exchanges and keeps are these matrices alone, in float32. Every node draws the same from the
run's seed, whatever release of `peft` it has; that library computes with them, and is imported where a run has an adapter.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch
from transformers.pytorch_utils import Conv1D

from nolocod.errors import RunFileError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    from nolocod.run.manifest import Adapter

_NAME = "default"
"""What peft calls the only adapter."""


def linear_layers(model: Module) -> dict[str, Module]:
    """By name: layers that are one matrix, but for the head. An embedding, convolutions, and experts in one tensor are none."""
    head = model.get_output_embeddings()  # type: ignore[operator] # of every causal model in transformers
    named = sorted(model.named_modules())
    return {name: one for name, one in named if isinstance(one, (torch.nn.Linear, Conv1D)) and one is not head}


def frozen_matrices(model: Module) -> int:
    """Elements of these layers that are not trained."""
    weights = {id(layer.weight) for layer in linear_layers(model).values()}
    return sum(one.numel() for one in model.parameters() if id(one) in weights and not one.requires_grad)


def trained(model: Module) -> dict[str, Parameter]:
    """By name: the parameters of `model` that its run trains. All, unless it has an adapter."""
    named = dict(model.named_parameters())
    return {name: one for name, one in named.items() if one.requires_grad} if hasattr(model, "peft_config") else named


def attach(model: Module, adapter: Adapter) -> None:
    """Freeze `model`, and put the adapter's matrices beside its layers; `draw` gives them values.

    Raises UnsupportedModelError without peft; RunFileError where a target names no layer, or the rank is too high for one.
    """
    targets = _targets(model, adapter)
    try:
        import peft
    except ImportError as error:
        remedy = "Install nolocod with its extra [adapters]; an image is built with EXTRAS='[adapters]'."
        raise UnsupportedModelError("the run trains an adapter, and peft is not installed here.", remedy=remedy) from error
    turned = any(isinstance(layer, Conv1D) for layer in linear_layers(model).values())
    settings = peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets, fan_in_fan_out=turned)
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(settings, model, _NAME)


def _targets(model: Module, adapter: Adapter) -> list[str]:
    """The ends of the names of the layers that get matrices; every layer's if the run names none."""
    layers = linear_layers(model)
    ends = sorted({name.rpartition(".")[2] for name in layers})
    for target in adapter.targets:
        if not any(_is_named(name, target) for name in layers):
            raise RunFileError(f"`adapter.targets`: no layer is named {target!r}; there are {', '.join(ends)}.")
    targets = list(adapter.targets) or ends
    for name, layer in layers.items():
        sides = (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else layer.weight.shape
        if adapter.rank > (most := min(sides)) and any(_is_named(name, target) for target in targets):  # type: ignore[arg-type]
            raise RunFileError(f"`adapter.rank` = {adapter.rank} is more than {name} has: {most}.")
    return targets


def _is_named(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def draw(model: Module, seed: int) -> None:
    """Give A the values that `seed` gives everywhere, and B zeros, so that the model computes what it did before."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" in name:
            bound = 1 / math.sqrt(parameter.size(1))
            parameter.data = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif "lora_B" in name:
            parameter.data = torch.zeros(parameter.shape)


def as_published(model: Module, tensors: dict[str, Tensor], source: str, revision: str) -> tuple[dict[str, Tensor], bytes]:
    """What peft reads: the adapter's `tensors` by its names, and its configuration as JSON. `model` may be without values;
    `source` and `revision` name the base."""
    settings = model.peft_config[_NAME].to_dict()  # type: ignore[union-attr,index] # peft leaves it there
    settings |= {
        "base_model_name_or_path": source,
        "revision": revision or None,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    named = {f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor for name, tensor in tensors.items()}
    return named, json.dumps(settings, indent=2, default=sorted).encode() + b"\n"  # of what is no JSON there are sets only


@torch.no_grad()
def merged(model: Module) -> dict[str, Tensor]:
    """Add the matrices to the layers that they stand beside; all weights by the names that the base has for them."""
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.merge()  # type: ignore[operator] # peft's
    named = model.named_parameters()
    return {name.replace(".base_layer.", "."): one.data for name, one in named if "lora_" not in name}
