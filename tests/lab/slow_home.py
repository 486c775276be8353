"""`python -m tests.lab.slow_home`: three real daemons, one of them in a home whose line is far too slow for the others' pace.

The rule: what is told was in the nodes' own events. The others' rounds take a third of the time in which the slow line carries
the model once. It is an error where the one behind it uses less than 80 % of what its line carries by plain TCP, both ways at
once and with nothing else to do, for exchanges that were committed (of each the way that has more to carry); or where it
fetches weights a second time, or is more than 1 % above the others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nolocod.errors import NolocodError
from nolocod.run.manifest import Evaluation
from tests.lab.homes import Large
from tests.lab.nodes import swarm
from tests.lab.plain_tcp import carried
from tests.lab.topology import Line, internet
from tests.support.told import IN_JSON, Seen

if TYPE_CHECKING:
    from tests.lab.nodes import Node

_START = 600.0
_LEAST_USED, _ABOVE = 0.8, 0.01
_TRIED = 10_000_000
"""Bytes by plain TCP."""
_LAST = 5
"""Evaluations that are compared; the last alone where the run has an end."""
_SHARE = "30%"
"""Of the time in which each computes: three trainers have two cores here. AdamW for the same reason: its steps are short."""


def above(slow: Seen, others: list[Seen], last: int) -> float:
    """How far the slow one's `last` evaluations are above what the others had at these rounds, on average, of theirs."""
    found = []
    for number in sorted(slow.losses)[-last:]:
        theirs = [np.interp(number, sorted(one.losses), [one.losses[at] for at in sorted(one.losses)]) for one in others]
        found.append(slow.losses[number] / float(np.mean(theirs)) - 1)
    return float(np.mean(found))


def _finished(node: Node) -> bool:
    report = node.report
    return report is not None and report.state == "finished"


def _told_its_last_loss(node: Node) -> bool:
    report = node.report
    return report is not None and report.round in Seen.of(node.log).losses


def _paired(node: Node) -> bool:
    report = node.report
    return report is not None and report.outer_paired > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    goal = "have the run end after N outer steps of the whole model, in those minutes at most (default: it has no end)"
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help=goal)
    parser.add_argument("--rate", type=float, default=4.0, metavar="MBIT", help="of the slow line, each way (%(default)s)")
    parser.add_argument("--rtt", type=float, default=60.0, metavar="MS", help="to the home (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the nodes' directories and logs there")
    options = parser.parse_args()
    flags = (*IN_JSON, "--duty", _SHARE)
    with ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nolocod-slow-home-")))
        net = stack.enter_context(internet())
        load = Large(steps=24, rounds=options.rounds, model="10m", evaluation=Evaluation(every=5, batches=32))
        nodes = stack.enter_context(swarm(root, load, *flags))
        home, place = net.home("cone"), net.public()
        net.lay(home.router, Line(options.rtt / 2, options.rate, options.rate))
        able = carried(place, home.hosts[0], _TRIED)
        first = nodes.found(place)
        second = nodes.public(net.public(), [first])
        third = nodes.join(home.hosts[0], [first])
        nodes.wait("all pair", lambda: all(_paired(node) for node in (first, second, third)), _START)
        begin = time.time()
        were = {"first": first, "second": second, "slow": third}
        until = 60 * options.minutes
        if options.rounds:
            nodes.wait("the run ends", lambda: all(map(_finished, were.values())), until)
        else:
            nodes.wait("the time is over", lambda: time.time() - begin > until, until + 60)
        end = time.time()
        if options.rounds:
            nodes.wait("all tell their last loss", lambda: all(map(_told_its_last_loss, were.values())), _START)
        seen = {name: Seen.of(node.log, begin=begin) for name, node in were.items()}
    slow = seen["slow"]
    used = slow.carried / (able * (end - begin))
    higher = above(slow, [seen["first"], seen["second"]], 1 if options.rounds else _LAST)
    for name, one in seen.items():
        sys.stdout.write(f"{name}: {one}\n")
    line = f"the line of {options.rate:g} Mbit/s, which carries {able * 8e-6:.2f} by plain TCP"
    sys.stdout.write(f"{line}, was used for paired steps to {used:.1%} of that in {end - begin:.0f} s\n")
    losses = ", ".join(f"{name} {one.losses[max(one.losses)]:.4f}" for name, one in seen.items())
    sys.stdout.write(f"held-out loss at last: {losses}; the slow one against the others at the same rounds {higher:+.2%}\n")
    wrong = [f"the slow line was used to {used:.1%} only"] if used < _LEAST_USED else []
    wrong += [f"it fetched weights {len(slow.fetched)} times"] if len(slow.fetched) > 1 else []
    wrong += ["its loss is too far above the others'"] if higher > _ABOVE else []
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    try:
        main()
    except NolocodError as error:
        sys.exit(str(error))
