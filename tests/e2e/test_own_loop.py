"""Somebody's own training loop beside other nodes: the example of docs/your-own-loop.md, and this very process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

import nolocod
from nolocod.errors import (
    DaemonEndedError,
    DataDirInUseError,
    LoopEndedError,
    NotRunningError,
    ParametersDifferError,
    UsageError,
)
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.paths import DataDir
from tests.support.swarm import ENOUGH, gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.swarm import Swarm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"
FLAGS = ("--listen", "127.0.0.1:0", "--no-upnp", "--checkpoint-every", "0")
RUNNER = f"""
import functools, os, runpy, sys, time, nolocod, torch
torch.set_num_threads(1)
os.nice(10)
for name in ("create", "join"):
    setattr(nolocod, name, functools.partial(getattr(nolocod, name), flags={FLAGS}))
if os.environ.get("FORKS"):  # as a data loader does
    class Forking(nolocod.NoLoCo):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            if os.fork() == 0:
                time.sleep({ENOUGH})
                os._exit(0)
    nolocod.NoLoCo = Forking
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


class Example:
    """The example in a process of its own."""

    def __init__(self, root: Path, *address: str, forks: bool = False) -> None:
        self.paths = DataDir(root)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(root), *address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | ({"FORKS": "1"} if forks else {}),
        )
        self.partners: set[str] = set()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def paired(self) -> set[str]:
        """Those with whom it committed an exchange, as often as it was asked."""
        try:
            report = client.read(data_directory.find_running(self.paths))
        except NotRunningError:
            return set()
        self.partners |= {row.partner for row in report.exchanges if row.outcome == "committed"}
        return self.partners

    @property
    def daemon(self) -> psutil.Process:
        return psutil.Process(data_directory.find_running(self.paths).pid)

    def log(self) -> str:
        return self.paths.log.read_text() if self.paths.log.exists() else "(no log)"


@pytest.fixture
def examples() -> Iterator[list[Example]]:
    started: list[Example] = []
    yield started
    for example in started:
        with example.process as process:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                child.kill()
            process.kill()


def wait(what: str, condition: Callable[[], object], *examples: Example) -> None:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {ENOUGH} s: {what}\n" + "\n".join(example.log()[-2000:] for example in examples))
        time.sleep(0.1)


def test_the_example_pairs_with_both_others_and_nothing_outlives_its_end(tmp_path: Path, examples: list[Example]) -> None:
    examples.append(first := Example(tmp_path / "a"))
    address = first.line().split()[-1]
    examples += [killed := Example(tmp_path / "b", address, forks=True), stopped := Example(tmp_path / "c", address)]
    wait("the first has paired with both", lambda: len(first.paired()) == 2, *examples)

    daemon, forked = killed.daemon, psutil.Process(killed.process.pid).children()
    killed.process.kill()
    wait("the daemon ends with its loop", lambda: gone(daemon), killed)
    assert LoopEndedError.entry.code in killed.log()
    assert any(one.is_running() for one in forked), "a forked process holds none of the pipe"
    for one in forked:
        if one != daemon:
            one.kill()

    daemon = stopped.daemon
    daemon.send_signal(signal.SIGTERM)
    assert stopped.process.wait(ENOUGH) == 1
    assert stopped.process.stderr is not None
    assert DaemonEndedError.entry.code in stopped.process.stderr.read()
    assert gone(daemon)
    assert any(stopped.paths.checkpoints.glob("round-*")), "the loop wrote one when the daemon was told to stop"

    daemon = first.daemon
    first.process.send_signal(signal.SIGTERM)
    wait("the daemon ends with its loop", lambda: gone(daemon), first)
    named = {path.name for path in Path("/dev/shm").glob("*nolocod*")}
    assert not {name for name in named if not name.startswith("nolocod-fuzz-")}, "fuzzing's are another test's"


def tokens(model: torch.nn.Module) -> torch.Tensor:
    """A loss of `model` on what has something to learn in it."""
    windows = (torch.arange(33) * 7 + torch.randint(0, 256, (2, 1))) % 256
    logits = model(input_ids=windows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def test_a_loop_beside_two_plain_daemons(swarm: Swarm) -> None:
    """In this process: it pairs with both, closes, resumes, and is told what is wrong."""
    first, second = swarm.joined_by(swarm.found(), 1)
    folder = swarm.root / "loop"

    def train(opt: nolocod.NoLoCo, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENOUGH
        while not until():
            assert time.monotonic() < deadline, "\n".join(
                [one.tail() for one in swarm.daemons] + [(folder / "node.log").read_text()]
            )
            for _ in range(20):
                loss = tokens(model)
                loss.backward()  # type: ignore[no-untyped-call]
                opt.step(loss=loss)
                opt.zero_grad()

    wait("the first node tells its address", lambda: first.report is not None)
    with nolocod.join(bootstrap=first.address, data_dir=folder, flags=FLAGS) as loop:
        model = loop.model()
        opt = nolocod.NoLoCo(model.parameters(), torch.optim.AdamW(model.parameters(), 1e-3), swarm=loop)
        assert opt.param_groups is opt.optimizer.param_groups
        partners: set[str] = set()

        def paired() -> bool:
            nonlocal partners
            partners |= {row.partner for row in loop.status().exchanges if row.outcome == "committed"}
            return {one.report.peer_id for one in (first, second) if one.report} <= partners

        train(opt, paired)
        assert loop.round > 0
        assert not loop.finished
        with pytest.raises(DataDirInUseError, match="held by process"):
            nolocod.join(data_dir=folder)
        with pytest.raises(UsageError, match="takes one NoLoCo"):
            nolocod.NoLoCo(model.parameters(), opt.optimizer, swarm=loop)
    at_close, moments = flat(model), opt.state_dict()["state"][0]["exp_avg"].clone()
    with pytest.raises(NotRunningError):
        loop.status()
    opt.step()  # a closed swarm is no hindrance

    other = torch.nn.Linear(2, 2)
    with nolocod.join(data_dir=folder, flags=FLAGS) as loop, pytest.raises(ParametersDifferError, match="parameter 0 is"):
        nolocod.NoLoCo(other.named_parameters(), torch.optim.SGD(other.parameters()), swarm=loop)

    swarm.stop(first, second)
    loop = nolocod.join(data_dir=folder, flags=FLAGS)
    model = loop.model()
    opt = nolocod.NoLoCo(model.parameters(), torch.optim.AdamW(model.parameters(), 1e-3), swarm=loop)
    assert torch.equal(flat(model), at_close)
    assert torch.equal(opt.state_dict()["state"][0]["exp_avg"], moments)
    train(opt, lambda: loop.round > 0)
    os.kill(data_directory.find_running(DataDir(folder)).pid, signal.SIGKILL)
    with pytest.raises(DaemonEndedError, match="its exit status was -9"):
        train(opt, lambda: False)
    train(opt, iter([False, True]).__next__)  # alone
    loop.close()
