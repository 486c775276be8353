"""`nolocod bench training`: what the daemon costs its own training.

A bare PyTorch loop and one whole daemon (network process, trainer, solo outer steps, checkpoints) run the
same model, data and batch on the same number of threads, in turn, pair by pair, each in a fresh process, so
that a slow minute of the machine hits both.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod import datadir, presets
from nolocod.benchmarks.base import BenchError
from nolocod.config import DataDir
from nolocod.errors import NotRunningError
from nolocod.manifest import read_run_file
from nolocod.status import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.benchmarks.base import Options

_START_SECONDS = 120.0
_INNER_STEPS = 50
"""Between outer steps, as in the paper."""
_LOOKS = 20
_WARM_UP = 10
"""Inner steps before the daemon's clock starts; as many as the bare loop's."""


@dataclass(frozen=True)
class TrainingResult:
    """Tokens per second of each pair, and what follows from them."""

    bare: list[float]
    daemon: list[float]

    @property
    def ratio(self) -> float:
        """Median over pairs of daemon / bare."""
        return statistics.median(daemon / bare for bare, daemon in zip(self.bare, self.daemon, strict=True))

    def to_text(self) -> str:
        return f"daemon / bare, median of {len(self.bare)} pairs: {self.ratio:.3f}"

    def to_json(self) -> str:
        return json.dumps({"bare_tokens_per_second": self.bare, "daemon_tokens_per_second": self.daemon, "ratio": self.ratio})


def training(options: Options, say: Callable[[str], None]) -> TrainingResult:
    """Measure `options.pairs` pairs. Raises BenchError if one of the two does not run."""
    bare: list[float] = []
    daemon: list[float] = []
    model = presets.model(options.model, Path())
    run = presets.local_run(model, rounds=0, inner_steps=_INNER_STEPS, seed=0, own_text=False)
    with tempfile.TemporaryDirectory(prefix="nolocod-bench-") as folder:
        run_file = Path(folder) / "run.toml"
        run_file.write_text(presets.to_toml(run), encoding="utf-8")
        for number in range(1, options.pairs + 1):
            daemon.append(_daemon(DataDir(Path(folder) / f"node-{number}"), run_file, options))
            bare.append(_bare(run_file, daemon[-1], options))
            ratio = daemon[-1] / bare[-1]
            say(f"pair {number}: bare {bare[-1]:,.0f}, daemon {daemon[-1]:,.0f} tokens/s, ratio {ratio:.3f}")
    return TrainingResult(bare, daemon)


def _bare(run_file: Path, expected: float, options: Options) -> float:
    """Tokens per second of a plain loop in a process of its own, for about as long as the daemon was measured."""
    steps = max(10, round(expected * options.seconds / read_run_file(run_file).inner.tokens_per_step))
    command = [sys.executable, "-m", "nolocod.trainer.bare", str(run_file)]
    command += ["--steps", str(steps), "--threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS + 2 * options.seconds, check=False)
    if done.returncode != 0:
        raise BenchError(f"the bare loop ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


def _daemon(paths: DataDir, run_file: Path, options: Options) -> float:
    """Tokens per second of a whole daemon that has no peers."""
    datadir.found(paths, run_file)
    command = [sys.executable, "-m", "nolocod", "start", "--data-dir", str(paths.root), "--listen", "127.0.0.1:0"]
    command += ["--threads", str(options.threads), "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_training(paths, process)
        first = _progress(paths)
        time.sleep(options.seconds)
        last = _progress(paths)
        return (last[1] - first[1]) / (last[0] - first[0])
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
            if client.read(datadir.find_running(paths)).inner_steps >= _WARM_UP:
                return
        time.sleep(0.1)
    raise BenchError(f"the daemon did not train within {_START_SECONDS:.0f} s (exit status {process.poll()}).")
