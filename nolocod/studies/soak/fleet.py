"""The daemons of a soak: started as users start them, killed and frozen by real signals, read by their status.

The rule: a node keeps its directory and its port over all its lives; every signal goes to its whole session, so that
its trainer shares its fate.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from nolocod.errors import NotRunningError
from nolocod.identity import load_or_create
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.run import presets
from nolocod.run.paths import DataDir
from nolocod.studies import processes
from nolocod.studies.soak.verdict import Sample

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nolocod.observe.status.report import StatusReport

_STOP_SECONDS = 60.0
_INNER_STEPS = 20
_ENDLESS = 1_000_000


@dataclass
class Daemon:
    """One node, through all of its lives."""

    number: int
    paths: DataDir
    log: Path
    line: list[str]
    process: subprocess.Popen[bytes] | None = None
    lives: int = 0
    away: bool = False
    """Killed or frozen by us."""
    unwanted: list[str] = field(default_factory=list)
    """Ends that we did not cause."""

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self.lives += 1
        self.away = False

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.away = True
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def freeze(self) -> None:
        self.away = True
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)
        self.away = False

    def report(self) -> StatusReport | None:
        """What it says now; None while it is away, starts, or is too busy."""
        if self.away or self.process is None:
            return None
        if self.process.poll() is not None:
            self.unwanted.append(f"node {self.number} ended with status {self.process.returncode}; see {self.log}")
            self.process = None
            return None
        try:
            report = client.read(data_directory.find_running(self.paths))
        except NotRunningError:
            return None
        return report if report.pid == self.process.pid else None

    def sample(self, at: float) -> Sample | None:
        """A report with what the system says of the network process."""
        report = self.report()
        if report is None:
            return None
        try:
            process = psutil.Process(report.pid)
            memory, files = process.memory_info().rss, process.num_fds()
        except psutil.Error:
            return None
        return Sample(
            at=at,
            node=self.number,
            life=self.lives,
            memory=memory,
            tasks=report.tasks,
            files=files,
            round=report.round,
            inner_steps=report.inner_steps,
            paired=report.outer_paired,
            committed=report.exchanges_by_outcome.get("committed", 0),
            checkpoint=report.checkpoint_round,
            loss=report.validation_loss,
            training=report.state == "training",
        )


class Fleet:
    """All daemons; `limits` are their --max-upload."""

    def __init__(self, root: Path, limits: Sequence[str], seed: int, model: str) -> None:
        manifest = presets.local_run(
            presets.model(model, root), rounds=_ENDLESS, inner_steps=_INNER_STEPS, seed=seed, own_text=False
        )
        run_file = root / "run.toml"
        run_file.write_text(presets.to_toml(manifest), encoding="utf-8")
        first = DataDir(root / "node-0")
        data_directory.found(first, run_file)
        ports = _free_ports(len(limits))
        bootstrap = f"/ip4/127.0.0.1/tcp/{ports[0]}/p2p/{load_or_create(first.identity).peer_id}"
        self.daemons = []
        for number, (port, limit) in enumerate(zip(ports, limits, strict=True)):
            paths = DataDir(root / f"node-{number}")
            command = ["join", "--bootstrap", bootstrap] if number else ["start"]
            line = [sys.executable, "-m", "nolocod", *command, "--data-dir", str(paths.root), "--no-upnp"]
            line += ["--listen", f"127.0.0.1:{port}", "--threads", "1", *(["--max-upload", limit] if limit else [])]
            self.daemons.append(Daemon(number, paths, root / f"node-{number}.log", line))

    def stop(self) -> None:
        """End all nodes in order, or as soon as they may be."""
        for daemon in self.daemons:
            daemon.thaw()
        processes.end([daemon.process for daemon in self.daemons if daemon.process is not None], _STOP_SECONDS)


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now, each another one."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
