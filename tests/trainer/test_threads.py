"""Which work takes how many cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nolocod.trainer.settled import quiet
from tests.support.swarm import ENOUGH
from tests.support.trainer_parts import make_replica, sealed_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]


class Seen(TorchDispatchMode):
    """Notes how many threads each operation on a block may take."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own
        if any(isinstance(one, torch.Tensor) and one.numel() > 1000 for one in args) and not func.is_view:
            self.threads.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "modulo8"])
def test_outer_work_takes_one_thread_and_leaves_training_its_own(tmp_path: Path, codec: str) -> None:
    replica = make_replica(sealed_run(codec=codec), tmp_path)
    replica.step()
    outbox = torch.zeros(replica.plan.box_size, dtype=torch.uint8)
    replica.clip_change = 1e-6
    parts: dict[str, Callable[[], object]] = {
        "capture": lambda: replica.capture(0),
        "write": lambda: replica.write(outbox),
        "train on": replica.train_on,
        "inspect": lambda: replica.inspect(outbox),
        "take step": lambda: replica.take_step(outbox, b""),
        "merge": lambda: replica.merge(1, time.perf_counter()),
        "solo": replica.solo,
    }
    for name, part in parts.items():
        with Seen() as seen:
            part()
        assert seen.threads == {1}, name
        assert torch.get_num_threads() == 2, name
    with Seen() as seen:
        replica.step()
    assert seen.threads == {2}


def test_a_trainers_threads_wait_without_taking_a_core() -> None:
    """libgomp tells its settings as it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | {"OMP_DISPLAY_ENV": "true"}
    command = [sys.executable, "-c", "from nolocod.trainer import worker; worker.quiet(); import torch"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=ENOUGH, check=True)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


@pytest.mark.parametrize(("own", "used"), [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, "x")])
def test_a_trainers_memory_grows_in_segments_unless_its_owner_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], used: str
) -> None:
    monkeypatch.setattr(os, "environ", own.copy())
    quiet()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == used
