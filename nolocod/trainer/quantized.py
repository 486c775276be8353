"""The base beside an adapter in fewer bits, by `bitsandbytes`: 8 (arXiv 2208.07339), or 4 (NF4, arXiv 2305.14314).

The rule: of what is frozen only layers that are one matrix; embeddings, norms and the head stay. It is each node's own choice,
as its device is: partners exchange the adapter, and that is in float32 everywhere.
"""

from __future__ import annotations

import torch

from nolocod.errors import UnsupportedModelError
from nolocod.trainer.adapter import linear_layers


def quantize(model: torch.nn.Module, bits: int, kind: torch.dtype) -> None:
    """Keep the matrices of `model`, which is on the CPU, in so many bits, and compute in `kind`; not those of Conv1D layers.

    Raises UnsupportedModelError without bitsandbytes.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        remedy = "Install nolocod with its extra [bits], or leave out --base-bits."
        raise UnsupportedModelError("bitsandbytes is not installed here, which --base-bits needs.", remedy=remedy) from error
    layers = bitsandbytes.nn
    for name, layer in linear_layers(model).items():
        if not isinstance(layer, torch.nn.Linear):
            continue
        sizes, weight = (layer.in_features, layer.out_features, False), layer.weight.detach()
        if bits == 4:
            made = layers.Linear4bit(*sizes, compute_dtype=kind, quant_type="nf4", device="meta")
            # else it packs the matrix at the first evaluation, for good, and has no gradient then
            made.support_avx512bf16_for_cpu = False
            made.weight = layers.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
        else:
            made = layers.Linear8bitLt(*sizes, has_fp16_weights=False, device="meta")
            made.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        made.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made.to("cpu"))  # which rounds them
