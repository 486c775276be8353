"""`python -m tests.attacks [--seconds N] [--only NAME]`: three real daemons, of which one is attacked in each way in turn.

The measure is the calm time before and after each attack, each as long as the attack: what else the machine does changes
from minute to minute. A stranger does not eat the processor of its victim, so attackers have a processor of their own here,
where there are two; it is as busy in calm times, so that other programs have as little room then. The daemons' trainers yield
to network processes, and lack what an attack takes. What an attack costs shows in the processor time of the node's network
process, which other programs change little, and in the outer steps, which they change more. Exit status 1 if a limit did not
hold. A stall is a task that the node's event loop woke more than 50 ms late (`nolocod_loop_lag_seconds`): on a busy machine
calm times have some too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import trio
from prometheus_client.parser import text_string_to_metric_families

from nolocod.node import data_directory
from nolocod.studies.pages import Place
from nolocod.units import Address
from tests.attacks.attackers import ATTACKS, Target, attack
from tests.support.swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.swarm import Daemon

_STEPS, _MEMORY, _LINES = 0.9, 1.5, 10.0
"""Least share of a calm run's outer steps; most of its memory; lines of the log a second."""
_SETTLED = 5
"""Paired outer steps before anything is measured."""


@dataclass(frozen=True)
class Measured:
    """Of one node in one run: paired outer steps a second, seconds of the processor a second, bytes of the network process,
    stalls, lines a second, what attackers did a second."""

    steps: float
    processor: float
    memory: float
    stalls: float
    lines: float
    reached: float = 0.0

    def beside(self, other: Measured) -> Measured:
        """The mean of both."""
        return Measured(*((one + another) / 2 for one, another in zip(astuple(self), astuple(other), strict=True)))

    def broken(self, calm: Measured) -> list[str]:
        """Which limits did not hold."""
        held = {
            "outer steps": self.steps >= _STEPS * calm.steps,
            "memory": self.memory <= _MEMORY * calm.memory,
            "stalls": self.stalls <= math.ceil(calm.stalls),
            "log": self.lines <= _LINES,
        }
        return [name for name, good in held.items() if not good]


def measured(daemon: Daemon, seconds: float, attacking: Callable[[float], int]) -> Measured:
    """Look at `daemon` five times a second while `attacking`."""
    process, over = psutil.Process(daemon.running.pid), threading.Event()
    memory, counts, late, began = [0], list[int](), stalls(daemon), (time.monotonic(), spent(process))
    lines = len(daemon.tail(1 << 20).splitlines())

    def watch() -> None:
        while not over.wait(0.2):
            if (report := daemon.report) is not None:
                counts.append(report.outer_paired)
            with contextlib.suppress(psutil.NoSuchProcess):
                memory[0] = max(memory[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    reached = attacking(seconds)
    over.set()
    watcher.join()
    took, busy = time.monotonic() - began[0], spent(process) - began[1]
    steps, said = counts[-1] - counts[0], len(daemon.tail(1 << 20).splitlines()) - lines
    return Measured(steps / took, busy / took, memory[0], stalls(daemon) - late, said / took, reached / took)


def spent(process: psutil.Process) -> float:
    """Seconds of the processor, those of its children (the trainer) not counted."""
    times = process.cpu_times()
    return float(times.user + times.system)


def stalls(daemon: Daemon) -> int:
    """How often the event loop was more than 50 ms late until now."""
    page = urllib.request.urlopen(f"http://{data_directory.find_running(daemon.paths).http}/metrics", timeout=10).read()
    lag = {sample.name + sample.labels.get("le", ""): sample.value for one in text_string_to_metric_families(page.decode())
           if one.name == "nolocod_loop_lag_seconds" for sample in one.samples}  # fmt: skip
    return int(lag["nolocod_loop_lag_seconds_count"] - lag["nolocod_loop_lag_seconds_bucket0.05"])


def calmly(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def attacked(daemon: Daemon, name: str, seconds: float) -> int:
    running = data_directory.find_running(daemon.paths)
    address = running.addresses[0].partition("/p2p/")[0]
    port = int(address.rpartition("/")[2])
    http = Address.parse(running.http, "http")
    place = f"127.0.1.{[*ATTACKS].index(name) + 1}"
    target = Target(running.peer_id, f"/ip4/127.0.0.1/tcp/{port}", port, http, running.run_id, place)
    trio.run(partial(attack, name, target, seconds))
    return target.done


HEAD = (
    "attack",
    "messages a second",
    "outer steps, of calm",
    "processor, of one core (calm)",
    "memory, of calm",
    "stalls over 50 ms (calm)",
    "log lines a second",
    "verdict",
)


def row(name: str, found: Measured, calm: Measured) -> str:
    steps = f"{found.steps / calm.steps:.0%}" if calm.steps else "none in calm times"
    cells = (
        name,
        f"{found.reached:,.0f}",
        steps,
        f"{found.processor:.1%} ({calm.processor:.1%})",
        f"{found.memory / max(calm.memory, 1):.2f}",
        f"{found.stalls:.0f} ({calm.stalls:.1f})",
        f"{found.lines:.1f}",
        "not held: " + ", ".join(found.broken(calm)) if found.broken(calm) else "held",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each attack (%(default)s)")
    parser.add_argument("--only", action="append", choices=[*ATTACKS], metavar="NAME", help=f"one of: {', '.join(ATTACKS)}")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table there; rows that are not measured stay")
    options = parser.parse_args()
    place = None if options.into is None else Place(options.into, "attacks", "Name a page that has the table.")
    rows = {} if place is None else {line.split("|")[1].strip(): line for line in place.table.splitlines() if "%" in line}
    broken = False
    *daemons, attackers = sorted(os.sched_getaffinity(0)) * (1 if len(os.sched_getaffinity(0)) > 1 else 2)
    os.sched_setaffinity(0, daemons)
    with tempfile.TemporaryDirectory() as folder:
        idler: subprocess.Popen[bytes] | None = None
        swarm = Swarm(Path(folder), "--max-upload", "20Mbit", "--nice", "5")
        try:
            first = swarm.found(codec="float32", steps=4, hidden=96)
            swarm.wait_paired(swarm.joined_by(first, 2), _SETTLED)
            os.sched_setaffinity(0, {attackers})
            idler = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            before = measured(first, options.seconds, calmly)
            for name in options.only or ATTACKS:
                idler.send_signal(signal.SIGSTOP)
                found = measured(first, options.seconds, partial(attacked, first, name))
                idler.send_signal(signal.SIGCONT)
                swarm.wait_paired([first], 1)
                after = measured(first, options.seconds, calmly)
                calm, before = before.beside(after), after
                broken |= bool(found.broken(calm))
                rows[name] = row(name, found, calm)
                sys.stdout.write(rows[name] + "\n")
                sys.stdout.flush()
        finally:
            if idler is not None:
                idler.kill()
                idler.wait()
            swarm.end()
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *(rows[name] for name in ATTACKS if name in rows)]
    if place is not None:
        place.fill("\n".join(lines))
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main())
