"""The published model that a run starts from: its files by name, size and hash.

The rule: the manifest pins every byte, so that wherever a node has the files from, it has the same. Names are plain, and none
of a kind that code is loaded from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from nolocod.proto.types import CHUNK_SIZE, Describing

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.proto.types import Description

CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""What an export hands on as it is, where the model has it."""
SUFFIX = ".safetensors"


class BaseFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file. `root` is its description's, in hex: every chunk can be checked, whoever gives it."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}\.(json|jinja|safetensors)\Z")]
    size: Annotated[int, Meta(gt=0, lt=1 << 40)]
    root: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files. `source` and `revision` name them on the hub; both are empty where they came from a folder."""

    files: Annotated[tuple[BaseFile, ...], Meta(min_length=1, max_length=1000)]
    source: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})?\Z")] = ""
    revision: Annotated[str, Meta(pattern=r"^([0-9a-f]{40})?\Z")] = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def described(path: Path) -> Description:
    """Hash the file at `path` chunk by chunk, of which one is in memory at a time. OSError."""
    whole = Describing()
    with path.open("rb") as handle:
        while content := handle.read(CHUNK_SIZE):
            whole.update(content)
    return whole.description()


def differs(path: Path, file: BaseFile) -> Description | str:
    """The description of `path` where it has the bytes of `file`; else what is wrong with it."""
    try:
        if (size := path.stat().st_size) != file.size:
            return f"{path} has {size} bytes where the run's {file.name} has {file.size}."
        description = described(path)
    except OSError as error:
        return f"{path}: {error.strerror}."
    return description if description.root.hex() == file.root else f"{path} has other bytes than the run's {file.name}."
