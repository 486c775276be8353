"""`nolocod bench training`: what the daemon costs its own training, alone and while it exchanges all the time.

A bare PyTorch loop, a whole daemon without peers (solo outer steps, checkpoints), the same with another daemon
training beside it in a run of its own, and one that exchanges with that other all the time, run the same model, data
and batch on one thread, in turn, each in fresh processes. What exchanges cost is the last over the one before it: two
trainers on one machine slow each other down without any exchange. Where there are two cores, what is measured trains
on one of them, and everything else has the other: its network process, and the whole partner. The rate of uploads is
set such that one exchange takes about one phase of inner steps.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from nolocod.errors import NotRunningError
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.run import presets
from nolocod.run.manifest import CODEC_BYTES
from nolocod.run.paths import DataDir
from nolocod.studies.benchmarks.base import BenchError, spread
from nolocod.studies.benchmarks.parties import python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.observe.status.report import StatusReport
    from nolocod.run.manifest import Manifest
    from nolocod.studies.benchmarks.base import Options

_START_SECONDS = 120.0
_PHASES_SECONDS = 300.0
INNER_STEPS = 50
"""Between outer steps, as in the paper."""
WARM_UP = 10
"""Inner steps before the daemon's clock starts; as many as the bare loop's."""
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class TrainingResult:
    """Tokens per second of each repetition, and what follows from them."""

    pinned: bool
    """Whether training had a core of its own."""
    bare: list[float]
    idle: list[float]
    apart: list[float]
    """Beside a daemon of another run."""
    exchanging: list[float]
    busy: list[float]
    """The share of the time in which an exchange was under way."""

    @property
    def kept(self) -> list[float]:
        """What exchanging leaves of training."""
        return [one / other for one, other in zip(self.exchanging, self.apart, strict=True)]

    def over_bare(self, rates: list[float]) -> list[float]:
        return [one / bare for one, bare in zip(rates, self.bare, strict=True)]

    def to_text(self) -> str:
        cores = "training on a core of its own" if self.pinned else "all on the same cores"
        return "\n".join(
            (
                f"tokens/s over those of a bare loop, medians of {len(self.bare)}, {cores}:",
                f"  daemon without peers                {spread(self.over_bare(self.idle))}",
                f"  beside another, without exchanges   {spread(self.over_bare(self.apart))}",
                f"  beside another, exchanging with it  {spread(self.over_bare(self.exchanging))}"
                f"   (an exchange under way {statistics.median(self.busy):.0%} of the time)",
                f"with exchanges over without: {spread(self.kept)}",
            )
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"ratio": statistics.median(self.kept)})


@dataclass(frozen=True)
class Setting:
    """One measurement's run, and where its processes may run: cores of its training, and of all else."""

    run_file: Path
    folder: Path
    seconds: float
    own: frozenset[int]
    others: frozenset[int]
    host: str = "127.0.0.1"
    """Where the daemons listen for peers."""

    @property
    def pinned(self) -> bool:
        return self.own != self.others


def training(options: Options, say: Callable[[str], None]) -> TrainingResult:
    """Measure `options.pairs` repetitions. Raises BenchError if one of the processes does not run."""
    run = run_of(options)
    with tempfile.TemporaryDirectory(prefix="nolocod-bench-") as name:
        folder = Path(name)
        run_file = folder / "run.toml"
        run_file.write_text(presets.to_toml(run), encoding="utf-8")
        setting = Setting(run_file, folder, options.seconds, *cores())
        result = TrainingResult(setting.pinned, [], [], [], [], [])
        size = parameters_of(run) * CODEC_BYTES[run.codec]
        for number in range(1, options.pairs + 1):
            result.idle.append(alone(setting, number))
            result.bare.append(bare_rate(setting, run, result.idle[-1]))
            phase = INNER_STEPS * run.inner.tokens_per_step / result.bare[-1]
            result.apart.append(_apart(setting, number))
            seen = paired_with(setting, number, size / phase)
            result.exchanging.append(seen.tokens_per_second)
            result.busy.append(seen.busy)
            bare, idle = result.bare[-1], result.idle[-1]
            told = f"exchanging {seen.tokens_per_second:,.0f} tokens/s ({seen.busy:.0%} of the time)"
            say(f"{number}: bare {bare:,.0f}, daemon {idle:,.0f}, beside another {result.apart[-1]:,.0f}, {told}")
    return result


