"""Commands that study the program itself: a testnet to look at, evidence."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.disk import write_whole
from nolocod.errors import SimulationError, UsageError

if TYPE_CHECKING:
    import argparse

    from nolocod.commands import Commands

_INTO = "Name the folder of the page with --into."


def add_to(commands: Commands) -> None:
    """testnet, lab."""
    about = "Train on a testnet of real daemons on this machine, and show it."
    testnet = commands.add("testnet", _testnet, about, "nolocod testnet --nodes 2 --outer-steps 10")
    testnet.add_argument("--nodes", type=int, default=4, metavar="N", help="how many nodes (%(default)s)")
    goal = "outer steps of the whole model per node (%(default)s)"
    testnet.add_argument("--outer-steps", type=int, default=40, metavar="N", help=goal)
    testnet.add_argument(
        "--data", type=Path, metavar="PATH", help="training text, a file or a folder (the standard library's sources)"
    )
    testnet.add_argument(
        "--model", default="small", metavar="NAME|FILE", help="tiny, small, 10m, or a config.json (%(default)s)"
    )
    testnet.add_argument("--keep", type=Path, metavar="DIR", help="keep the nodes' directories and logs there")
    testnet.add_argument("--seed", type=int, default=0, metavar="N", help="makes the initial weights (%(default)s)")
    testnet.add_argument(
        "--log-format", default="human", choices=["human", "json"], help="the format of the nodes' logs (%(default)s)"
    )
    testnet.add_argument("--report", type=Path, metavar="FILE.json", help="write the summary to this file, as JSON")
    about = "Train replicas in one process beside hostile ones, and compare them: how docs/attacks.md is made."
    lab = commands.add("lab", _lab, about, "nolocod lab attacks --reduced")
    lab.add_argument("what", choices=["attacks"])
    lab.add_argument("--reduced", action="store_true", help="take minutes instead of hours: a smaller model, fewer trials")
    lab.add_argument(
        "--workers", type=int, default=0, metavar="N", help="trials at the same time, each on one thread (0: one per core)"
    )
    lab.add_argument("--kept", type=Path, metavar="FILE", help="keep results in this file; no trial runs twice (in docs/)")
    lab.add_argument("--into", type=Path, metavar="DIR", help="write the tables into the page in this folder (docs)")


def _testnet(options: argparse.Namespace) -> None:
    from nolocod.commands import terminal
    from nolocod.studies import testnet

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as on Ctrl-C: no process that it started stays behind
    names = ("nodes", "outer_steps", "data", "model", "keep", "seed", "log_format")
    asked = testnet.Options(**{name: getattr(options, name) for name in names})
    summary = testnet.run(asked, terminal.swarm_view, lambda text: print(text, flush=True))
    if options.report is not None:
        write_whole(options.report, summary.to_json().encode())
    terminal.show(terminal.summary_table(summary))


def _lab(options: argparse.Namespace) -> None:
    if options.workers < 0:
        raise UsageError("--workers cannot be negative.")
    if options.into is not None and options.reduced:
        raise UsageError("--into is for the whole study.", remedy="Leave out --into or --reduced.")
    _attacks(options, options.workers or os.cpu_count() or 1)


def _attacks(options: argparse.Namespace, workers: int) -> None:
    from nolocod.studies import pages
    from nolocod.studies.lab import attacks

    place = pages.Place(options.into / "attacks.md", "attacks", _INTO) if options.into else None
    study = attacks.REDUCED if options.reduced else attacks.FULL
    log = attacks.log(_kept(options, "attacks.jsonl"))
    attacks.perform_all(study.trials(), log, workers, _progress)
    if place is not None:
        place.fill(study.to_text(log))
    print(study.to_text(log))
    if failures := study.failures(log):
        raise SimulationError("; ".join(failures) + ".", remedy="Attackers can do what they must not: report it.")


def _kept(options: argparse.Namespace, name: str) -> Path:
    """The file of results."""
    kept: Path = options.kept or Path("docs") / name
    return kept


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
