"""The targets that need torch: a partner's tensor in every codec, and files of weights. The rule is that of `targets`.

An input of `tensor` says which codec, where in a good message, and which bytes to lay over it there.
"""

from __future__ import annotations

import functools
import math
from contextlib import suppress

import msgspec
import torch

from nolocod.errors import CheckpointError, RejectedTensorError
from nolocod.outer.codec import box_size
from nolocod.outer.codec.blocks import fragments_of
from nolocod.proto.types import SnapshotParts
from nolocod.run.manifest import Codec, Outer
from nolocod.trainer import checkpoint, compare_donors
from nolocod.trainer.capture import Capture, Plan, Weights
from tests.fuzz.targets import FOLDER, RUN, target

_CODECS: tuple[Codec, ...] = ("float32", "bfloat16", "modulo8", "modulo4")
_SIZE = 1500


@functools.cache
def _met(codec: Codec) -> tuple[Capture, torch.Tensor]:
    """A capture in the middle of an exchange, and the partner's good message."""
    torch.set_num_threads(1)
    fragments = fragments_of((_SIZE,), 1)
    plan = Plan(codec, Outer(), fragments)
    boxes, captures = [], []
    for seed in (1, 2):
        phi = torch.randn(_SIZE, generator=torch.Generator().manual_seed(seed)) * 1e-3
        weights = Weights.of(phi.clone(), phi, torch.zeros_like(phi), fragments)
        for distances in weights.distance:
            distances.fill_(1e-2)
        captures.append(Capture(plan, weights, 0, seed))
        captures[-1].keep()
        boxes.append(torch.zeros(box_size(codec, fragments), dtype=torch.uint8))
        captures[-1].write(boxes[-1])
    return captures[0], boxes[1]


@target(*(bytes([number, 0, at]) + b"\xff\x7f" for number in range(len(_CODECS)) for at in (0, 24, 32, 64, 68, 90)), most=256)
def tensor(raw: bytes) -> None:
    if len(raw) < 3:
        return
    capture, good = _met(_CODECS[raw[0] % len(_CODECS)])
    inbox = good.clone()
    start = int.from_bytes(raw[1:3], "big") % len(inbox)
    content = torch.frombuffer(bytearray(raw[3:] + b"\0"), dtype=torch.uint8)[: min(len(raw) - 3, len(inbox) - start)]
    inbox[start : start + len(content)] = content
    with suppress(RejectedTensorError):
        capture.inspect(inbox)
        assert math.isfinite(capture.spread)


def _file(size: int = 4) -> bytes:
    path = FOLDER.write("good", b"")
    with path.open("wb") as handle:
        checkpoint.write_tensors(handle, {"phi": torch.zeros(size).reshape(-1, 4)}, {"run_id": RUN})
    return path.read_bytes()


@target(_file())
def tensor_file(raw: bytes) -> None:
    """What a donor sends, and a checkpoint."""
    with suppress(CheckpointError):
        checkpoint.read_tensors(FOLDER.write("weights.safetensors", raw))


@target(_file(), _file(16))
def weights_sample(raw: bytes) -> None:
    """Of another donor's weights, in two pieces, the second of which begins within a value."""
    path = FOLDER.write("sample", raw)
    spans = ((0, len(raw) // 2), (len(raw) // 2 + 3, len(raw) // 2 - 3))
    compare_donors.objection([("phi", torch.ones(4, 4))], [SnapshotParts(path, spans)])


@target(msgspec.json.encode({"run_id": RUN, "tensors": "00", "standing": {"round": 3, "tokens": 30, "loss": 2.5}}))
def checkpoint_state(raw: bytes) -> None:
    folder = FOLDER.write("tensors.safetensors", b"").parent
    FOLDER.write("state.json", raw)
    with suppress(CheckpointError):
        checkpoint.check(folder, RUN)
