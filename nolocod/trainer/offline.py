"""What the commands do with checkpoints on disk, without a daemon.

The rule: what is exported, evaluated and sampled from are the slow weights phi of the last whole
checkpoint, the same that a newcomer is given. Functions that compare replicas use the fast weights theta.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nolocod.disk import write_whole, written_whole
from nolocod.errors import CheckpointError, NothingToUseError
from nolocod.outer.codec.blocks import pieces
from nolocod.run.base import BESIDE
from nolocod.run.manifest import Sealed, unseal
from nolocod.trainer import adapter, checkpoint
from nolocod.trainer.base_model import initial
from nolocod.trainer.built import check_kept
from nolocod.trainer.data import Tokenizer, make_tokenizer, tokenizer_text
from nolocod.trainer.inner import mean_loss
from nolocod.trainer.model import Place, bare, flatten, layout_of, pick_device, read_config
from nolocod.trainer.objective import objective_of
from nolocod.trainer.replica import open_replica
from nolocod.trainer.source import open_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from nolocod.paths import DataDir
    from nolocod.trainer.objective import Objective
    from nolocod.trainer.pipe import Setup


def last_tensor(folder: Path, sealed: Sealed, name: str) -> Tensor:
    """The flat tensor `name` ("phi", "theta") of the newest whole checkpoint in `folder`.

    Raises NothingToUseError if there is none, CheckpointError if all are damaged.
    """
    return _last(folder, sealed, name)[0]


def _last(folder: Path, sealed: Sealed, name: str) -> tuple[Tensor, checkpoint.State]:
    """As `last_tensor`, and the checkpoint's other half."""
    found = checkpoint.find(folder, sealed.run_id)
    if found.path is None or found.state is None:
        if found.trouble:
            raise CheckpointError(f"{folder} holds no intact checkpoint: {found.trouble[0]}")
        raise NothingToUseError(f"{folder} holds no checkpoint.")
    return checkpoint.tensors_of(found.path)[name], found.state


def export(paths: DataDir, sealed: Sealed, out: Path, *, merged: bool = False) -> checkpoint.State:
    """Write what was trained to the folder `out`: the model as transformers' `from_pretrained` reads it, an adapter as that of
    peft does. `merged`: the model in any case, the adapter added to it. Returns the state of the checkpoint that it is of.

    Raises NothingToUseError, CheckpointError, OwnTensorsError, DiskFullError, DataDirError.
    """
    phi, state = _trained(paths, sealed)
    write(paths, sealed, phi, out, merged=merged)
    return state


def _trained(paths: DataDir, sealed: Sealed) -> tuple[Tensor, checkpoint.State]:
    """The slow weights of the last checkpoint; OwnTensorsError if other libraries than these wrote it."""
    phi, state = _last(paths.checkpoints, sealed, "phi")
    manifest = sealed.manifest
    config = read_config(manifest, make_tokenizer(manifest.data, base_of(paths, sealed)).vocabulary)
    check_kept(state, manifest, layout_of(config, manifest.adapter))
    return phi, state


def write(paths: DataDir, sealed: Sealed, phi: Tensor, out: Path, *, merged: bool = False) -> None:
    """As `export`, of the flat weights `phi`."""
    base = base_of(paths, sealed)
    config = read_config(sealed.manifest, make_tokenizer(sealed.manifest.data, base).vocabulary)
    manifest = sealed.manifest
    if manifest.adapter is None or manifest.base is None or merged:
        _write_model(sealed, config, phi, out, base)
    else:
        model = bare(config, manifest.adapter)
        trained = dict(layout_of(config, manifest.adapter).split(phi))
        source = manifest.base.source or str(paths.base.absolute())
        tensors, settings = adapter.as_published(model, trained, source, manifest.base.revision)
        with written_whole(out / "adapter_model.safetensors") as handle:
            checkpoint.write_tensors(handle, tensors, {"format": "pt", "run_id": sealed.run_id})
        write_whole(out / "adapter_config.json", settings)
    _write_tokenizer(sealed, out, base)


def _write_model(sealed: Sealed, config: Any, phi: Tensor, out: Path, base: Path | None) -> None:  # noqa: ANN401 - transformers has no common typed base
    if sealed.manifest.adapter is None:
        tensors = dict(layout_of(config).split(phi))
    else:
        tensors = adapter.merged(_model(sealed, phi, base)[0])
    tensors |= _buffers(sealed, config, base)
    config.use_cache = True
    config.architectures = [type(bare(config)).__name__]
    with written_whole(out / "model.safetensors") as handle:
        checkpoint.write_tensors(handle, tensors, {"format": "pt", "run_id": sealed.run_id})
    # as transformers writes and reads numbers that are not finite
    _write_json(out / "config.json", json.loads(config.to_json_string()) | {"model_type": config.model_type})
    _write_json(out / "generation_config.json", GenerationConfig.from_model_config(config).to_diff_dict())


def _write_tokenizer(sealed: Sealed, out: Path, base: Path | None) -> None:
    with written_whole(out / "tokenizer.json") as handle:
        handle.write(_tokenizer_file(sealed, base).encode())
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": sealed.manifest.inner.sequence,
            "clean_up_tokenization_spaces": False,
        },
    )
    if base is not None and sealed.manifest.data.tokenizer == "base":
        for name in BESIDE:
            if (base / name).exists():
                write_whole(out / name, (base / name).read_bytes())


