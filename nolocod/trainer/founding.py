"""What is looked at before a run is founded: whether its nodes could train its model.

The rule: what would end every node at its start, or after its first inner step, is refused here, by name. Nothing is
allocated for it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from nolocod.errors import RunFileError, UnsupportedModelError, on_one_line
from nolocod.run.published import without_unknown
from nolocod.run.run_file import OpenBase, read_run_file
from nolocod.trainer import base_model
from nolocod.trainer.adapter import attach
from nolocod.trainer.data import end_token, make_tokenizer
from nolocod.trainer.model import bare, check_length, own_keys, read_config
from nolocod.trainer.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.run.manifest import Manifest


def read(path: Path, tell: Callable[[str], None] = lambda _: None) -> tuple[Manifest, Path | None]:
    """The run that the file at `path` describes, whole and such that nodes can train it, and the folder with its base.

    `tell` gets one line for each key of a published configuration that is left out. Raises RunFileError, BaseModelError.
    """
    opened: list[OpenBase] = []

    def open_base(name: str) -> OpenBase:
        opened.append(base_model.open_base(name, path.parent))
        return opened[0]

    manifest = read_run_file(path, tell, open_base)
    try:
        known = AutoConfig.for_model(manifest.model.get("model_type", ""))
    except ValueError:
        known = None  # told below
    if known is not None:
        model = without_unknown(manifest.model, own_keys(known) | {"model_type"}, tell)
        manifest = msgspec.structs.replace(manifest, model=model)
    _check(manifest, opened[0] if opened else None)
    return manifest, opened[0].folder if opened else None


def _check(manifest: Manifest, base: OpenBase | None) -> None:
    """Raise RunFileError, or what is more exact, where no node could train the run."""
    tokenizer = make_tokenizer(manifest.data, base.folder if base else None)
    config = read_config(manifest, tokenizer.vocabulary)
    check_length(config, manifest.inner.sequence, strict=True)
    if manifest.data.kind != "text":
        Samples(manifest, tokenizer)
    elif manifest.data.isolates:
        end_token(tokenizer)
    model = bare(config)
    if not _is_causal(model, config):
        kind = manifest.model["model_type"]
        raise UnsupportedModelError(f"`model.model_type` = {kind!r} sees the tokens that it should predict: it is not causal.")
    if base is not None:
        base_model.check_weights(base, {name: tuple(one.shape) for name, one in model.named_parameters()})
    if manifest.adapter is not None:
        with torch.device("meta"):
            attach(model, manifest.adapter)
    _try(model, config, manifest.inner.sequence)


def _try(model: torch.nn.Module, config: Any, sequence: int) -> None:  # noqa: ANN401 - transformers has no common typed base
    """Raise RunFileError where the parts of `model`, which is on torch's meta device, do not fit each other. Experts are
    chosen by values, of which there are none: a mixture is not tried."""
    if any(getattr(config, key, None) for key in _EXPERTS):
        return
    try:
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=torch.zeros(1, sequence, dtype=torch.long))
    except Exception as error:  # what meta tensors cannot do is said in many ways, and is no fault of the run
        if isinstance(error, RuntimeError) and _UNFIT.search(str(error)):
            raise RunFileError(f"`[model]` does not compute: {on_one_line(error, 300)}") from error


_UNFIT = re.compile(r"\b(sizes?|shapes?|dimensions?|output_size)\b")
"""What torch says of tensors that do not fit each other."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _is_causal(model: torch.nn.Module, config: Any) -> bool:  # noqa: ANN401 - transformers has no common typed base
    """Whether each token sees those before it alone, as far as an architecture tells: models that fill gaps have to be made
    decoders, and attention says what it is."""
    if config.model_type in _NOT_CAUSAL:
        return False
    if getattr(model.config, "is_decoder", False):
        return True
    told = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return any(told) or not (told or config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES)


_NOT_CAUSAL = frozenset(("xlnet",))
"""Of those that tell nothing."""
