"""Real daemons for studies: started as users start them, ended by real signals, watched by their status.

The rule: a daemon keeps its directory and its log over all its lives. Each life leads a process group of its own: Ctrl-C
reaches the study alone, which then ends its daemons, and what is sent to a daemon's group reaches its trainer too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import LocalError, NotRunningError, UsageError
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.paths import DataDir
from nolocod.run import presets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nolocod.observe.status.report import StatusReport
    from nolocod.run.manifest import Manifest, Sealed


class DaemonError(LocalError):
    """A daemon ended by itself, or did not get as far as it should."""


class Daemon:
    """One daemon: its directory `root`, with its log beside it, and its process while there is one. `options` go with
    every start; `listen` is where it listens for peers."""

    program: Sequence[str] = ("-m", "nolocod")
    """What Python is to run."""
    source: Path | None = None
    """The folder of another release that is to run; None for this one."""

    def __init__(self, root: Path, *options: str, listen: str = "127.0.0.1:0") -> None:
        self.paths = DataDir(root)
        self.log = root.with_name(f"{root.name}.log")
        self._options = ("--data-dir", str(root), "--listen", listen, *options)
        self.process: subprocess.Popen[bytes] | None = None
        self.last: StatusReport | None = None
        """What it said last."""

    def start(self, *command: str) -> None:
        """`nolocod COMMAND` in the background."""
        line = [sys.executable, *self.program, *command, *self._options]
        environment = os.environ | {"PYTHONPATH": str(self.source)} if self.source else None
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.source, env=environment, process_group=0
            )

    @property
    def running(self) -> subprocess.Popen[bytes]:
        """Its process, that of its last life; it has one once it was started."""
        if self.process is None:
            raise AssertionError("a daemon that was never started")
        return self.process

    @property
    def address(self) -> str:
        """Where peers reach it. NotRunningError until it has told."""
        return data_directory.find_running(self.paths).addresses[0]

    def poll(self) -> StatusReport | None:
        """What it says now; None while it starts, or is too busy. DaemonError with the end of its log if it ended."""
        if self.running.poll() is not None:
            status = self.running.returncode
            raise DaemonError(f"{self.paths.root.name} ended with status {status}. Its last lines:\n{self.tail()}")
        try:
            report = client.read(data_directory.find_running(self.paths))
        except NotRunningError:
            return None
        if report.pid != self.running.pid:  # of the life before
            return None
        self.last = report
        return report

    def wait(self, what: str, seconds: float, condition: Callable[[StatusReport], bool]) -> StatusReport:
        """The first report of which `condition` holds; DaemonError after so many seconds, or if it ends before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            report = self.poll()
            if report is not None and condition(report):
                return report
            time.sleep(0.1)
        raise DaemonError(f"{self.paths.root.name}: {what} took more than {seconds:.0f} s. Its last lines:\n{self.tail()}")

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    def signal_group(self, number: signal.Signals) -> None:
        """To the daemon and its trainer."""
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, number)

    def kill(self) -> None:
        """At once, with its trainer."""
        self.signal_group(signal.SIGKILL)
        self.running.wait()


def end(daemons: Sequence[Daemon], seconds: float) -> None:
    """SIGTERM to all, so that each writes its checkpoint; SIGKILL to what is left after so many seconds, or when a
    second Ctrl-C ends the waiting."""
    started = [daemon for daemon in daemons if daemon.process is not None]
    for daemon in started:
        daemon.running.terminate()
    deadline = time.monotonic() + seconds
    try:
        for daemon in started:
            with suppress(subprocess.TimeoutExpired):
                daemon.running.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for daemon in started:
            if daemon.running.poll() is None:
                daemon.kill()


def found(run: Manifest, root: Path) -> Sealed:
    """Sign `run` as the node in `root`, whose run it then is; the run file lies beside it."""
    run_file = root.parent / "run.toml"
    run_file.write_text(presets.to_toml(run), encoding="utf-8")
    return data_directory.found(DataDir(root), run_file)


@contextmanager
def folder(keep: Path | None = None) -> Iterator[Path]:
    """A folder for daemons: `keep`, which stays and must be new or empty, or one that goes."""
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
