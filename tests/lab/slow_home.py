"""`python -m tests.lab.slow_home`: three real daemons, one of them in a home whose line is far too slow for the others' pace.

The rule: what is told was in the nodes' own events. The others' rounds take a third of the time in which the slow line carries
the model once. It is an error where the one behind it uses less than 80 % of its line for exchanges that were committed,
fetches weights a second time, or is more than 1 % above the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nolocod.errors import NolocodError
from nolocod.run import presets
from nolocod.run.manifest import Data, Evaluation, Inner, Manifest, Outer
from tests.lab.homes import Large
from tests.lab.nodes import swarm
from tests.lab.topology import Line, internet
from tests.support.told import IN_JSON

if TYPE_CHECKING:
    from tests.lab.nodes import Node

_START = 600.0
_LEAST_USED, _ABOVE = 0.8, 0.01
_LAST = 5
"""Evaluations that are compared."""
_SHARE = "30%"
"""Of the time in which each computes: three trainers have two cores here. AdamW for the same reason: its steps are short."""


class Slow(Large):
    """A model of ten million parameters on real text, looked at in every round."""

    def to_run_file(self) -> str:
        model = presets.MODELS["10m"]
        inner = Inner(steps=self.steps, batch=1, sequence=16, optimizer="adamw")
        outer = Outer(turns=presets.usual_turns(self.steps))
        evaluation = Evaluation(every=5, batches=32)
        data = Data(source="stdlib")
        return presets.to_toml(
            Manifest(name="slow-home", model=model, codec="modulo8", data=data, inner=inner, outer=outer, evaluation=evaluation)
        )


@dataclass
class Told:
    """What a node told between two times of day, and all its evaluations by round."""

    paired: int = 0
    solo: int = 0
    sent: int = 0
    failed: int = 0
    fetched: int = 0
    losses: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Node, begin: float, end: float) -> Told:
        told = cls()
        for line in node.log.read_text(encoding="utf-8").splitlines():
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            fields, at = said["fields"], datetime.fromisoformat(said["time"]).timestamp()
            match said["event"]:
                case "evaluated":
                    told.losses[fields["round"]] = fields["loss"]
                case "weights_fetched":
                    told.fetched += 1
                case "outer_step" if begin <= at <= end:
                    told.paired += fields["kind"] == "paired"
                    told.solo += fields["kind"] == "solo"
                    told.sent += fields.get("sent", 0)
                case "exchange_ended" if begin <= at <= end:
                    told.failed += fields["outcome"] in ("aborted", "in_doubt", "unreachable")
        return told

    def __str__(self) -> str:
        steps = f"{self.paired} paired and {self.solo} solo outer steps, {self.failed} exchanges failed"
        return f"{steps}; {self.sent / 1e6:.0f} MB sent in others; weights fetched {self.fetched} times"

    def above(self, others: list[Told]) -> float:
        """How far the last evaluations are above what the others had at these rounds, on average, of theirs."""
        found = []
        for number in sorted(self.losses)[-_LAST:]:
            theirs = [np.interp(number, sorted(one.losses), [one.losses[at] for at in sorted(one.losses)]) for one in others]
            found.append(self.losses[number] / float(np.mean(theirs)) - 1)
        return float(np.mean(found))


def _paired(node: Node) -> bool:
    report = node.report
    return report is not None and report.outer_paired > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=4.0, metavar="MBIT", help="of the slow line, each way (%(default)s)")
    parser.add_argument("--rtt", type=float, default=60.0, metavar="MS", help="to the home (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the nodes' directories and logs there")
    options = parser.parse_args()
    flags = (*IN_JSON, "--duty", _SHARE)
    with ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nolocod-slow-home-")))
        net = stack.enter_context(internet())
        nodes = stack.enter_context(swarm(root, Slow(steps=25), *flags))
        first = nodes.found(net.public())
        second = nodes.public(net.public(), [first])
        home = net.home("cone")
        net.lay(home.router, Line(options.rtt / 2, options.rate, options.rate))
        third = nodes.join(home.hosts[0], [first])
        nodes.wait("all pair", lambda: all(_paired(node) for node in (first, second, third)), _START)
        begin = time.time()
        nodes.wait("the time is over", lambda: time.time() - begin > 60 * options.minutes, 60 * options.minutes + 60)
        end = time.time()
        seen = {name: Told.of(node, begin, end) for name, node in (("first", first), ("second", second), ("slow", third))}
    slow = seen["slow"]
    used = 8 * slow.sent / (1e6 * options.rate * (end - begin))
    above = slow.above([seen["first"], seen["second"]])
    for name, one in seen.items():
        sys.stdout.write(f"{name}: {one}\n")
    sys.stdout.write(f"the line of {options.rate:g} Mbit/s was used for these to {used:.0%} in {end - begin:.0f} s\n")
    losses = ", ".join(f"{name} {one.losses[max(one.losses)]:.4f}" for name, one in seen.items())
    sys.stdout.write(f"held-out loss at last: {losses}; the slow one against the others at the same rounds {above:+.2%}\n")
    wrong = [f"the slow line was used to {used:.0%} only"] if used < _LEAST_USED else []
    wrong += [f"it fetched weights {slow.fetched} times"] if slow.fetched > 1 else []
    wrong += ["its loss is too far above the others'"] if above > _ABOVE else []
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    try:
        main()
    except NolocodError as error:
        sys.exit(str(error))
