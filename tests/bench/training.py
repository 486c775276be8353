"""`python -m tests.bench training`: what the daemon costs its own training, alone and while it exchanges all the time.

A bare PyTorch loop, a whole daemon without peers (solo outer steps, checkpoints), the same with another daemon
training beside it in a run of its own, and one that exchanges with that other all the time, run the same model, data
and batch on one thread, in turn, each in fresh processes. What exchanges cost is the last over the one before it: two
trainers on one machine slow each other down without any exchange. Where there are two cores, what is measured trains
on one of them, and everything else has the other: its network process, and the whole partner. The rate of uploads is
set such that one exchange takes about one phase of inner steps.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from nolocod.run import presets
from nolocod.run.manifest import CODEC_BYTES
from nolocod.studies import daemons
from nolocod.studies.daemons import Daemon
from tests.bench.base import BenchError, spread
from tests.bench.parties import python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.observe.status.report import StatusReport
    from nolocod.run.manifest import Manifest
    from tests.bench.base import Options

_PHASES_SECONDS = 300.0
_START_SECONDS = 120.0
INNER_STEPS = 50
"""Between outer steps, as in the paper."""
_WARM_UP = 10
"""Inner steps before the daemon's clock starts; as many as the bare loop's."""
_LOOK_SECONDS = 0.05
_OPTIONS = ("--threads", "1", "--log-level", "error")


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

    def to_figures(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": statistics.median(self.kept)}


@dataclass(frozen=True)
class Cores:
    """Where processes may run: what is measured trains on `own`, all else runs on `others`; the same where there is one."""

    own: frozenset[int]
    others: frozenset[int]

    @classmethod
    def of_machine(cls) -> Cores:
        first, *rest = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        return cls(frozenset([first]), frozenset(rest or [first]))

    @property
    def pinned(self) -> bool:
        return self.own != self.others


def training(options: Options, say: Callable[[str], None]) -> TrainingResult:
    """Measure `options.pairs` repetitions. Raises LocalError if one of the processes does not run."""
    run, cores = run_of(options), Cores.of_machine()
    result = TrainingResult(cores.pinned, [], [], [], [], [])
    size = parameters_of(run) * CODEC_BYTES[run.codec]
    for number in range(1, options.pairs + 1):
        with daemons.folder() as folder:
            result.idle.append(_alone(run, cores, folder, options.seconds))
            result.bare.append(_bare(run, cores, folder, options.seconds, result.idle[-1]))
            result.apart.append(_apart(run, cores, folder, options.seconds))
            phase = INNER_STEPS * run.inner.tokens_per_step / result.bare[-1]
            seen = _exchanging(run, cores, folder, options.seconds, size / phase)
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
        inner=msgspec.structs.replace(run.inner, optimizer="adamw"),  # the bare loop's
        codec=options.codec,
        evaluation=msgspec.structs.replace(run.evaluation, every=1_000_000),  # it is no part of training
    )


def parameters_of(run: Manifest) -> int:
    from nolocod.trainer.data import make_tokenizer  # torch is imported here, after the command line was checked
    from nolocod.trainer.model import layout_of, read_config

    return layout_of(read_config(run, make_tokenizer(run.data).vocabulary)).size


# --- the four -------------------------------------------------------------------------------------------


def _bare(run: Manifest, cores: Cores, folder: Path, seconds: float, expected: float) -> float:
    """Tokens per second of a plain loop, for about as long as the daemon was measured."""
    run_file = folder / "bare.toml"
    run_file.write_text(presets.to_toml(run), encoding="utf-8")
    steps = max(10, round(expected * seconds / run.inner.tokens_per_step))
    command = python("tests.bench.bare_loop", str(run_file), "--steps", str(steps), "--threads", "1")
    with bound_to(cores.own if cores.pinned else None):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS + 4 * seconds, check=False)
    if done.returncode != 0:
        raise BenchError(f"the bare loop ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


def _alone(run: Manifest, cores: Cores, folder: Path, seconds: float) -> float:
    """Tokens per second of a whole daemon that has no peers."""
    with founder(run, folder / "alone", cores) as daemon:
        return rate(daemon, seconds).tokens_per_second


def _apart(run: Manifest, cores: Cores, folder: Path, seconds: float) -> float:
    """Tokens per second of a daemon beside which another one trains, each in a run of its own."""
    with founder(run, folder / "apart", cores) as daemon, founder(run, folder / "beside", cores, pin=False):
        return rate(daemon, seconds).tokens_per_second


def _exchanging(run: Manifest, cores: Cores, folder: Path, seconds: float, bytes_per_second: float) -> Seen:
    """A daemon that exchanges with another all the time."""
    limit = ("--max-upload", f"{max(1, round(bytes_per_second / 1000))}kB")
    with founder(run, folder / "measured", cores, *limit) as daemon, ExitStack() as stack:
        partner = Daemon(folder / "partner", *_OPTIONS, *limit)
        stack.enter_context(started(partner, cores, "join", "--bootstrap", daemon.address))
        daemon.wait("its first exchange", _PHASES_SECONDS, lambda report: report.outer_paired > 0)
        return rate(daemon, seconds)


@contextmanager
def founder(
    run: Manifest, root: Path, cores: Cores, *options: str, pin: bool = True, listen: str = "127.0.0.1:0"
) -> Iterator[Daemon]:
    """A daemon with a run of its own, once it trains; `pin`: its trainer gets the core for training."""
    daemon = Daemon(root, *_OPTIONS, *options, listen=listen)
    daemons.found(run, root)
    with started(daemon, cores, "start"):
        daemon.wait("its first inner steps", _PHASES_SECONDS, lambda report: report.inner_steps >= _WARM_UP)
        if pin and cores.pinned:
            give_core(daemon, cores)
        yield daemon


@contextmanager
def started(daemon: Daemon, cores: Cores, *command: str) -> Iterator[None]:
    """The daemon runs while the block does, on the cores for all else."""
    with bound_to(cores.others if cores.pinned else None):
        daemon.start(*command)
    try:
        yield
    finally:
        daemon.kill()


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


def give_core(daemon: Daemon, cores: Cores) -> None:
    """Move the trainer of a daemon, with all of its threads, to the core for training.

    With the one for exchanges, too: it shares the interpreter's lock with training, and on a crowded core it would
    hold that while it waits for its turn.
    """
    for trainer in psutil.Process(daemon.running.pid).children():
        for thread in trainer.threads():
            os.sched_setaffinity(thread.id, cores.own)


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
    sent: int
    """Bytes on all connections."""
    late: float
    """By how many inner steps the last exchanges were merged late, in the median; 0 where there was none."""


def rate(daemon: Daemon, seconds: float, *, paired: bool = False) -> Seen:
    """Watch the daemon from one (paired) outer step to the first one that ends after `seconds`."""
    looks: list[bool] = []
    first = last = _after_outer_step(daemon, paired, [])
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        last = _after_outer_step(daemon, paired, looks)
    span = last.uptime - first.uptime
    computing = (last.utilisation * last.uptime - first.utilisation * first.uptime) / span
    tokens = (last.tokens - first.tokens) / span
    step = computing * span / max(1, last.inner_steps - first.inner_steps)
    took = [row.seconds for row in last.exchanges if row.outcome == "committed" and row.age < span]
    late = statistics.median(took) / step if took else 0.0
    sent, pairs = last.sent - first.sent, last.outer_paired - first.outer_paired
    return Seen(tokens, statistics.fmean(looks), computing, span, pairs, sent, late)


def _after_outer_step(daemon: Daemon, paired: bool, looks: list[bool]) -> StatusReport:
    """The report when the node has taken one more (paired) outer step; `looks` gets whether it exchanged, look by look.

    It is the first one after it that counts more tokens: a trainer tells of its inner steps by the half second.
    """
    before: int | None = None
    tokens: int | None = None
    deadline = time.monotonic() + _PHASES_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        report = daemon.poll()
        if report is None:
            continue
        looks.append(report.exchanging_with is not None)
        steps = report.outer_paired + (0 if paired else report.outer_solo)
        before = steps if before is None else before
        if tokens is not None and report.tokens != tokens:
            return report
        if tokens is None and steps != before:
            tokens = report.tokens
    raise BenchError(f"the daemon took no outer step in {_PHASES_SECONDS:.0f} s.")
