"""`python -m tests.soak`: real daemons for hours under kills, freezes, wrong clocks and rate limits that a seed decides; what
grew, what broke. Exit status 1 if anything broke.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import NolocodError
from nolocod.studies.daemons import folder
from tests.soak.run import Options, Soak

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--hours", type=float, default=1.0, metavar="H", help="after all have paired once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=45.0, metavar="SECONDS", help="between two faults on average")
    parser.add_argument("--step", type=float, default=0.0, metavar="SECONDS", help="of an inner step, slept as a GPU computes")
    parser.add_argument("--clocks", action="store_true", help="set clocks wrong too, by up to a day")
    parser.add_argument("--calm", action="store_true", help="without faults, for comparison")
    parser.add_argument("--halve", action="store_true", help="kill half at once instead, and start them after a minute")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the nodes' directories and logs there")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write the result for programs")
    given = parser.parse_args(arguments)
    if not 2 <= given.nodes <= 32:
        parser.error(f"--nodes {given.nodes} is not between 2 and 32.")
    if not 10 <= given.hours * 3600 <= 30 * 86_400:
        parser.error("--hours is not between 0.003 (ten seconds) and 720.")
    if not given.every > 0:
        parser.error("--every must be positive.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process stays behind
    try:
        with folder(given.keep) as root:
            options = Options(
                given.nodes, given.hours * 3600, given.seed, given.every, given.calm, given.halve, given.step, given.clocks
            )
            result = Soak(options, root, _say).run()
    except NolocodError as error:
        sys.exit(str(error))
    if given.report is not None:
        given.report.write_text(result.to_json(), encoding="utf-8")
    _say(result.to_text())
    return int(bool(result.broken))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
