"""The model: from the run's configuration to parameters that lie in one flat tensor.

The rule: every node of a run builds the same architecture and, without a donor, the same initial weights:
they are drawn on the CPU in float32 from the run's seed, whatever the device and the thread count. The flat
order is that of `named_parameters` sorted by name, numbers by value so that layers lie in their order, tied
weights once; it is what travels between peers.
No code and no weights are fetched by name: a run's configuration has no key for it (`_own_keys`), and its text is plain
words (run/manifest.py).
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nolocod.errors import DeviceError, ModelTooLargeError, RunFileError, TooLongError, UnsupportedModelError, on_one_line
from nolocod.outer.codec.blocks import Fragment, fragments_of
from nolocod.trainer import memory
from nolocod.trainer.adapter import attach, frozen_matrices, linear_layers, trained
from nolocod.trainer.head import CHUNK, plain_head

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from nolocod.run.manifest import Adapter, Manifest
    from nolocod.trainer.group import Group

_BYTES_ON_DEVICE = 16
"""Per parameter: theta, gradient and the two moments of Adam, float32."""
_MOMENT = 4
"""... of which Muon has one only."""
_REFERENCE = 4
"""More, where preferences need the first weights beside them."""
PINNED = 12
"""Bytes of main memory per value where theta lies on a GPU: what is on its way there and back at once (queued.py), at most."""
BYTES_ON_HOST = 8
"""Per parameter: phi and delta, float32."""
SHARED = 12
"""More of a model in shards: theta once more, and the optimizer's state while a checkpoint is written."""
GATHERED = 8
"""... and on the device, for each element of the largest parameter: it and its gradient."""
_COMMON = {"vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Of every architecture; some releases of transformers take them in its stead."""
_NOT_SAID = ("model_type", "dtype", "torch_dtype")
_OLD_NAMES = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"}
"""Of what newer releases of transformers hold in `rope_parameters`."""
_LOGIT_COPIES = 3
"""The logits, their log-softmax and their gradient, where they are whole: the largest activations of a small model."""
_KEPT = 17
"""Elements that a layer keeps for its backward pass, for each of the hidden states that it is given (arXiv 2205.05198, Eq. 1,
with attention that keeps no scores)."""


@dataclass(frozen=True)
class Layout:
    """Where each trained parameter lies in the flat tensor: in sorted order, without gaps."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    matrices: tuple[tuple[int, ...], ...]
    """The shapes of those that Muon may train."""
    frozen: int
    """Elements of all that an adapter stands beside; 0 without one. ..."""
    frozen_matrices: int = 0
    """... Of these, those in layers that are one matrix: they may lie in fewer bits (quantized.py)."""
    states: int = 0
    """Elements of the hidden states of a token that all layers are given."""
    plain_head: bool = False
    """Whether the loss needs no logits of all tokens at once (head.py)."""

    @property
    def size(self) -> int:
        """Elements in all."""
        return sum(map(math.prod, self.shapes))

    def fragments(self, count: int) -> tuple[Fragment, ...]:
        """Cut the flat tensor into `count` parts for outer steps."""
        return fragments_of([math.prod(shape) for shape in self.shapes], count)

    def donated(self, weights: str) -> dict[str, torch.dtype]:
        """What newcomers get each parameter in, in a run with these `weights`."""
        matrices = torch.bfloat16 if weights == "bfloat16" else torch.float32
        pairs = zip(self.names, self.shapes, strict=True)
        return {name: matrices if len(shape) > 1 else torch.float32 for name, shape in pairs}

    def split(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its shaped view into `flat`."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            end = start + math.prod(shape)
            yield name, flat[start:end].view(shape)
            start = end


@dataclass(frozen=True)
class Place:
    """Where a model trains."""

    device: torch.device
    base: Path | None = None
    """The folder of the model that the run starts from."""
    bits: int = 16
    """In which the base beside an adapter lies."""
    processes: int = 1
    """That train on the same device: those of a node on the CPU share its memory."""
    spares_memory: bool = False
    """Whether layers are computed twice from the first step on."""
    compiles: bool = False
    """Whether torch compiles its layers; not in shards."""
    shards: int = 1
    """In so many parts the model lies on as many devices."""
    group: Group | None = None
    """The processes of all devices, where there are several."""


ON_CPU = Place(torch.device("cpu"))


def pick_device(name: str) -> torch.device:
    """Return the device `name` ("auto" takes CUDA if there is one); DeviceError if it cannot compute."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.ones(1, device=device).add_(1).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DeviceError(f"{name!r} does not work with this torch {torch.__version__} ({cause}).") from error
    return device


def read_config(manifest: Manifest, vocabulary: int) -> Any:  # noqa: ANN401 - transformers has no common typed base
    """Make the transformers configuration of the run; RunFileError names the key that is wrong.

    `vocabulary` is the tokenizer's size: the model's default, and the least it may have.
    """
    if manifest.is_own:
        remedy = "Join it from Python, with the program of its owner (docs/your-own-loop.md)."
        raise UnsupportedModelError("this run's model comes from its owner's program.", remedy=remedy)
    # a copy: transformers writes into what it is given
    keys = copy.deepcopy({key: value for key, value in manifest.model.items() if key not in _NOT_SAID})
    kind = manifest.model["model_type"]
    try:
        known = AutoConfig.for_model(kind)
    except ValueError as error:
        raise RunFileError(f"`model.model_type` = {kind!r} is not an architecture that transformers knows.") from error
    if "vocab_size" not in known.to_dict():
        raise RunFileError(f"`model.model_type` = {kind!r} is not a language model.")
    size = keys.setdefault("vocab_size", vocabulary)
    if not isinstance(size, int) or size < vocabulary:
        raise RunFileError(f"`model.vocab_size` = {size!r} is less than the tokenizer's {vocabulary}.")
    unknown = sorted(keys.keys() - own_keys(known))
    if unknown:
        raise RunFileError(f"`model.{unknown[0]}` is not a key of the {kind} architecture.")
    # Defaults that are ids of some other tokenizer would end texts early, or leave an embedding untrained.
    foreign = {"bos_token_id", "eos_token_id", "pad_token_id"} & known.to_dict().keys() - keys.keys()
    try:
        config = AutoConfig.for_model(kind, **keys, **dict.fromkeys(foreign))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise RunFileError(f"`[model]`: {on_one_line(error)}") from error
    if unread := sorted(_OLD_NAMES & keys.keys() & vars(config).keys() - own_keys(known, old=False)):
        raise RunFileError(f"`model.{unread[0]}` is not a key of the {kind} architecture.")
    config.dtype = "float32"
    config.use_cache = False
    return config


def own_keys(known: PretrainedConfig, *, old: bool = True) -> set[str]:
    """The keys that a run's `[model]` may have: what this architecture is made of. What transformers takes of any model is not
    among them: it names kernels, files and repositories, or is each node's own choice, as the attention's kernel is.

    `old`: with names of earlier releases, of which an architecture may read some only.
    """
    own, base = (inspect.signature(one.__init__).parameters.keys() for one in (type(known), PretrainedConfig))
    shown = {key for key in known.to_dict().keys() - PretrainedConfig().to_dict().keys() if not key.startswith("_")}
    keys = set(own - base) | shown - base | set(known.attribute_map) | _COMMON
    if "num_key_value_heads" in keys:
        keys.add("head_dim")  # every such model reads it, and not every configuration declares it
    return keys | _OLD_NAMES if old and "rope_parameters" in keys else keys


def from_config(config: Any) -> torch.nn.Module:  # noqa: ANN401 - as above
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, ImportError, ZeroDivisionError) as error:
        raise RunFileError(f"`[model]` makes no causal language model: {on_one_line(error, 300)}") from error
    return model


