"""`nolocod testnet`: real daemons on this machine's loopback, watched until their run ends.

Each node is the process that a user would start, with its own data directory, in a session of its own:
Ctrl-C reaches the testnet alone, which then stops the nodes in order. What is shown comes from their
status pages, and the summary from their last checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import LocalError, NotRunningError, UsageError
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.run import presets
from nolocod.run.paths import DataDir
from nolocod.studies import processes

if TYPE_CHECKING:
    from nolocod.observe.status.report import StatusReport
    from nolocod.run.manifest import Sealed

_START_SECONDS = 60.0
"""For the first node to tell its address, and for any node to answer."""
_STOP_SECONDS = 30.0
_POLL_SECONDS = 1.0


class TestnetError(LocalError):
    """A node of the testnet ended before its run did."""


@dataclass(frozen=True)
class Options:
    """`outer_steps` is the run's goal; times in seconds."""

    nodes: int = 4
    outer_steps: int = 40
    inner_steps: int = 10
    data: Path | None = None
    model: str = "small"
    keep: Path | None = None
    seed: int = 0
    threads: int = 0
    """Of each trainer; 0 shares the cores out."""
    log_format: str = "human"

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 64:
            raise UsageError(f"--nodes {self.nodes} is not between 1 and 64.")
        if self.outer_steps < 1:
            raise UsageError(f"--outer-steps {self.outer_steps} is not positive.")


@dataclass(frozen=True)
class NodeSummary:
    peer_id: str
    inner_steps: int
    outer_paired: int
    outer_solo: int
    tokens: int
    val_loss_first: float | None
    val_loss_last: float | None
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class Summary:
    """What `--report` writes. A loss is None where the testnet was interrupted before it was measured."""

    nodes: list[NodeSummary]
    averaged_val_loss: float | None
    alone_val_loss: float | None
    weight_std: float | None
    seconds: float
    interrupted: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass
class Node:
    """One daemon's process, and the last report that it gave."""

    paths: DataDir
    process: subprocess.Popen[bytes]
    log: Path
    report: StatusReport | None = None

    def poll(self) -> None:
        """Ask for a report; an ended process is a TestnetError that shows the end of its log."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise TestnetError(f"{self.paths.root.name} ended with status {self.process.returncode}. Its last lines:\n{tail}")
        with suppress(NotRunningError):  # still starting, or too busy for a moment: what it last said stays shown
            self.report = client.read(data_directory.find_running(self.paths))

    @property
    def finished(self) -> bool:
        return self.report is not None and self.report.state == "finished"


class Testnet:
    """The nodes of one testnet. `root` holds node-0, node-1, … and their logs."""

    def __init__(self, options: Options, root: Path) -> None:
        self._options = options
        self._root = root
        self.nodes: list[Node] = []

    def start(self) -> Sealed:
        """Found the run, bring up its first node, and have the others join it."""
        options = self._options
        manifest = presets.local_run(
            presets.model(options.model, Path()),
            rounds=options.outer_steps,
            inner_steps=options.inner_steps,
            seed=options.seed,
            own_text=options.data is not None,
        )
        run_file = self._root / "run.toml"
        run_file.write_text(presets.to_toml(manifest), encoding="utf-8")
        sealed = data_directory.found(self._paths(0), run_file)
        self._spawn("start")
        for _ in range(1, options.nodes):
            self.join()
        return sealed

    def join(self) -> Node:
        """Have one more node join through the first."""
        return self._spawn("join", "--bootstrap", self._first_address())

    def _paths(self, index: int) -> DataDir:
        return DataDir(self._root / f"node-{index}")

    def _spawn(self, command: str, *arguments: str) -> Node:
        paths = self._paths(len(self.nodes))
        log = self._root / f"{paths.root.name}.log"
        line = [sys.executable, "-m", "nolocod", command, "--data-dir", str(paths.root), "--listen", "127.0.0.1:0"]
        threads = self._options.threads or max(1, (os.cpu_count() or 1) // self._options.nodes)
        line += ["--threads", str(threads), "--log-format", self._options.log_format, *arguments]
        if self._options.data is not None:
            line += ["--data", str(self._options.data.resolve())]
        with log.open("wb") as out:
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self.nodes.append(Node(paths, process, log))
        return self.nodes[-1]

    def _first_address(self) -> str:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.nodes[0].poll()
            try:
                return data_directory.find_running(self.nodes[0].paths).addresses[0]
            except NotRunningError:
                time.sleep(0.1)
        raise TestnetError(f"the first node told no address in {_START_SECONDS:.0f} s; see {self.nodes[0].log}.")

    def watch(self) -> Iterator[list[StatusReport | None]]:
        """Yield all reports once a second until every node has finished."""
        while True:
            for node in self.nodes:
                node.poll()
            yield [node.report for node in self.nodes]
            if all(node.finished for node in self.nodes):
                return
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End all nodes in order, or as soon as they may be."""
        processes.end([node.process for node in self.nodes], _STOP_SECONDS)


