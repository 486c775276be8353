"""Checkpoints and weight files: safetensors, written piece by piece, whole or not at all.

The rule: a checkpoint resumes exactly. It holds phi, delta, theta, Adam's moments, the position in the data
and torch's random state; its JSON half names the hash of its tensor half, so that damage is found before
anything is loaded. Writing never needs a second copy of the model in memory. That the disk has room is known before.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import blake3
import msgspec
import safetensors
import torch

from nolocod.disk import (
    PARTIAL,
    check_room,
    disk_errors,
    folder_written_whole,
    large_written_whole,
    restore_folders,
    written_whole,
)
from nolocod.errors import CheckpointError
from nolocod.outer.codec.blocks import bytes_of
from nolocod.proto.types import Describing, Standing
from nolocod.trainer.clipping import History
from nolocod.trainer.threads import one_thread
from nolocod.trainer.windows import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from nolocod.proto.types import Description

KEPT = 2
"""Checkpoints kept: the last, and the one before in case the last is damaged."""

_PIECE = 1 << 20
"""Elements that are written at once: training has the interpreter meanwhile, and between pieces it might wait for it."""
_TENSORS = "tensors.safetensors"
_STATE = "state.json"
ANY: Mapping[str, torch.dtype] = MappingProxyType({})
"""Tensors are written as they are."""
_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The half of a checkpoint that is not tensors."""

    run_id: str
    peer_id: str
    standing: Standing
    ages: tuple[int, ...]
    """Of each fragment: inner steps since its last outer step."""
    inner_steps: int
    optimizer_steps: int
    position: Position = Position()
    text: str = ""
    """Of which text that is (manifest: Data.text); empty in checkpoints of before."""
    layout: bytes = b""
    """Of the tensors that phi, delta and theta hold (proto.types.Built), and the `libraries` that made them so; empty in
    checkpoints of before."""
    libraries: str = ""
    partners: History = History()
    tensors: str = ""
    """BLAKE3 of the tensor file."""


class Written(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class Digest(Protocol):
    """What takes in the bytes of a file as they are written."""

    def update(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint, if any, and what was wrong with newer ones."""

    path: Path | None
    state: State | None
    trouble: tuple[str, ...]


def go_on() -> None:
    """What is called between the pieces of a file where nothing is to be done there."""


def write_tensors(
    handle: Written,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    digest: Digest | None = None,
    check: Callable[[], None] = go_on,
    kinds: Mapping[str, torch.dtype] = ANY,
) -> None:
    """Write a safetensors file, and have `digest` take in its bytes. `check` is called often, and may raise to end it. `kinds`:
    what tensors are written in, where it is not their own.

    The format's own library copies all tensors before it writes; this goes piece by piece, from any device.
    """

    def put(data: bytes | memoryview) -> None:
        if digest is not None:
            digest.update(data)
        handle.write(data)

    put(head_of(tensors, metadata, kinds))
    with one_thread():  # beside training
        for name, tensor in tensors.items():
            flat, kind = tensor.detach().reshape(-1), kinds.get(name, tensor.dtype)
            for start in range(0, flat.numel(), _PIECE):
                check()
                put(bytes_of(flat[start : start + _PIECE].cpu().to(kind).view(torch.uint8)))


def head_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], kinds: Mapping[str, torch.dtype] = ANY) -> bytes:
    """What a safetensors file begins with, its length first."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        kind = kinds.get(name, tensor.dtype)
        size = tensor.numel() * kind.itemsize
        header[name] = {"dtype": _KINDS[kind], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file; CheckpointError if it is none."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}).") from error


def save(folder: Path, state: State, tensors: Mapping[str, Tensor], check: Callable[[], None] = go_on) -> int:
    """Write a checkpoint below `folder`, drop all but it and one more, and return its size in bytes.

    Raises DiskFullError, DataDirError, or what `check` raises; older checkpoints are then untouched.
    """
    target = folder / f"round-{state.standing.round:08d}"
    check_room(folder, size_of(tensors))
    with folder_written_whole(target) as partial:
        with large_written_whole(partial / _TENSORS) as handle:
            write_tensors(handle, tensors, {"run_id": state.run_id}, digest := blake3.blake3(), check)
        with written_whole(partial / _STATE) as handle:
            handle.write(msgspec.json.encode(msgspec.structs.replace(state, tensors=digest.hexdigest())))
    size = (target / _TENSORS).stat().st_size
    with disk_errors(folder):
        # The one just written stays, whatever its round: those of higher rounds may be damaged.
        for old in [path for path in _all(folder) if path != target][KEPT - 1 :]:
            shutil.rmtree(old)
    return size


def write_snapshot(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    kinds: Mapping[str, torch.dtype],
    check: Callable[[], None] = go_on,
) -> Description:
    """Write weights for newcomers to `path`, whole or not at all; hashed chunk by chunk. Raises as `save`."""
    check_room(path.parent, size_of(tensors, kinds))
    with large_written_whole(path) as handle:
        write_tensors(handle, tensors, metadata, whole := Describing(), check, kinds)
    return whole.description()


def size_of(tensors: Mapping[str, Tensor], kinds: Mapping[str, torch.dtype] = ANY) -> int:
    """Bytes of their content."""
    return sum(tensor.numel() * kinds.get(name, tensor.dtype).itemsize for name, tensor in tensors.items())


def recover(folder: Path) -> None:
    """Bring back and remove what a crash left behind: for the node that writes here alone, before it writes."""
    if folder.exists():
        restore_folders(folder)
        for left in folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)


def find(folder: Path, run_id: str) -> Found:
    """Look for the newest whole checkpoint of the run. Nothing is changed: a node may be writing one."""
    trouble: list[str] = []
    for path in _all(folder):
        try:
            return Found(path, check(path, run_id), tuple(trouble))
        except CheckpointError as error:
            trouble.append(str(error))
    return Found(None, None, tuple(trouble))


def check(path: Path, run_id: str) -> State:
    """Return the state of the checkpoint at `path`; CheckpointError unless it is whole and of this run."""
    try:
        state = msgspec.json.decode((path / _STATE).read_bytes(), type=State)
        digest = blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path / _TENSORS).hexdigest()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error
    if digest != state.tensors:
        raise CheckpointError(f"{path} does not match its hash.")
    if state.run_id != run_id:
        raise CheckpointError(f"{path} is of run {state.run_id[:12]}, not {run_id[:12]}.")
    return state


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint at `path`."""
    return read_tensors(path / _TENSORS)


def _all(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("round-*") if path.suffix != PARTIAL), reverse=True)