def check_length(config: Any, sequence: int, *, strict: bool = False) -> None:  # noqa: ANN401 - as above
    """Raise TooLongError where the model has no positions for `sequence` tokens.

    Rotary ones are computed for any; who founds a run is `strict`: the model was made for so many, and says it.
    """
    most = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    if isinstance(most, int) and 0 < most < sequence and (strict or not rotary):
        key = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise TooLongError(f"`inner.sequence` = {sequence} is more than `model.{key}` = {most}.")


def bare(config: Any, adapter: Adapter | None = None) -> torch.nn.Module:  # noqa: ANN401 - as above
    """The model of the run without values, for which nothing is allocated. Raises as `attach`."""
    with torch.device("meta"):
        model = from_config(config)
        if adapter is not None:
            attach(model, adapter)
    return model


def layout_of(config: Any, adapter: Adapter | None = None) -> Layout:  # noqa: ANN401 - as above
    """Lay the trained parameters out without allocating them. Raises as `attach`."""
    model = bare(config, adapter)
    shapes = {name: tuple(parameter.shape) for name, parameter in trained(model).items()}
    frozen = sum(one.numel() for one in model.parameters()) - sum(map(math.prod, shapes.values()))
    names = tuple(sorted(shapes, key=_by_number))
    matrices = tuple(tuple(matrix.shape) for matrix in matrices_of(model).values())
    states = int(getattr(config, "num_hidden_layers", 0)) * int(getattr(config, "hidden_size", 0))  # as transformers maps them
    alone, plain = frozen_matrices(model), plain_head(model) is not None
    return Layout(names, tuple(shapes[name] for name in names), matrices, frozen, alone, states, plain)


