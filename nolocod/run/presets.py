"""Small Llamas by name, and the run file that the testnet and the benchmark write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from nolocod.errors import RunFileError
from nolocod.run.data import Data
from nolocod.run.manifest import RETIRED, Evaluation, Inner, Manifest, Outer, Trust
from nolocod.run.published import without_inert

if TYPE_CHECKING:
    from pathlib import Path


def llama(hidden: int, layers: int, heads: int, feed_forward: int) -> dict[str, Any]:
    """A small Llama's configuration; its vocabulary is the tokenizer's."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": feed_forward,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }


MODELS: dict[str, dict[str, Any]] = {
    "tiny": llama(64, 2, 2, 176),  # 0.1 M parameters over bytes
    "small": llama(128, 4, 4, 352),  # 0.8 M
    "10m": llama(384, 6, 6, 1024),  # 10.7 M
}

UNDEFENDED = Trust(clip=0, reputation=False, probation=0)
"""No defence but those of structure, which cannot be switched off."""


def model(name_or_file: str, base: Path) -> dict[str, Any]:
    """A model of `MODELS`, or the transformers configuration in a JSON file (relative to `base`)."""
    if name_or_file in MODELS:
        return MODELS[name_or_file]
    path = base / name_or_file
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFileError(f"--model {name_or_file} is none of {', '.join(MODELS)} and no file ({error.strerror}).") from error
    except ValueError as error:
        raise RunFileError(f"{path} is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise RunFileError(f"{path} holds no JSON object.")
    return without_inert(config, lambda _: None)


_STEPS_OF_A_TURN, _MOST_TURNS = 3, 64


def usual_turns(inner_steps: int) -> int:
    """Into how many turns a run file's `inner.steps` fall where it does not say: as many as leave each at least three steps,
    for an exchange takes some round trips and the ends of two steps, however few bytes there are."""
    most = min(_MOST_TURNS, inner_steps // _STEPS_OF_A_TURN)
    return next((turns for turns in range(most, 1, -1) if inner_steps % turns == 0), 1)


def local_run(model_config: dict[str, Any], *, rounds: int, inner_steps: int, seed: int, own_text: bool) -> Manifest:
    """A short run for one machine: the standard library's sources, or the text that `--data` names.

    Little outer momentum and full steps, because forty rounds are too few for the paper's 0.5 and 0.7 to get going.
    """
    try:
        return Manifest(
            name="testnet",
            model=model_config,
            seed=seed,
            data=Data(source="text" if own_text else "stdlib"),
            inner=Inner(steps=inner_steps, batch=4, sequence=128, learning_rate=3e-3, warmup_rounds=2.0),
            outer=Outer(alpha=0.2, beta=1.0, gamma=1.0, rounds=rounds, turns=usual_turns(inner_steps)),
            evaluation=Evaluation(every=10, batches=16),
        )
    except ValueError as error:
        raise RunFileError(f"{error}.") from error


def to_toml(manifest: Manifest) -> str:
    """The run file of a manifest, every key written out."""
    table = msgspec.to_builtins(manifest)
    for key in ("owner", "format", "protocol", "base", "adapter"):
        del table[key]
    for section in (table["outer"], table["trust"]):
        for key in RETIRED & section.keys():
            del section[key]
    scalars = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
    sections = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = [_toml_line(key, value) for key, value in scalars.items()]
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(_toml_line(key, value) for key, value in section.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _toml_line(key: str, value: object) -> str:
    return f"{key} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_toml_line(json.dumps(key), one) for key, one in value.items() if one is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
