"""`python -m tests.bench.slow SECONDS`: three daemons of a 10 M model whose inner steps take so long, with slow disks.

The rule: what is slow is slept (tests/support/slowed.py), so that two cores are enough; what is told was in the daemons' own
events. The third comes once the others have exchanged, and fetches its weights. It is an error where an exchange did not
commit, a node was blamed, a trainer started anew, weights came twice, or nobody paired.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.run import presets
from nolocod.run.data import Data
from nolocod.run.manifest import Evaluation, Inner, Manifest
from nolocod.studies import daemons
from nolocod.studies.daemons import Daemon, DaemonError
from tests.support.told import IN_JSON, Seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.status.report import StatusReport

SLOWED = Path(__file__).resolve().parents[1] / "support" / "slowed.py"
_START_SECONDS = 300.0


def run_of(steps: int) -> Manifest:
    return Manifest(
        name="slow",
        model=presets.MODELS["10m"],
        codec="modulo8",
        data=Data(source="stdlib"),
        inner=Inner(steps=steps, batch=1, sequence=32, optimizer="adamw"),
        evaluation=Evaluation(batches=1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("step", type=float, metavar="SECONDS", help="of an inner step")
    add("--disk", type=float, default=20.0, metavar="MB", help="a second that its disk writes and reads (%(default)s)")
    add("--inner", type=int, default=2, metavar="N", help="inner steps between outer steps (%(default)s)")
    add("--paired", type=int, default=4, metavar="N", help="paired outer steps of the first two (%(default)s); the third: half")
    add("--keep", type=Path, metavar="DIR", help="keep the daemons' directories and logs there")
    options = parser.parse_args()
    phase = options.inner * options.step
    with ExitStack() as stack:
        root = stack.enter_context(daemons.folder(options.keep))
        nodes = [_daemon(root / name, options) for name in ("first", "second", "third")]
        stack.callback(daemons.end, nodes, 30.0)
        first, second, third = nodes
        daemons.found(run_of(options.inner), first.paths.root)
        began = time.monotonic()
        first.start("start")
        first.wait("its first inner steps", _START_SECONDS + 3 * options.step, lambda report: report.inner_steps > 0)
        join = "join", "--bootstrap", first.address
        second.start(*join)
        _wait([first, second], _START_SECONDS + 10 * phase, lambda report: report.outer_paired > 0)
        third.start(*join)
        _wait([third], _START_SECONDS + 10 * phase, lambda report: report.outer_paired >= options.paired // 2)
        _wait(
            [first, second], _START_SECONDS + 5 * options.paired * phase, lambda report: report.outer_paired >= options.paired
        )
        took = time.monotonic() - began
        daemons.end(nodes, 30.0)
        statuses = [node.running.returncode for node in nodes]
        seen = {node.paths.root.name: Seen.of(node.log) for node in nodes}
    what = f"inner steps of {options.step:g} s, {options.inner} between outer steps, a disk of {options.disk:g} MB/s"
    sys.stdout.write(f"{what}: {took:.0f} s\n")
    for name, one in seen.items():
        sys.stdout.write(f"{name}: {one}\n")
    wrong = [f"{name}: {text}" for name, one in seen.items() for text in one.wrong]
    if any(statuses):
        wrong.append(f"the daemons ended with {statuses}")
    sys.exit("\n".join(wrong) if wrong else 0)


def _daemon(root: Path, options: argparse.Namespace) -> Daemon:
    daemon = Daemon(root, "--threads", "1", "--nice", "5", *IN_JSON)
    daemon.program = [str(SLOWED), str(options.step), str(options.disk * 1e6), "right"]
    return daemon


def _wait(nodes: list[Daemon], seconds: float, condition: Callable[[StatusReport], bool]) -> None:
    """Until it holds of each; DaemonError where one ends by itself meanwhile."""
    for node in nodes:
        node.wait("its paired outer steps", seconds, condition)


if __name__ == "__main__":
    try:
        main()
    except DaemonError as error:
        sys.exit(str(error))
