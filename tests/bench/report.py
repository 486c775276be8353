"""docs/benchmarks.md out of docs/benchmarks.json.

The rule: every figure is a median with the least and the greatest beside it, every ratio the median of the ratios
of one round, and a goal that was missed is told as missed.
"""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from tests.bench.base import spread
from tests.bench.contest import CONTESTANTS, parts_of

Table = dict[str, Any]

HEAD = """# Benchmarks

Written by `python -m tests.bench`; the figures behind it are in benchmarks.json. All contestants exchange a tensor of
the same size between two processes, in turn, round by round, fresh processes each time, in a network namespace
whose loopback device counts the bytes. One exchange warms up, one is timed, one is watched for memory.
"""


@dataclass(frozen=True)
class Goal:
    """A ratio of one contestant's figure to another's, and what it is to reach."""

    title: str
    ours: str
    theirs: str
    kind: str
    """"faster" is theirs / ours in time, "slower" ours / theirs, "bytes" ours / theirs on the wire."""
    bound: float
    figure: str = "seconds"
    """Which of our times counts."""


GOALS = (
    Goal("hivemind uncompressed / nolocod float32, time", "ours-float32", "hivemind", "faster", 3.0),
    Goal("hivemind fp16 / nolocod bfloat16, time", "ours-bfloat16", "hivemind-fp16", "faster", 4.0),
    Goal("nolocod float32 / raw gloo, time", "ours-float32", "gloo", "slower", 4.0),
    Goal("nolocod bfloat16 / raw gloo in float32, time", "ours-bfloat16", "gloo", "slower", 2.5),
    Goal("torchft outer step / nolocod float32 outer step, time", "ours-float32", "torchft", "faster", 1.0, "step"),
    Goal("torchft outer step / nolocod modulo8 outer step, time", "ours-modulo8", "torchft", "faster", 1.67, "step"),
    Goal("nolocod float32 / the paper's pattern, bytes", "ours-float32", "reference", "bytes", 1 / 2),
    Goal("nolocod bfloat16 / the paper's pattern, bytes", "ours-bfloat16", "reference", "bytes", 1 / 4),
    Goal("nolocod modulo8 / the paper's pattern, bytes", "ours-modulo8", "reference", "bytes", 1 / 8),
)
_BYTES_TOLERANCE = 1.02
"""For heads, hashes, records and TCP."""


