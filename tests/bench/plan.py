"""`python -m tests.bench plan`: what `create --plan --measure` says, beside what two daemons on a line do, at three sizes.

The rule: all that is compared is told by the command that users have, before the daemons start, and then read from the system
and the daemons' logs: the founder's memory and files, looked at all the time, its exchanges and checkpoints, and the newcomer's
fetch. A figure that is off by more than 15 % is told, and is an error.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from nolocod.observe.words import amount
from nolocod.run import presets
from nolocod.studies import daemons
from nolocod.studies.daemons import Daemon
from tests.bench.base import BenchError
from tests.bench.parties import python
from tests.bench.training import Cores, bound_to, founder, started
from tests.support.told import IN_JSON, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nolocod.run.manifest import Manifest

OFF = 0.15
"""What planned and measured may differ by."""
_SECONDS = 600.0
_LOOK_SECONDS = 0.01
"""A checkpoint of the smallest model is written in some hundredths."""
_TURNS = 5


@dataclass(frozen=True)
class Size:
    """A model, the windows of a step, and a line in Mbit/s, on which an exchange takes about half a turn."""

    model: dict[str, Any]
    batch: int
    down: int
    up: int


SIZES = (
    Size(presets.llama(160, 3, 5, 428), 16, 20, 5),
    Size(presets.MODELS["10m"], 4, 80, 20),
    Size(presets.llama(640, 8, 10, 1792), 2, 160, 40),
)
"""About 1, 10 and 43 M parameters."""


@dataclass
class Compared:
    """Figures by name, planned and measured, and whether they are bytes."""

    title: str
    share: float
    """Of the time in which the founder's trainer had a core: where others take it, times are theirs too."""
    rows: list[tuple[str, float, float, bool]] = field(default_factory=list)

    def add(self, name: str, planned: float, measured: float, *, size: bool = False) -> None:
        self.rows.append((name, planned, measured, size))

    @property
    def wrong(self) -> list[str]:
        return [
            f"{self.title}: {name} {planned / found - 1:+.0%}"
            for name, planned, found, _ in self.rows
            if off(name, planned, found)
        ]

    def to_text(self) -> str:
        lines = [f"{self.title:<36} {'planned':>9} {'measured':>9}"]
        for name, planned, found, size in self.rows:
            shown = (amount(value) if size else f"{value:.3g}" for value in (planned, found))
            lines.append("  {:<34} {:>9} {:>9}".format(name, *shown) + f" {planned / found - 1:+5.0%}")
        return "\n".join([*lines, f"  the founder's trainer had a core for {self.share:.0%} of the time"])


def off(name: str, planned: float, measured: float) -> bool:
    """A figure "at most" may be as far below as it likes."""
    error = planned / measured - 1
    return (-error if name.endswith("at most") else abs(error)) > OFF


def measure(say: Callable[[str], None], sizes: tuple[Size, ...] = SIZES) -> dict[str, Any]:
    """All sizes in turn; `wrong` of the table says what is off."""
    found = []
    for size in sizes:
        found.append(_compare(size))
        say(found[-1].to_text())
    return {
        "text": "\n".join(one.to_text() for one in found),
        "figures": {one.title: [row[:3] for row in one.rows] for one in found},
        "wrong": [text for one in found for text in one.wrong],
    }


def run_of(size: Size) -> Manifest:
    run = presets.local_run(size.model, rounds=0, inner_steps=24, seed=0, own_text=False)
    return msgspec.structs.replace(
        run,
        # as small as late in a run, when messages have a byte for each parameter
        inner=msgspec.structs.replace(run.inner, batch=size.batch, learning_rate=3e-4),
        # a newcomer's fetch takes rounds, and nobody is to wait for it
        outer=msgspec.structs.replace(run.outer, turns=_TURNS, staleness=1_000_000, patience=1.0),
        evaluation=msgspec.structs.replace(run.evaluation, every=1_000_000),
    )


