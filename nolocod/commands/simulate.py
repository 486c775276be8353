"""`nolocod simulate`: a swarm on a virtual clock, the same each time for the same seed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod.errors import SimulationError, UsageError

if TYPE_CHECKING:
    import argparse
    from io import BufferedWriter

    from nolocod.commands import Commands
    from nolocod.studies.sim.swarm import Report

NAMES = ("calm", "wan", "nat", "partition", "churn", "unlike", "two-speeds", "rough", "hostile")
"""Of the scenarios: their module is loaded when one is run."""


def add_to(commands: Commands) -> None:
    """simulate."""
    about = "Simulate a swarm: the nodes' real decisions on a virtual clock and network."
    simulate = commands.add("simulate", _simulate, about, "nolocod simulate churn --nodes 32 --seed 7")
    add = simulate.add_argument
    add("scenario", nargs="?", default="calm", metavar="SCENARIO", help=f"{', '.join(NAMES)}; {NAMES[0]} if not given")
    add("--nodes", type=int, default=16, metavar="N", help="how many nodes (%(default)s)")
    add("--rounds", type=int, default=20, metavar="N", help="outer steps until a node has finished (%(default)s)")
    add("--seed", type=int, default=0, help="decides all that happens (%(default)s)")
    add("--probation", type=int, default=0, metavar="N", help="like trust.probation in a run file (%(default)s)")
    add("--log", type=Path, metavar="FILE", help="write all events here, one JSON object per line")
    add("--json", action="store_true", help="print one JSON object")


def _simulate(options: argparse.Namespace) -> None:
    from nolocod.studies.sim.scenarios import SCENARIOS, Plan, paced
    from nolocod.studies.sim.swarm import simulate

    if (settings := SCENARIOS.get(options.scenario)) is None:
        raise UsageError(f"there is no scenario {options.scenario!r}.", remedy=f"There are {', '.join(SCENARIOS)}.")
    if options.nodes < 2 or options.rounds < 1:
        raise UsageError("--nodes must be at least 2, and --rounds at least 1.")
    if options.probation < 0:
        raise UsageError("--probation cannot be negative.")
    with ExitStack() as stack:
        log = stack.enter_context(_opened(options.log)) if options.log is not None else None
        plan = Plan(options.scenario, options.nodes, options.rounds, options.seed, options.probation)
        report = simulate(plan, paced(settings, options.nodes), log)
    print(msgspec.json.encode(asdict(report)).decode() if options.json else _text(report))
    if report.broken:
        cause = f"{report.broken} things do not hold, the first: {report.violations[0]}."
        raise SimulationError(cause, remedy=f"Replay it with `{report.replay} --log FILE`, and report it.")


def _opened(path: Path) -> BufferedWriter:
    try:
        return path.open("wb")
    except OSError as error:
        raise UsageError(f"--log {path}: {error.strerror}.") from error


def _text(report: Report) -> str:
    plan, steps = report.plan, report.paired + report.solo
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in report.outcomes.items() if count)
    seconds = "-" if report.exchange_seconds is None else f"{report.exchange_seconds:.2f} s"
    lines = [
        f"{plan.scenario}: {plan.nodes} nodes to round {plan.rounds}, seed {plan.seed}",
        f"  virtual time   {report.seconds:.0f} s",
        f"  outer steps    {report.paired} paired, {report.solo} alone ({report.solo / max(1, steps):.1%})",
        *([f"  with attackers {report.hostile / max(1, steps):.1%} of the outer steps"] if report.hostile else []),
        f"  exchanges      {outcomes}; median {seconds}",
        f"  checked        {report.checked} paired steps against the paper's form; {report.half_applied} in doubt on one side",
        f"  spread         {report.spread:.4f}",
        f"  partitions     {report.healed} told as healed; {report.bans} bans",
        f"  log            {report.events} events, {report.digest}",
        f"  took           {report.took:.1f} s ({1000 * report.busy / max(1, steps):.1f} ms of one core per outer step)",
    ]
    return "\n".join([*lines, *(f"  BROKEN         {what}" for what in report.violations)])