def run_of(options: Options) -> Manifest:
    model = presets.model(options.model, Path())
    run = presets.local_run(model, rounds=0, inner_steps=INNER_STEPS, seed=0, own_text=False)
    return msgspec.structs.replace(
        run,
        codec=options.codec,
        outer=msgspec.structs.replace(run.outer, blocking=False),
        evaluation=msgspec.structs.replace(run.evaluation, every=1_000_000),  # it is no part of training
    )


def parameters_of(run: Manifest) -> int:
    from nolocod.trainer.data import make_tokenizer  # torch is imported here, after the command line was checked
    from nolocod.trainer.model import layout_of, read_config

    return layout_of(read_config(run, make_tokenizer(run.data).vocabulary)).size


def cores() -> tuple[frozenset[int], frozenset[int]]:
    """The core for training, and those for all else; the same where there is only one."""
    first, *rest = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    return frozenset([first]), frozenset(rest or [first])


# --- the three ------------------------------------------------------------------------------------------


def bare_rate(setting: Setting, run: Manifest, expected: float) -> float:
    """Tokens per second of a plain loop, for about as long as the daemon was measured."""
    steps = max(10, round(expected * setting.seconds / run.inner.tokens_per_step))
    command = python("nolocod.studies.benchmarks.bare_loop", str(setting.run_file), "--steps", str(steps), "--threads", "1")
    with bound_to(setting.own if setting.pinned else None):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_START_SECONDS + 4 * setting.seconds, check=False
        )
    if done.returncode != 0:
        raise BenchError(f"the bare loop ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


def alone(setting: Setting, number: int) -> float:
    """Tokens per second of a whole daemon that has no peers."""
    paths = DataDir(setting.folder / f"alone-{number}")
    data_directory.found(paths, setting.run_file)
    with daemon(setting, paths, "start") as process:
        wait(paths, process, lambda report: report.inner_steps >= WARM_UP)
        give_core(setting, process)
        return rate(paths, setting.seconds).tokens_per_second


def _apart(setting: Setting, number: int) -> float:
    """Tokens per second of a daemon beside which another one trains, each in a run of its own."""
    both = [DataDir(setting.folder / f"{name}-{number}") for name in ("apart", "beside")]
    with ExitStack() as stack:
        for paths in both:
            data_directory.found(paths, setting.run_file)
        measured, other = (stack.enter_context(daemon(setting, paths, "start")) for paths in both)
        wait(both[1], other, lambda report: report.inner_steps > 0)
        wait(both[0], measured, lambda report: report.inner_steps >= WARM_UP)
        give_core(setting, measured)
        return rate(both[0], setting.seconds).tokens_per_second


def paired_with(setting: Setting, number: int, bytes_per_second: float, after: int = 1) -> Seen:
    """A daemon that exchanges with another all the time, once it took `after` outer steps with it."""
    first, second = (DataDir(setting.folder / f"{name}-{number}") for name in ("measured", "partner"))
    data_directory.found(first, setting.run_file)
    limit = ["--max-upload", f"{max(1, round(bytes_per_second / 1000))}kB"]
    with ExitStack() as stack:
        process = stack.enter_context(daemon(setting, first, "start", *limit))
        wait(first, process, lambda report: report.inner_steps > 0)
        address = data_directory.find_running(first).addresses[0]
        stack.enter_context(daemon(setting, second, "join", "--bootstrap", address, *limit))
        give_core(setting, process)
        wait(first, process, lambda report: report.outer_paired >= after)
        return rate(first, setting.seconds)


@contextmanager
def daemon(setting: Setting, paths: DataDir, command: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    line = python("nolocod", command, "--data-dir", str(paths.root), "--listen", f"{setting.host}:0", "--threads", "1")
    with bound_to(setting.others if setting.pinned else None):
        process = subprocess.Popen(
            [*line, "--log-level", "error", *arguments], stdout=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its trainer ends with it
        process.wait()


@contextmanager
def bound_to(cores: frozenset[int] | None) -> Iterator[None]:
    """What is started in the block runs on `cores`: a process inherits them."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def give_core(setting: Setting, process: subprocess.Popen[bytes]) -> None:
    """Move the trainer of a daemon, with all of its threads, to the core for training.

    With the one for exchanges, too: it shares the interpreter's lock with training, and on a crowded core it would
    hold that while it waits for its turn.
    """
    if not setting.pinned:
        return
    for trainer in psutil.Process(process.pid).children():
        for thread in trainer.threads():
            os.sched_setaffinity(thread.id, setting.own)


# --- watching -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a daemon did from one outer step to a later one."""

    tokens_per_second: float
    busy: float
    """The share of the time in which an exchange was under way."""
    computing: float
    """The share of it spent in inner steps."""
    seconds: float
    paired: int
    """Paired outer steps."""
    exchange: float
    """Seconds of an exchange that was committed, on average; nan without any."""


def rate(paths: DataDir, seconds: float, *, paired: bool = False) -> Seen:
    """Watch the daemon from one (paired) outer step to the first one that ends after `seconds`."""
    began, first, _ = _next_outer_step(paths, paired)
    taken, number = _exchanges(paths)
    looks: list[bool] = []
    while True:
        ended, last, seen = _next_outer_step(paths, paired)
        looks += seen
        if ended - began >= seconds:
            span = last.uptime - first.uptime
            computing = (last.utilisation * last.uptime - first.utilisation * first.uptime) / span
            paired_steps = last.outer_paired - first.outer_paired
            now_taken, now_number = _exchanges(paths)
            exchange = (now_taken - taken) / (now_number - number) if now_number > number else math.nan
            return Seen((last.tokens - first.tokens) / span, statistics.fmean(looks), computing, span, paired_steps, exchange)


def _exchanges(paths: DataDir) -> tuple[float, float]:
    """The seconds of all exchanges that were committed, and how many there were, by the daemon's metrics."""
    address = data_directory.find_running(paths).http
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    samples = {sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples}
    return samples["nolocod_exchange_duration_seconds_sum"], samples["nolocod_exchange_duration_seconds_count"]


def _next_outer_step(paths: DataDir, paired: bool) -> tuple[float, StatusReport, list[bool]]:
    """(time, report) when the node has taken one more (paired) outer step; and whether it exchanged, look by look.

    The report is the first one after it that counts more tokens: a trainer tells of its inner steps by the half second.
    """
    looks: list[bool] = []
    before = _outer_steps(_read(paths), paired)
    tokens: int | None = None
    deadline = time.monotonic() + _PHASES_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        report = _read(paths)
        looks.append(report.exchanging_with is not None)
        if tokens is not None and report.tokens != tokens:
            return time.monotonic(), report, looks
        if tokens is None and _outer_steps(report, paired) != before:
            tokens = report.tokens
    raise BenchError(f"the daemon took no outer step in {_PHASES_SECONDS:.0f} s.")


def _outer_steps(report: StatusReport, paired: bool) -> int:
    return report.outer_paired + (0 if paired else report.outer_solo)


def _read(paths: DataDir) -> StatusReport:
    try:
        return client.read(data_directory.find_running(paths))
    except NotRunningError as error:
        raise BenchError(f"a daemon went away: {error.cause}") from error


def wait(paths: DataDir, process: subprocess.Popen[bytes], condition: Callable[[StatusReport], bool]) -> None:
    deadline = time.monotonic() + _PHASES_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(NotRunningError):  # until it has come up
            if condition(client.read(data_directory.find_running(paths))):
                return
        time.sleep(0.1)
    raise BenchError(f"the daemon did not get that far within {_PHASES_SECONDS:.0f} s (exit status {process.poll()}).")