def _compare(size: Size) -> Compared:
    cores = Cores.of_machine()
    limits = ("--max-download", f"{size.down}Mbit", "--max-upload", f"{size.up}Mbit", *IN_JSON)
    with daemons.folder() as root, ExitStack() as stack:
        planned = _planned(run_of(size), size, root, cores)
        run, needs, machine = planned["run"], planned["needs"], planned["machine"]
        first = stack.enter_context(founder(run_of(size), root / "first", cores, *limits))
        seen = stack.enter_context(_watched(first))
        second = Daemon(root / "second", "--threads", "1", *limits)
        stack.enter_context(started(second, cores, "join", "--bootstrap", first.address))
        trainer = psutil.Process(first.running.pid).children()[0]
        began = first.wait("its first exchanges", _SECONDS, lambda report: report.outer_paired >= _TURNS)
        used = sum(trainer.cpu_times()[:2])
        ended = first.wait("more", _SECONDS, lambda report: report.outer_paired >= 3 * _TURNS)
        partners = second.wait("its report", _SECONDS, lambda _: True)
        used = sum(trainer.cpu_times()[:2]) - used
        first.wait("its checkpoints", _SECONDS, lambda _: len(_saved(first)) >= 3)
        saved, stopped = _saved(first), time.monotonic()
        first.running.terminate()
        first.running.wait(60)
        stop = time.monotonic() - stopped
        told, other = Seen.of(first.log), Seen.of(second.log)
    computed = ended.utilisation * ended.uptime - began.utilisation * began.uptime
    message = run["turn_message"]
    step = computed / (ended.inner_steps - began.inner_steps)
    turns = [row for row in (*ended.exchanges, *partners.exchanges) if row.outcome == "committed" and row.sent < 2 * message]
    took = statistics.fmean(row.seconds for row in turns)
    every = statistics.fmean(later - before for before, later in pairwise(saved))
    result = Compared(f"{run['parameters']:,} parameters, {size.down}/{size.up} Mbit/s", used / (ended.uptime - began.uptime))
    result.add("trainer, memory", needs["trainer_memory"], seen.trainer[0], size=True)
    result.add("the same, writing a checkpoint", needs["saving_memory"], seen.trainer[1], size=True)
    result.add("network process, memory", needs["network_memory"], seen.network, size=True)
    result.add("disk at the peak", needs["disk"], seen.disk, size=True)
    result.add("a checkpoint", run["checkpoint"], told.checkpoints[-1][2], size=True)
    result.add("an exchange, each way", message, statistics.median(row.sent for row in turns), size=True)
    result.add("inner step, s", machine["step"], step)
    result.add("exchange, s", needs["exchange"], took)
    result.add("a newcomer's fetch, s", needs["fetch"], other.fetched[0])
    result.add("checkpoint on the disk, s", needs["saving"], statistics.fmean(one[0] for one in told.checkpoints))
    result.add("written a day", needs["written"], run["checkpoint"] * 86_400 / every, size=True)
    result.add("stop, s, at most", needs["stop"], stop)
    return result


def _planned(run: Manifest, size: Size, root: Path, cores: Cores) -> dict[str, Any]:
    """What the command says on the founder's core, beside another one on the partner's: two that train slow each other down."""
    (root / "planned.toml").write_text(presets.to_toml(run), encoding="utf-8")
    line = ("--plan", "--measure", "--json", "--device", "cpu", "--line", f"{size.down}/{size.up}Mbit")
    command = python("nolocod", "create", str(root / "planned.toml"), *line, "--data-dir", str(root / "none"))
    plans = []
    for own in (cores.own, cores.others):
        with bound_to(own):
            plans.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    (told, trouble), _ = [plan.communicate(timeout=_SECONDS) for plan in plans]
    if plans[0].returncode != 0:
        raise BenchError(f"the plan failed: {trouble.strip()[-500:]}")
    found: dict[str, Any] = json.loads(told)
    return found


def _saved(daemon: Daemon) -> list[float]:
    """When it told of checkpoints."""
    told = (json.loads(line) for line in daemon.log.read_text(encoding="utf-8").splitlines() if '"checkpointed"' in line)
    return [datetime.fromisoformat(one["time"]).timestamp() for one in told]


@dataclass
class _Peaks:
    """Bytes: the trainer's memory before it has written a file, and in all; the network process's; the files'."""

    trainer: list[int] = field(default_factory=lambda: [0, 0])
    network: int = 0
    disk: int = 0


@contextmanager
def _watched(daemon: Daemon) -> Iterator[_Peaks]:
    """Look at the daemon's processes and files again and again."""
    peaks, over = _Peaks(), threading.Event()
    network = psutil.Process(daemon.running.pid)
    trainer = network.children()[0]
    folders = (daemon.paths.checkpoints, daemon.paths.serving, daemon.paths.incoming)

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            with suppress(psutil.NoSuchProcess, OSError):  # it ended, or a file went
                saves = any(any(folder.iterdir()) for folder in folders)
                peaks.trainer[saves] = max(peaks.trainer[saves], trainer.memory_info().rss)
                peaks.network = max(peaks.network, network.memory_info().rss)
                files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
                peaks.disk = max(peaks.disk, sum(path.stat().st_size for path in files))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()
