"""A tiny run for the trainer's tests: a llama of a few thousand weights and a few KB of text."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import psutil
import torch

from nolocod.identity import Identity
from nolocod.run.data import Data
from nolocod.run.manifest import Evaluation, Inner, Manifest, Outer, Sealed, seal
from nolocod.trainer import checkpoint
from nolocod.trainer.pipe import Setup
from nolocod.trainer.replica import Replica, open_replica
from tests.support.swarm import children

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from torch import Tensor

    from nolocod.proto.types import Description, Inspection
    from nolocod.trainer.process import TrainerProcess

OWNER = Identity.from_secret(b"o" * 32)
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def sealed_run(**changes: Any) -> Sealed:  # noqa: ANN401 - any key of the manifest
    """A tiny run; `changes` replace manifest keys."""
    keys: dict[str, Any] = {
        "name": "tiny",
        "model": MODEL,
        "data": Data(source="text"),
        "inner": Inner(steps=4, batch=2, sequence=32, learning_rate=3e-3),
        "outer": Outer(rounds=100),
        "evaluation": Evaluation(every=2, batches=2),
    }
    return seal(Manifest(**(keys | changes)), OWNER)


def child_of(trainer: TrainerProcess) -> psutil.Process:
    """Its process. The handle does not tell its pid: the child is known by the descriptor that it was given."""
    found = children(psutil.Process(), "nolocod.trainer.worker")
    return next(child for child in found if child.cmdline()[-1:] == [str(trainer._memory)])


def write_text(folder: Path) -> Path:
    """A text with something to learn in it."""
    words = ["time", "and", "tide", "wait", "for", "no", "node"]
    rng = random.Random(0)
    path = folder / "text.txt"
    path.write_text(" ".join(rng.choice(words) for _ in range(4000)))
    return path


def setup_for(sealed: Sealed, folder: Path, peer: str = "alice", **changes: Any) -> Setup:  # noqa: ANN401 - any key of Setup
    """What a node in `folder` is told."""
    keys: dict[str, Any] = {
        "manifest": sealed.to_bytes(),
        "peer_id": peer,
        "data": write_text(folder),
        "devices": "cpu",
        "threads": 1,
        "checkpoints": folder / peer / "checkpoints",
        "cache": folder / "cache",
    }
    return Setup(**(keys | changes))


def make_replica(sealed: Sealed, folder: Path, peer: str = "alice") -> Replica:
    """A replica in this process."""
    return open_replica(sealed, peer, write_text(folder), folder / "cache")


def save(replica: Replica, folder: Path, peer: str) -> int:
    """Write a checkpoint below `folder`."""
    return checkpoint.save(folder, *replica.to_save(peer))


async def trade(first: TrainerProcess, second: TrainerProcess, subject: int = 0, after: int = 0) -> list[Inspection]:
    """Have both capture, the first after so many inner steps, and inspect each other's messages."""
    messages = []
    for trainer, steps in ((first, after), (second, 0)):
        description = await trainer.capture(subject, steps)
        messages.append(bytes(trainer.outbox.view(0, description.size)))
    found = []
    for trainer, message in ((first, messages[1]), (second, messages[0])):
        trainer.inbox.view(0, len(message))[:] = message
        found.append(await trainer.inspect(probation=False))
    return found


def as_donated(replica: Replica) -> Tensor:
    """The slow weights that a newcomer gets, flat: matrices have gone through bfloat16."""
    slow = [one for _, one in replica.layout.split(replica.phi)]
    return torch.cat([(one.bfloat16() if one.dim() > 1 else one).float().flatten() for one in slow])


def dump(replica: Replica, path: Path) -> Description:
    """Write weights for newcomers."""
    return checkpoint.write_snapshot(path, *replica.snapshot())
