"""The model that a run starts from: read when the run is founded, and loaded in place of the seed's weights.

The rule: a configuration, a tokenizer and safetensors, and no code. Who founds a run has all of the files, from a folder or
from the hub, and pins them; whatever is missing or cannot be had is one error.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import transformers
from transformers import AutoModelForCausalLM

from nolocod.errors import BaseModelError, RunFileError, on_one_line
from nolocod.run.base import BESIDE, CONFIG, INDEX, SUFFIX, TOKENIZER, Base, BaseFile, described
from nolocod.run.run_file import OpenBase, read_config_file
from nolocod.trainer import model_hub
from nolocod.trainer.adapter import attach, draw
from nolocod.trainer.model import build
from nolocod.trainer.quantized import quantize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.run.manifest import Manifest

_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def open_base(name: str, beside: Path) -> OpenBase:
    """The model that `model.base` names: a folder (relative to `beside`), or ID@REVISION on the hub, which is downloaded.

    Raises BaseModelError.
    """
    folder = beside / name
    if folder.is_dir():
        files = [path.name for path in folder.iterdir() if path.is_file()]
        return _opened(("", ""), set(files), folder.joinpath)
    if not (found := _ON_HUB.fullmatch(name)):
        raise BaseModelError(f"`model.base` = {name!r} is no folder, and no name of a model on the hub.")
    source, revision = found.groups()
    commit, names = model_hub.look_up(source, revision or "main")
    return _opened((source, commit), names, lambda file: model_hub.download(source, commit, file))


def _opened(on_hub: tuple[str, str], names: set[str], get: Callable[[str], Path]) -> OpenBase:
    """Read and pin those of the files `names` that a run needs; `get` gives the path of one.

    `on_hub`: the model's name and commit there; both are empty for a folder.
    """
    source, commit = on_hub
    where = f"{source}@{commit[:12]}" if source else f"{get(CONFIG).parent}"
    if CONFIG not in names:
        raise BaseModelError(f"{where} has no {CONFIG}.")
    config_file = get(CONFIG)
    config = read_config_file(config_file)
    weights = ["model.safetensors"] if "model.safetensors" in names else []
    if not weights and INDEX in names:
        try:
            weights = sorted(set(json.loads(get(INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BaseModelError(f"{where}: {INDEX} is no index of weights.") from error
    if not weights or not all(isinstance(one, str) and one.endswith(SUFFIX) and one in names for one in weights):
        lacks = f"it lacks files that {INDEX} names" if weights else "it has no model.safetensors"
        pickled = any(one.endswith((".bin", ".pt", ".pth")) for one in names)
        remedy = "Convert its weights to safetensors: pickles can hold code, and are never loaded." if pickled else None
        raise BaseModelError(f"{where}: {lacks}.", remedy=remedy)
    wanted = [CONFIG, *(one for one in (TOKENIZER, INDEX, *BESIDE) if one in names), *weights]
    pinned = tuple(_pinned(one, get(one)) for one in wanted)
    return OpenBase(config, Base(pinned, source, commit), config_file.parent)


def _pinned(name: str, path: Path) -> BaseFile:
    if name.endswith(SUFFIX):
        try:
            with safetensors.safe_open(path, framework="pt"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            raise BaseModelError(f"{path} is not a whole safetensors file ({on_one_line(error)}).") from error
    try:
        description = described(path)
    except OSError as error:
        raise BaseModelError(f"{path} cannot be read ({on_one_line(error)}).") from error
    if not description.size:
        raise BaseModelError(f"{path} is empty.")
    return BaseFile(name, description.size, description.root.hex())


def initial(
    manifest: Manifest,
    config: Any,  # noqa: ANN401 - transformers has no common typed base
    base: Path | None,
    frozen: torch.dtype = torch.float32,
    bits: int = 16,
) -> torch.nn.Module:
    """The model on the CPU in float32, with the weights that every node of the run starts from.

    Those of the model in the folder `base`, in runs that have one; else those that the seed gives. Beside an adapter the
    base's have the values of bfloat16, and lie in the type `frozen`, its matrices in fewer `bits` if that is not 16. Raises
    BaseModelError, and as `quantize`.
    """
    if manifest.base is None or base is None:
        return build(config, manifest.seed)
    transformers.utils.logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            model, report = AutoModelForCausalLM.from_pretrained(
                base,
                config=config,
                dtype=torch.float32 if manifest.adapter is None else torch.bfloat16,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, TypeError, KeyError, OSError, safetensors.SafetensorError) as error:
        raise BaseModelError(f"{base} cannot be loaded: {on_one_line(error, 300)}") from error
    if lacking := sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]):
        raise BaseModelError(f"{base} has no weights that fit {lacking[0]} ({len(lacking)} in all) of the run's `[model]`.")
    initialized: torch.nn.Module = model.train()
    if manifest.adapter is not None:
        if frozen != torch.bfloat16:  # else as it is: buffers may be finer than the weights
            initialized.to(frozen)
        if bits != 16:
            quantize(initialized, bits, frozen)
        attach(initialized, manifest.adapter)
        draw(initialized, manifest.seed)
    return initialized


def check_weights(base: OpenBase, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise RunFileError where weights have another shape than the run's model gives to the same names. Nothing is loaded."""
    for file in base.pinned.files:
        if file.name.endswith(SUFFIX):
            with safetensors.safe_open(base.folder / file.name, framework="pt") as weights:
                for name in sorted(weights.keys() & shapes.keys()):
                    if (shape := tuple(weights.get_slice(name).get_shape())) != shapes[name]:
                        raise RunFileError(f"`[model]` makes {name} {shapes[name]}, and the base has {shape}.")