View = Callable[[str], AbstractContextManager[Callable[[list["StatusReport | None"]], None]]]
"""Shows reports under a title; `terminal.swarm_view` is the one that people see."""


def run(options: Options, view: View, say: Callable[[str], None]) -> Summary:
    """Run a whole testnet; Ctrl-C ends it early, with the summary of what was done."""
    began = time.monotonic()
    interrupted = False
    with folder(options.keep) as root:
        testnet = Testnet(options, root)
        try:
            sealed = testnet.start()
            with view(f"{options.nodes} nodes, {options.outer_steps} outer steps each; logs in {root}") as show:
                for reports in testnet.watch():
                    show(reports)
        except KeyboardInterrupt:
            interrupted = True
            say("Stopping the nodes; a second Ctrl-C kills them.")
        finally:
            testnet.stop()
        measured = _Measured(None, None, None)
        if not interrupted:
            say("Training one node alone on as many tokens, and measuring the averaged model.")
            try:
                measured = _measure(sealed, testnet.nodes, options)
            except KeyboardInterrupt:
                interrupted = True
        last = [node.report for node in testnet.nodes if node.report is not None]
        return Summary(
            nodes=[_sum_up(report) for report in last],
            averaged_val_loss=measured.averaged,
            alone_val_loss=measured.alone,
            weight_std=measured.std,
            seconds=time.monotonic() - began,
            interrupted=interrupted,
        )


@contextmanager
def folder(keep: Path | None) -> Iterator[Path]:
    """The nodes' folder: one that stays, which must be new or empty, or one that goes."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="nolocod-nodes-") as name:
            yield Path(name)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        taken = any(keep.iterdir())
    except OSError as error:
        raise UsageError(f"--keep {keep}: {error.strerror}.") from error
    if taken:
        raise UsageError(f"--keep {keep} is not empty.")
    yield keep


def _sum_up(report: StatusReport) -> NodeSummary:
    return NodeSummary(
        peer_id=report.peer_id,
        inner_steps=report.inner_steps,
        outer_paired=report.outer_paired,
        outer_solo=report.outer_solo,
        tokens=report.tokens,
        val_loss_first=report.validation_loss_first,
        val_loss_last=report.validation_loss,
        bytes_sent=report.sent,
        bytes_received=report.received,
    )


@dataclass(frozen=True)
class _Measured:
    averaged: float | None
    alone: float | None
    std: float | None


def _measure(sealed: Sealed, nodes: list[Node], options: Options) -> _Measured:
    """The figures that no node can know by itself; torch is imported here for the first time."""
    from nolocod.trainer import offline
    from nolocod.trainer.pipe import Setup

    folders = [node.paths.checkpoints for node in nodes]
    first, cache = nodes[0].report, nodes[0].paths.cache
    if first is None:
        raise AssertionError("a finished node without a report")
    setup = Setup(
        manifest=sealed.to_bytes(),
        peer_id=first.peer_id,
        data=options.data,
        device="cpu",
        threads=1,  # as the nodes had; more of them wait for one another where cores are shared
        checkpoints=folders[0],
        cache=cache,
    )
    # as many inner steps as the node that took most: the comparison favours the one that trained alone
    most = max(node.report.inner_steps for node in nodes if node.report is not None)
    averaged = offline.averaged_loss(sealed, folders, options.data, cache)
    std = offline.weight_std(sealed, folders)
    _, alone = offline.train_alone(setup, most)
    return _Measured(averaged, alone, std)