def base_of(paths: DataDir, sealed: Sealed) -> Path | None:
    """The folder of the model that the run starts from, if it starts from one."""
    return paths.base if sealed.manifest.base else None


def _buffers(sealed: Sealed, config: Any, base: Path | None) -> dict[str, Tensor]:  # noqa: ANN401 - transformers has no common typed base
    """What belongs to the model's weights and is not trained: of the base, if the run has one."""
    model = bare(config)
    names = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    model = initial(sealed.manifest, config, base) if names else model
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def evaluate(paths: DataDir, sealed: Sealed, data: Path | None = None) -> float:
    """Mean held-out loss of the last checkpoint, nats per token. `data` as for the daemon's --data."""
    phi, _ = _trained(paths, sealed)
    return loss_of(sealed, phi, data, paths.cache, base_of(paths, sealed))


def generate(paths: DataDir, sealed: Sealed, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Continue `prompt` by `tokens` tokens; temperature 0 takes the likeliest each time. Returns the continuation."""
    phi, _ = _trained(paths, sealed)
    model, tokenizer, _ = _model(sealed, phi, base_of(paths, sealed))
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).tolist() or [0]
    start = len(ids)
    for _ in range(tokens):
        context = torch.tensor([ids[-sealed.manifest.inner.sequence :]])
        with torch.no_grad():
            logits = model(input_ids=context).logits[0, -1, : tokenizer.vocabulary].float()
        if temperature <= 0:
            ids.append(int(logits.argmax()))
        else:
            logits = (logits.double() - logits.max()) / temperature  # none above 0, however small the temperature is
            ids.append(int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator)))
    return tokenizer.decode(ids[start:])


def train_alone(setup: Setup, inner_steps: int) -> tuple[float, float]:
    """Train one node's shard with the run's inner optimizer and schedule and no outer steps.

    The baseline that a node has without its peers. Returns the held-out loss before and after. Writes nothing
    but the token cache.
    """
    sealed = unseal(setup.manifest)
    if setup.threads:
        torch.set_num_threads(setup.threads)
    replica = open_replica(sealed, setup.peer_id, setup.data, setup.cache, Place(pick_device(setup.devices), setup.base))
    first = replica.evaluate()
    for step in range(inner_steps):
        replica.step()
        if (step + 1) % sealed.manifest.inner.steps == 0:
            replica.report()
            replica.pass_boundary()
    return first, replica.evaluate()


def averaged_loss(sealed: Sealed, folders: Sequence[Path], data: Path | None, cache: Path, base: Path | None = None) -> float:
    """Held-out loss of the mean of the replicas' fast weights; `folders` are the nodes' checkpoint folders."""
    mean = last_tensor(folders[0], sealed, "theta").clone()
    for folder in folders[1:]:
        mean += last_tensor(folder, sealed, "theta")
    return loss_of(sealed, mean.div_(len(folders)), data, cache, base)


def weight_std(sealed: Sealed, folders: Sequence[Path]) -> float:
    """Standard deviation of each fast weight across the replicas, averaged over the weights."""
    replicas = [last_tensor(folder, sealed, "theta") for folder in folders]
    size = replicas[0].numel()
    total = 0.0
    for piece in pieces(size):
        total += torch.stack([theta[piece] for theta in replicas]).double().std(0, correction=0).sum().item()
    return total / size


def loss_of(sealed: Sealed, flat: Tensor, data: Path | None, cache: Path, base: Path | None = None) -> float:
    """Held-out loss of the flat weights."""
    model, tokenizer, objective = _model(sealed, flat, base)
    source = open_source(sealed.manifest, tokenizer, "", data, cache)
    batch = sealed.manifest.inner.batch
    windows = source.held_out(batch * sealed.manifest.evaluation.batches)
    return mean_loss(model, windows, batch, torch.device("cpu"), objective)


def _model(sealed: Sealed, flat: Tensor, base: Path | None) -> tuple[torch.nn.Module, Tokenizer, Objective]:
    tokenizer = make_tokenizer(sealed.manifest.data, base)
    config = read_config(sealed.manifest, tokenizer.vocabulary)
    layout = layout_of(config, sealed.manifest.adapter)
    model = initial(sealed.manifest, config, base)
    theta = flatten(dict(model.named_parameters()), layout, torch.empty(layout.size))
    if flat.shape != theta.shape:
        raise CheckpointError(f"it holds {flat.numel()} weights where the run's model has {theta.numel()}.")
    objective = objective_of(sealed.manifest, model)
    theta.copy_(flat)
    return model.eval(), tokenizer, objective


def _tokenizer_file(sealed: Sealed, base: Path | None) -> str:
    """The run's tokenizer as a `tokenizers` file; for "bytes", one whose ids are the byte values."""
    if sealed.manifest.data.tokenizer != "bytes":
        return tokenizer_text(sealed.manifest.data, base)
    # ByteLevel writes bytes as printable characters.
    fast = Fast(models.BPE(vocab={name: byte for byte, name in bytes_to_unicode().items()}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return str(fast.to_str())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with written_whole(path) as handle:
        handle.write(json.dumps(content, indent=2).encode() + b"\n")
