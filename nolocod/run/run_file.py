"""Reads the run file: TOML in which whoever founds a run says what is to be trained, and how.

The rule: whatever is wrong is told with its line and key. A file that it names (a tokenizer, a published configuration) is
read into the manifest, so that nobody who joins needs it.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from nolocod.errors import RunFileError, UnstableError
from nolocod.run.manifest import Inner, checked
from nolocod.run.presets import usual_turns
from nolocod.run.published import without_inert

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.run.base import Base
    from nolocod.run.manifest import Manifest


@dataclass(frozen=True)
class OpenBase:
    """A model to start from: its configuration as published, its files, and the folder in which they lie."""

    config: dict[str, Any]
    pinned: Base
    folder: Path


def read_run_file(
    path: Path, tell: Callable[[str], None] = lambda _: None, open_base: Callable[[str], OpenBase] | None = None
) -> Manifest:
    """Parse and check a TOML run file. Raises RunFileError that names the line and the key.

    `tell` gets one line for each key of the model that is left out. `open_base` reads the model to start from.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise RunFileError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path} is not UTF-8 text.") from error
    except tomllib.TOMLDecodeError as error:
        raise RunFileError(f"{path} is not TOML: {error}.") from error
    _inline_tokenizer(table, path)
    try:
        if "base" in table:
            raise RunFileError("`base` is a key of `[model]`.")
        if isinstance(model := table.get("model"), dict):
            if isinstance(name := model.get("base"), str) and open_base is not None:
                table["base"], model = _with_base(open_base(name), table, model)
            table["model"] = without_inert(_with_config(model, path), tell)
        return from_table(table)
    except msgspec.ValidationError as error:
        raise RunFileError(f"{path}{_where(text, error)}: {error}") from error
    except RunFileError as error:
        raise type(error)(f"{path}{_where(text, error)}: {error.cause}", remedy=error.remedy) from error


def from_table(table: dict[str, Any]) -> Manifest:
    """The manifest of a run file's keys, in as many turns as are usual. Raises msgspec.ValidationError or RunFileError."""
    match table.get("inner", {}), table.get("outer", {}):
        case dict(inner), dict(outer) if isinstance(steps := inner.get("steps", Inner().steps), int):
            table = table | {"outer": {"turns": usual_turns(steps)} | outer}
    (manifest := checked(table)).in_turns()
    return manifest


def _inline_tokenizer(table: dict[str, Any], path: Path) -> None:
    """Replace the tokenizer's path by the file's text: a joiner gets all it needs with the manifest."""
    data = table.get("data")
    name = data.get("tokenizer") if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(name, str) and name not in ("bytes", "base"):
        try:
            data["tokenizer"] = (path.parent / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunFileError(f"{path}: `data.tokenizer`: {name} cannot be read as text.") from error


def _with_base(base: OpenBase, table: dict[str, Any], model: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the manifest pins, and `model` with the base's configuration for the keys that are not given."""
    data = table.setdefault("data", {})
    if isinstance(data, dict):
        data.setdefault("tokenizer", "base")
    model = base.config | {key: value for key, value in model.items() if key != "base"}
    return msgspec.to_builtins(base.pinned), model


def _with_config(model: dict[str, Any], path: Path) -> dict[str, Any]:
    """`model`, in which the key `config` names a published config.json: what this has stands in for keys that are not given."""
    if not isinstance(name := model.get("config"), str):
        return model
    return read_config_file(path.parent / name) | {key: value for key, value in model.items() if key != "config"}


def read_config_file(path: Path) -> dict[str, Any]:
    """What a config.json holds. RunFileError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFileError(f"`model.config`: {path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"`model.config`: {path} is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise RunFileError(f"`model.config`: {path} holds no JSON object.")
    return config


def _where(text: str, error: Exception) -> str:
    """Find the line of the key that msgspec complains about ("... at `$.inner.steps`")."""
    if isinstance(error, UnstableError):
        keys = ["outer", "gamma"]
    elif isinstance(error, RunFileError):  # a retired key
        keys = error.cause.split("`")[1].split(".")
    else:
        keys = re.findall(r"\.(\w+)", "".join(re.findall(r"at `\$((?:\.\w+)*)", str(error))))
        keys += re.findall(r"field `(\w+)`", str(error))[:1]
    section, *rest = keys or [""]
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[{1,2}([\w.]+)\]", line)
        if header:
            inside = header.group(1) == section
            if inside and not rest:
                return f", line {number}"
        elif rest and inside and re.match(rf"\s*{rest[-1]}\s*=", line):
            return f", line {number}, key `{'.'.join(keys)}`"
        elif not rest and re.match(rf"\s*{section}\s*=", line):
            return f", line {number}, key `{section}`"
    return f", key `{'.'.join(keys)}`" if keys else ""
