"""`nolocod bench training`: what the daemon costs the inner steps, measured side by side.

A bare PyTorch loop and one whole daemon (network process, trainer, solo outer steps, checkpoints) run
the same model, data and batch on the same number of threads, in turn, pair by pair, so that a slow
minute of the machine hits both. While one is measured the other is frozen (SIGSTOP) or not running.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod import datadir, presets
from nolocod.config import DataDir
from nolocod.errors import LocalError, NotRunningError
from nolocod.status import client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_START_SECONDS = 120.0


class BenchError(LocalError):
    """What is measured did not run."""


@dataclass(frozen=True)
class Options:
    """`seconds` of each measurement; `threads` 0 leaves the choice to torch."""

    model: str = "small"
    seconds: float = 10.0
    pairs: int = 5
    threads: int = 0


@dataclass(frozen=True)
class TrainingResult:
    """Tokens per second of each pair, and what follows from them."""

    bare: list[float]
    daemon: list[float]

    @property
    def ratio(self) -> float:
        """Median over pairs of daemon / bare."""
        return statistics.median(daemon / bare for bare, daemon in zip(self.bare, self.daemon, strict=True))

    def to_json(self) -> str:
        return json.dumps({"bare_tokens_per_second": self.bare, "daemon_tokens_per_second": self.daemon, "ratio": self.ratio})


def training(options: Options, say: Callable[[str], None]) -> TrainingResult:
    """Measure `options.pairs` pairs. Raises BenchError if one of the two does not run."""
    bare: list[float] = []
    daemon: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="nolocod-bench-") as folder,
        _daemon(DataDir(Path(folder) / "node"), options) as rate,
    ):
        for number in range(1, options.pairs + 1):
            bare.append(_bare(DataDir(Path(folder) / "node"), options))
            daemon.append(rate())
            say(f"pair {number}: bare {bare[-1]:,.0f}, daemon {daemon[-1]:,.0f} tokens/s, ratio {daemon[-1] / bare[-1]:.3f}")
    return TrainingResult(bare, daemon)


def _bare(paths: DataDir, options: Options) -> float:
    """Tokens per second of a plain loop in a process of its own."""
    command = [sys.executable, "-m", "nolocod.trainer.bare", str(paths.root), str(options.seconds), str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS + 2 * options.seconds, check=False)
    if done.returncode != 0:
        raise BenchError(f"the bare loop ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


@contextmanager
def _daemon(paths: DataDir, options: Options) -> Iterator[Callable[[], float]]:
    """A lone daemon, frozen but for when its rate is asked for."""
    run_file = paths.root.parent / "run.toml"
    run = presets.local_run(presets.model(options.model, Path()), rounds=0, seed=0, own_text=False)
    run_file.write_text(presets.to_toml(run), encoding="utf-8")
    datadir.found(paths, run_file)
    command = [sys.executable, "-m", "nolocod", "start", "--data-dir", str(paths.root), "--listen", "127.0.0.1:0"]
    command += ["--threads", str(options.threads), "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def rate() -> float:
        os.killpg(process.pid, signal.SIGCONT)
        first = _progress(paths)
        time.sleep(options.seconds)
        last = _progress(paths)
        os.killpg(process.pid, signal.SIGSTOP)
        return (last[1] - first[1]) / (last[0] - first[0])

    try:
        _wait_training(paths, process)
        os.killpg(process.pid, signal.SIGSTOP)
        yield rate
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _progress(paths: DataDir) -> tuple[float, int]:
    """(time, tokens) at the daemon's next report, so that no part of a report is counted."""
    before = client.read(datadir.find_running(paths)).tokens
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        now, tokens = time.monotonic(), client.read(datadir.find_running(paths)).tokens
        if tokens != before:
            return now, tokens
        time.sleep(0.01)
    raise BenchError("the daemon does not train.")


def _wait_training(paths: DataDir, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(NotRunningError):  # until it has come up
            if client.read(datadir.find_running(paths)).inner_steps:
                return
        time.sleep(0.1)
    raise BenchError(f"the daemon did not train within {_START_SECONDS:.0f} s (exit status {process.poll()}).")