def machine() -> Table:
    """What a reader needs to know of this machine, and nothing that names it."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cores": os.cpu_count(),
        "processor": models[0] if models else platform.machine(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": os.getloadavg()[0],
    }


def to_markdown(table: Table) -> str:
    """The whole page."""
    parts = [HEAD, _machine(table["machine"])]
    if "exchange" in table:
        parts += [_exchange(table["exchange"]), _goals(table["exchange"]), *_parts(table["exchange"])]
    for name, title, command in (
        ("transport", "One stream, in bulk", "python -m tests.bench transport"),
        ("relay", "Through a relay", "python -m tests.bench relay"),
        ("training", "What it costs training", "python -m tests.bench training"),
        ("node", "What a joining node costs", "python -m tests.bench node"),
        ("wan", "A long way", "python -m tests.bench wan"),
        ("utilisation", "Utilisation over a long way", "python -m tests.bench utilisation"),
        ("messages", "The worst message of each kind", "python -m tests.bench messages"),
        ("plan", "What `create --plan --measure` says, beside what two daemons do", "python -m tests.bench plan"),
    ):
        if name in table:
            parts.append(f"## {title}\n\nAs `{command}` prints it:\n\n```\n{table[name]['text']}\n```\n")
    return "\n".join(parts)


def _machine(facts: Table) -> str:
    return (
        f"Machine: {facts['cores']} cores ({facts['processor']}), {facts['memory_gb']} GB, Linux {facts['kernel']}, "
        f"Python {facts['python']}, torch {facts['torch']}; load {facts['load']:.1f} when it began.\n"
    )


def _exchange(contest: Table) -> str:
    lines = [
        f"## One exchange of {contest['values']:,} float32 values\n",
        "Seconds from the start on both sides to its end on both, median (least-greatest). For nolocod that is from the",
        "offer to verified inboxes, and in brackets to new weights: snapshot, encryption, hashes, signatures, receipts on",
        "disk and the outer step included. hivemind's matchmaking is not counted. Memory is what a node's processes held",
        "at most beyond what they held before they were connected, in float32 tensors of that size.\n",
        "| what | seconds | MB on the wire, both ways | extra memory |",
        "|---|---|---|---|",
    ]
    for one in CONTESTANTS:
        figures = contest["figures"].get(one.name)
        if figures is None:
            continue
        if not figures["seconds"]:
            lines.append(f"| {one.title} | did not run: {_cell(figures['failures'][0])} | | |")
            continue
        seconds = spread(figures["seconds"]) + (f" [{spread(figures['step'])}]" if figures["step"] else "")
        failed = f"; {len(figures['failures'])} failed" if figures["failures"] else ""
        wire, extra = statistics.median(figures["wire"]) / 1e6, spread(figures["extra"], digits=2)
        lines.append(f"| {one.title} | {seconds}{failed} | {wire:.1f} | {extra} |")
    return "\n".join(lines) + "\n"


def _parts(contest: Table) -> list[str]:
    """Of our outer steps: seconds since both nodes were told to begin."""
    ours = [(one.title, parts_of(contest["figures"].get(one.name, {}))) for one in CONTESTANTS]
    measured = {title: parts for title, parts in ours if parts}
    if not measured:
        return []
    rows = dict.fromkeys(name for parts in measured.values() for name in parts)
    lines = ["| seconds since the start, until | " + " | ".join(measured) + " |", "|---" * (1 + len(measured)) + "|"]
    for row in rows:
        lines.append(f"| {row} | " + " | ".join(spread(parts[row]) for parts in measured.values()) + " |")
    return ["\n".join(lines) + "\n"]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[-200:]


def _goals(contest: Table) -> str:
    lines = ["| ratio, median over rounds | measured | goal | |", "|---|---|---|---|"]
    for goal in GOALS:
        ours, theirs = (contest["figures"].get(name, {"seconds": []}) for name in (goal.ours, goal.theirs))
        if not (ours["seconds"] and theirs["seconds"]):
            continue
        ratios = ratios_of(goal, ours, theirs)
        reached = statistics.median(ratios)
        met = reached >= goal.bound if goal.kind == "faster" else reached <= goal.bound * _tolerance(goal)
        sign = "≥" if goal.kind == "faster" else "≤"
        lines.append(
            f"| {goal.title} | {spread(ratios, digits=2)} | {sign} {goal.bound:g} | {'reached' if met else '**missed**'} |"
        )
    extra = {name: figures["extra"] for name, figures in contest["figures"].items() if figures["extra"]}
    for name in ("ours-float32", "ours-bfloat16", "ours-modulo8"):
        if name in extra:
            met = statistics.median(extra[name]) <= 1.1
            lines.append(
                f"| {name.replace('ours-', 'nolocod ')}, extra memory / float32 tensor | {spread(extra[name], digits=2)} "
                f"| ≤ 1.1 | {_reached(met)} |"
            )
    return "\n".join(lines) + "\n"


def _reached(met: bool) -> str:
    return "reached" if met else "**missed**"


def _tolerance(goal: Goal) -> float:
    return _BYTES_TOLERANCE if goal.kind == "bytes" else 1.0


def ratios_of(goal: Goal, ours: Table, theirs: Table) -> list[float]:
    """Round by round, for as many rounds as both were measured in."""
    if goal.kind == "bytes":
        return [mine / other for mine, other in zip(ours["wire"], theirs["wire"], strict=False)]
    times = zip(ours[goal.figure], theirs["seconds"], strict=False)
    return [other / mine if goal.kind == "faster" else mine / other for mine, other in times]