def matrices_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The layers' trained matrices by name: weights of linear maps, not of an embedding or of the head, whether these two are
    tied or not. Experts in one tensor, convolutions, norms and biases are none."""
    weights = {id(one.weight) for one in linear_layers(model).values()}
    return {name: parameter for name, parameter in sorted(trained(model).items()) if id(parameter) in weights}


def bytes_on_device(layout: Layout, manifest: Manifest, kind: torch.dtype, bits: int = 16) -> int:
    """Of weights, gradients, the optimizer's state, and the weights that preferences are compared by; frozen ones lie there in
    `kind`, frozen matrices in fewer `bits` if that is not 16."""
    saved = _MOMENT * sum(map(math.prod, layout.matrices)) if manifest.inner.optimizer == "muon" else 0
    reference = _REFERENCE * layout.size if manifest.data.kind == "preference" else 0
    spared = 0 if bits == 16 else (8 * kind.itemsize - bits) * layout.frozen_matrices // 8
    return _BYTES_ON_DEVICE * layout.size + kind.itemsize * layout.frozen - spared - saved + reference


_FLOAT16_UNITS, _BFLOAT16_UNITS = (7, 0), (8, 0)
"""The compute capabilities since which NVIDIA's cards have them."""


def activations(layout: Layout, vocabulary: int, manifest: Manifest, windows: int, kept: int = _KEPT) -> int:
    """Bytes, in float32, that so many windows keep for their backward pass, where a layer keeps `kept` times its hidden states;
    and of their logits."""
    tokens = windows * manifest.inner.sequence
    logits = 4 * tokens * vocabulary
    cut = layout.plain_head and manifest.data.kind != "preference"
    return 4 * kept * tokens * layout.states + (min(logits, CHUNK) if cut else _LOGIT_COPIES * logits)


def fast_kind(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it: one that does not takes twenty times as long as in float32."""
    if device.type == "cuda":  # torch.cuda.is_bf16_supported asks the current device, and others may be unlike it
        has = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _BFLOAT16_UNITS
    else:  # a name without promise, newer than some torch that is allowed
        has = device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if has else torch.float32


def step_kind(device: torch.device) -> torch.dtype:
    """What a GPU multiplies in during inner steps: bfloat16; else float16, if it has units for that; else float32, as a CPU."""
    if device.type != "cuda":
        return torch.float32
    kind = fast_kind(device)
    return torch.float16 if kind == torch.float32 and torch.cuda.get_device_capability(device) >= _FLOAT16_UNITS else kind


def _by_number(name: str) -> list[str | int]:
    """A sort key: "h.2.b" before "h.10.a". Names and numbers alternate, so that like is compared with like."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def check_memory(layout: Layout, vocabulary: int, manifest: Manifest, boxes: int, place: Place) -> int:
    """How many windows may be computed at once: the run's micro-batch, on a GPU all of a step, or the largest power of two that
    fits; 0 where one does if its layers are computed twice, and keep no more than what they are given. Raises
    ModelTooLargeError if training cannot fit, before anything large is allocated.

    Weights, gradients, the optimizer's state, phi, delta, what an exchange takes (`boxes` bytes: outbox, inbox and the kept
    change), and activations.
    """
    batch, device = manifest.inner.batch, place.device
    parameters = layout.size + layout.frozen
    on_device = place.processes * (bytes_on_device(layout, manifest, fast_kind(device), place.bits) // place.shards)
    on_host = BYTES_ON_HOST * layout.size + boxes
    if place.shards > 1:
        on_device += place.processes * GATHERED * max(map(math.prod, layout.shapes))
        on_host += SHARED * layout.size
    free = memory.free()
    if device.type == "cuda":
        on_host += pinned(layout, device, place.shards)
        _require(on_host, free, parameters, "of main memory")
        on_host, free = 0, torch.cuda.mem_get_info(device)[0]
    where = f"on {device}" if device.type == "cuda" else "of main memory"

    def needed(windows: int, kept: int = _KEPT) -> int:
        return on_device + on_host + place.processes * activations(layout, vocabulary, manifest, windows, kept)

    _require(needed(1, kept=1), free, parameters, where)
    most = batch * manifest.inner.accumulation if device.type == "cuda" else batch  # a processor is no faster for more
    tried = [most, *(1 << power for power in reversed(range((most - 1).bit_length()))), 0]
    return next(windows for windows in tried if not windows or needed(windows) <= free)


def pinned(layout: Layout, device: torch.device, shards: int) -> int:
    """Bytes of main memory that are locked for a model on this device, or in shards on some, at most."""
    return PINNED * layout.size if device.type == "cuda" and shards == 1 else 0


def _require(needed: int, available: int, parameters: int, where: str) -> None:
    if needed > available:
        raise ModelTooLargeError(
            f"{parameters:,} parameters need {needed / 1e9:.2f} GB {where} to train; {available / 1e9:.2f} GB are free."
        )


def build(config: Any, seed: int) -> torch.nn.Module:  # noqa: ANN401 - as above
    """Make the model on the CPU with the initial weights that `seed` gives everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return from_config(config)


def flatten(parameters: Mapping[str, Tensor], layout: Layout, flat: Tensor) -> Tensor:
    """Move the parameters into one flat float32 tensor, of which they become views.

    An outer step is then a few vector operations, and the forward pass does not notice. Each parameter's
    own memory is freed as it is moved.
    """
    for name, view in layout.split(flat):
        parameter = parameters[name]
        view.copy_(parameter.data)
        parameter.data = view
    return flat
