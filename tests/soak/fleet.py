"""The daemons of a soak: killed and frozen by real signals, read by their status.

The rule: a node keeps its directory and its port over all its lives.
"""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nolocod.identity import load_or_create
from nolocod.run import presets
from nolocod.studies import daemons
from nolocod.studies.daemons import Daemon, DaemonError
from tests.soak.verdict import Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

_INNER_STEPS = 20
_ENDLESS = 1_000_000
_DISK = 1e9
"""Bytes a second."""
SLOWED = Path(__file__).resolve().parents[1] / "support" / "slowed.py"


class Node(Daemon):
    """One node through all of its lives; `command` starts each."""

    def __init__(self, root: Path, number: int, command: Sequence[str], port: int, limit: str, step: float) -> None:
        limits = ("--max-upload", limit) if limit else ()
        super().__init__(root, "--no-upnp", "--threads", "1", *limits, listen=f"127.0.0.1:{port}")
        self.clock = root.with_name(f"{root.name}.clock")
        self.program = [str(SLOWED), str(step), str(_DISK), str(self.clock)]
        self.number = number
        self._command = command
        self.lives = 0
        self.away = False
        """Killed or frozen by us."""
        self.unwanted: list[str] = []
        """Ends that we did not cause."""
        self._ended = 0
        """The last life that ended so."""

    def live(self) -> None:
        """Start, or start again."""
        self.start(*self._command)
        self.lives += 1
        self.away = False

    def kill(self) -> None:
        self.away = True
        super().kill()

    def freeze(self) -> None:
        self.away = True
        self.signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal_group(signal.SIGCONT)
        self.away = False

    def mistake(self, by: float) -> None:
        """Its time of day is wrong by so many seconds from now on."""
        self.clock.write_text(str(by))

    def sample(self, at: float) -> Sample | None:
        """What it says now, with what the system says of its network process; None while it is away, starts, or is too
        busy."""
        if self.away or self.lives == self._ended:
            return None
        try:
            report = self.poll()
            if report is None:
                return None
            process = psutil.Process(report.pid)
            memory, files = process.memory_info().rss, process.num_fds()
        except psutil.Error:
            return None
        except DaemonError:
            self.unwanted.append(f"node {self.number} ended with status {self.running.returncode}; see {self.log}")
            self._ended = self.lives
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
            disk=_bytes_in(self.paths.root),
            log=self.log.stat().st_size,
        )


def _bytes_in(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it went meanwhile
            found += path.lstat().st_size
    return found


def fleet(root: Path, limits: Sequence[str], seed: int, step: float) -> list[Node]:
    """All nodes of a soak, of a tiny run that the first one founded; `limits` are their --max-upload, and an inner step takes
    `step` seconds at least."""
    run = presets.local_run(presets.MODELS["tiny"], rounds=_ENDLESS, inner_steps=_INNER_STEPS, seed=seed, own_text=False)
    daemons.found(run, root / "node-0")
    ports = _free_ports(len(limits))
    nodes = [Node(root / "node-0", 0, ["start"], ports[0], limits[0], step)]
    bootstrap = f"/ip4/127.0.0.1/tcp/{ports[0]}/p2p/{load_or_create(nodes[0].paths.identity).peer_id}"
    for number in range(1, len(limits)):
        command = ["join", "--bootstrap", bootstrap]
        nodes.append(Node(root / f"node-{number}", number, command, ports[number], limits[number], step))
    return nodes


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
