"""Real daemons for tests: started as users start them, killed with real signals, read by their status."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from nolocod.errors import NotRunningError
from nolocod.node import data_directory
from nolocod.studies import daemons
from nolocod.studies.daemons import DaemonError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from nolocod.observe.status.report import StatusReport

ENOUGH = 300
"""Seconds that a busy machine may take for anything here."""
NICE, RESTS = ("--nice", "10"), ("--duty", "10%")
BACKGROUND = ("--threads", "1", *NICE)
"""How trainers of tests run: what a daemon, a browser or a command beside a dozen of them does goes first, as on machines
that they have for themselves. Nice works among processes of one session: Linux shares the processor among sessions first.
Most rest too: a dozen that trained as fast as they can would take all of it, for steps that no test needs.
The release before has neither."""
RUN_FILE = """
name = "e2e"
codec = "modulo8"
[model]
model_type = "llama"
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
intermediate_size = 64
max_position_embeddings = 64
tie_word_embeddings = true
[data]
source = "text"
documents = "joined"
[inner]
optimizer = "adamw"  # in a model as small as this one Muon's steps take most of the processor
schedule = "cosine"
steps = 8
batch = 2
sequence = 32
[outer]
patience = 5.0
turns = 1
staleness = 5000  # as far as one node is ever ahead of another that a busy machine keeps waiting
[evaluation]
batches = 2
"""


class Daemon(daemons.Daemon):
    """One daemon process, or its remains."""

    rests: Sequence[str] = ()

    def __init__(self, root: Path, data: Path, *options: str) -> None:
        super().__init__(root, "--data", str(data), "--checkpoint-every", "0", "--threads", "1", *options)

    def run(self, *arguments: str) -> Daemon:
        """`nolocod ARGUMENTS` in the background, with this daemon's directory."""
        self.start(*arguments, *(() if self.source else (*NICE, *self.rests)))
        return self

    @property
    def report(self) -> StatusReport | None:
        """What it says now; None if it does not run, or is not up yet. One that is up is asked until it answers: a machine
        may be too busy for that for seconds, also where a test looks once."""
        deadline = time.monotonic() + ENOUGH
        try:
            while self.process is not None:
                found, up = self.poll(), self.last is not None and self.last.pid == self.process.pid
                if found is not None or not up or time.monotonic() > deadline:
                    return found
                time.sleep(0.2)
        except DaemonError:
            pass
        return None

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to the daemon's process alone and return its exit status."""
        self.running.send_signal(number)
        return self.running.wait(ENOUGH)

    def tail(self, lines: int = 12) -> str:
        return f"--- {self.paths.root.name}\n{super().tail(lines)}"


def ready(daemon: Daemon) -> bool:
    """Whether it has told its address."""
    try:
        return bool(daemon.address)
    except NotRunningError:
        return False


def children(process: psutil.Process, argument: str) -> list[psutil.Process]:
    """Those whose command line has this argument, the oldest first; others may end while they are looked at."""
    found = []
    for child in process.children():
        with suppress(psutil.NoSuchProcess):
            while not (line := child.cmdline()):  # it is just becoming another program
                time.sleep(0.01)
            found += [child] if argument in line else []
    return sorted(found, key=lambda child: child.pid)


def trainer_of(daemon: Daemon) -> psutil.Process:
    return next(iter(children(psutil.Process(daemon.running.pid), "nolocod.trainer.worker")))


def gone(process: psutil.Process) -> bool:
    """Whether it has ended; an orphan may stay a zombie for as long as its new parent likes."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def stopped_often(process: psutil.Process, share: float) -> Iterator[None]:
    """Stop it for a moment, again and again, in this share of the time: so much slower it is, or so."""
    done = threading.Event()

    def hold() -> None:
        while not done.wait(0.006 * (1 - share)):
            process.suspend()
            time.sleep(0.006 * share)
            process.resume()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Swarm:
    """All daemons of one test; `options` go with every start, and `rests`, but for a daemon of the release before."""

    rests: Sequence[str] = RESTS

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        self._options = options
        self.data = root / "text"
        self.data.mkdir()
        for number in range(4):
            words = [f"line {i} of part {number}: {i * i % 97} {'abcdefgh'[i % 8] * 5}" for i in range(4000)]
            (self.data / f"{number}.txt").write_text("\n".join(words))
        self.daemons: list[Daemon] = []

    def daemon(self) -> Daemon:
        daemon = Daemon(self.root / f"node-{len(self.daemons)}", self.data, *self._options)
        daemon.rests = self.rests
        self.daemons.append(daemon)
        return daemon

    def found(
        self, codec: str = "modulo8", turns: int = 1, rounds: int = 0, steps: int = 8, hidden: int = 32, rate: float = 1e-3
    ) -> Daemon:
        """Found the run and bring up its first node."""
        first = self.daemon()
        run_file = self.root / "run.toml"
        text = RUN_FILE.replace("modulo8", codec).replace("steps = 8", f"steps = {steps}\nlearning_rate = {rate}")
        text = text.replace("hidden_size = 32", f"hidden_size = {hidden}")
        text = text.replace("turns = 1", f"turns = {turns}\nrounds = {rounds}")
        run_file.write_text(text)
        data_directory.found(first.paths, run_file)
        return first.run("start")

    def joined_by(self, first: Daemon, more: int) -> list[Daemon]:
        """Have `more` nodes join through `first`, once that one has told its address; all of them, `first` too."""
        self.wait("the first node tells its address", lambda: ready(first))
        return [first, *(self.daemon().run("join", "--bootstrap", first.address) for _ in range(more))]

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll until `condition` holds; fail with every daemon's last lines otherwise."""
        deadline = time.monotonic() + ENOUGH
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.2)
        pytest.fail(f"not within {ENOUGH} s: {what}\n" + "\n".join(daemon.tail() for daemon in self.daemons))

    def wait_paired(self, daemons: Sequence[Daemon], more: int) -> None:
        """Until each of `daemons` has taken `more` further paired outer steps."""
        before = {id(daemon): report.outer_paired if (report := daemon.report) else 0 for daemon in daemons}

        def paired() -> bool:
            return all(
                (report := daemon.report) is not None and report.outer_paired >= before[id(daemon)] + more for daemon in daemons
            )

        self.wait(f"{more} more paired outer steps by each", paired)

    def wait_round(self, daemon: Daemon, number: int) -> None:
        """Until `daemon` has reached a round."""
        self.wait(f"round {number}", lambda: bool((report := daemon.report) and report.round >= number))

    def stop(self, *daemons: Daemon) -> None:
        """End these in order, all at once; each must say that it did."""
        for daemon in daemons:
            daemon.running.send_signal(signal.SIGTERM)
        statuses = [daemon.running.wait(ENOUGH) for daemon in daemons]
        if any(statuses):
            pytest.fail(f"ended with {statuses}\n" + "\n".join(daemon.tail() for daemon in daemons))

    def end(self) -> None:
        for daemon in self.daemons:
            if daemon.process is not None:
                daemon.kill()
