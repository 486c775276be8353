"""Write the table of docs/simulator.md: what simulations cost, from a few nodes to thousands.

    python -m tools.scale [NODESxROUNDS ...]

The rule: each row is a process of its own, so that its time and its memory are its own; the time is that of the one
core that a simulation has, whatever else the machine does. All have the signatures and the pace of large simulations, so
that they differ in nothing but their size. Calls of Python functions are counted in one more run, of those that are short:
unlike times they know nothing of the machine, nor of what its caches hold. Rows that are not asked for stay as they are.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec

from nolocod.studies.pages import Place
from nolocod.studies.sim.scenarios import SCENARIOS, Plan, slowed
from nolocod.studies.sim.swarm import simulate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "simulator.md"
_ROW = re.compile(r"^(\| ([\d,]+) \| (\d+) \|.*\|)$", re.MULTILINE)
HEAD = (
    "| nodes | to round | outer steps | alone | core seconds | ms per outer step | calls per step | KiB per node | broken |",
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
)
ROWS = ("64x20", "256x20", "1024x20", "1000x100", "4096x3")
_CHILD, _CALLS = "--child", "--calls"
_COUNTED = 1024 * 20
"""Nodes times rounds of a run whose calls are counted, at most: counting doubles its time."""
_FEW = 4
"""Nodes of a run that tells what Python and its modules take."""


def measure(nodes: int, rounds: int, kind: str = _CHILD) -> tuple[dict[str, object], int]:
    """A run's report, and the most memory that its process had, in bytes: never less than this one has, so keep it small."""
    command = [sys.executable, "-m", "tools.scale", kind, str(nodes), str(rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        if child.stdout is None:
            raise AssertionError("asked for a pipe")
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return msgspec.json.decode(out, type=dict[str, object]), usage.ru_maxrss << 10


def simulated(nodes: int, rounds: int) -> bytes:
    """The report, in this process."""
    return msgspec.json.encode(asdict(simulate(Plan("calm", nodes, rounds, cheap=True), slowed(SCENARIOS["calm"]))))


def counted(nodes: int, rounds: int) -> bytes:
    """The number of calls, in this process."""
    profile = cProfile.Profile()
    profile.runcall(simulated, nodes, rounds)
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined] # typeshed does not know it
    return msgspec.json.encode({"calls": calls})


def row(nodes: int, rounds: int, base: int) -> str:
    report, memory = measure(nodes, rounds)
    busy, steps = float(str(report["busy"])), int(str(report["paired"])) + int(str(report["solo"]))
    share = int(str(report["solo"])) / steps
    calls = ""
    if nodes * rounds <= _COUNTED:
        calls = f"{int(str(measure(nodes, rounds, _CALLS)[0]['calls'])) / steps:,.0f}"
    return (
        f"| {nodes:,} | {rounds} | {steps:,} | {share:.1%} | {busy:.0f} | {1000 * busy / steps:.1f} | {calls} "
        f"| {(memory - base) / nodes / 1024:.0f} | {report['broken']} |"
    )


def main(wanted: list[str]) -> None:
    place = Place(PAGE, "scale", "It is the repository's.")
    page = PAGE.read_text(encoding="utf-8")
    _, base = measure(_FEW, 1)
    rows = {(int(nodes.replace(",", "")), int(rounds)): line for line, nodes, rounds in _ROW.findall(page)}
    for one in wanted or ROWS:
        nodes, rounds = map(int, one.split("x"))
        rows[nodes, rounds] = line = row(nodes, rounds, base)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    table = "\n".join([*HEAD, *(rows[size] for size in sorted(rows))])
    place.fill(table)


if __name__ == "__main__":
    if sys.argv[1:2] in ([_CHILD], [_CALLS]):
        work = simulated if sys.argv[1] == _CHILD else counted
        sys.stdout.buffer.write(work(*map(int, sys.argv[2:])))
    else:
        main(sys.argv[1:])
