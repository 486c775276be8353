"""`python -m tests.lab.homes MODEL`: real daemons of a large model on home lines: exchanges, cuts, a newcomer, SIGTERM.

The rule: what is told was in the nodes' own events, on their disks, or their processes' exit. The two that exchange fill
their lines all the time. It is an error where an exchange did not commit, a member fell silent on a line that worked, an outer
step was taken alone beside a partner, the newcomer's weights came twice, or a stop took long or left no whole checkpoint.
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.errors import NolocodError
from nolocod.run import presets
from nolocod.run.data import Data
from nolocod.run.manifest import Evaluation, Inner, Manifest, Outer, stored_manifest
from nolocod.trainer import checkpoint
from tests.bench.beside import MODELS
from tests.lab.nodes import Load, swarm
from tests.lab.topology import LabError, Line, internet
from tests.support.told import IN_JSON, Seen

if TYPE_CHECKING:
    from nolocod.observe.status.report import StatusReport
    from tests.lab.nodes import Node, Swarm
    from tests.lab.topology import Home, Internet

STOP_SECONDS = 10.0
"""After SIGTERM containers are killed."""
_START, _PAIR, _FETCH = 600.0, 900.0, 3600.0
"""Seconds for a node to train, for an outer step, and for a newcomer's weights and its first pair."""
_SILENT = 25.0
"""Seconds after a cut in which a member may still be dropped for its silence in it."""


@dataclass(frozen=True)
class Large(Load):
    """A model of beside.py's, or a preset, on real text."""

    model: str = "10M"
    sequence: int = 16
    turns: int = 0
    """0: as a run file has that does not say."""
    evaluation: Evaluation = field(default_factory=lambda: Evaluation(batches=1))

    def to_run_file(self) -> str:
        large = {"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 1024}
        model = presets.MODELS.get(self.model) or {**large, **MODELS[self.model]}
        inner = Inner(steps=self.steps, batch=1, sequence=self.sequence, optimizer="adamw")
        data, evaluation = Data(source="stdlib"), self.evaluation
        outer = Outer(turns=self.turns or presets.usual_turns(self.steps), rounds=self.rounds)
        run = Manifest(name="homes", model=model, codec="modulo8", data=data, inner=inner, outer=outer, evaluation=evaluation)
        return presets.to_toml(run)


@dataclass
class Watched:
    """What was seen from outside."""

    silence: float = 0.0
    """The oldest news of the partner in seconds, in an exchange on a line that worked."""
    cuts: list[tuple[float, float, float]] = field(default_factory=list)
    """Of each: seconds without a line, those until the exchange was applied by both, and the time of day of its end."""
    alone: int = 0
    """Outer steps that the two took alone, from their first pair to the newcomer's coming: of three one is left at times."""
    first_stop: float = math.inf
    """Time of day: who was stopped is silent with reason."""
    stops: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    """By node: seconds, exit status, and what is wrong with its last checkpoint, or its size."""

    def excused(self, at: float) -> bool:
        return at > self.first_stop or any(end - seconds <= at <= end + _SILENT for seconds, _, end in self.cuts)


class Lab:
    """The first, which everybody reaches, the second in a home, and the newcomer in another."""

    def __init__(self, net: Internet, nodes: Swarm, options: argparse.Namespace) -> None:
        self._net, self._nodes = net, nodes
        self._into = options.into
        self._line = Line(options.rtt / 4, options.up, options.down, options.loss / 200)
        self.watched = Watched()

    def first(self, *flags: str) -> Node:
        place = self._net.public()
        self._net.lay(place, self._line)
        return self._nodes.found(place, *IN_JSON, *flags)

    def home(self) -> Home:
        home = self._net.home("cone")
        self._net.lay(home.router, self._line)
        return home

    def wait(self, what: str, seconds: float, *nodes: Node, paired: int) -> None:
        """Until each of `nodes` has so many paired steps; how old the news of the partner get meanwhile is noted."""

        def reached() -> bool:
            reports = [node.report for node in nodes]
            for node, report in zip(nodes, reports, strict=True):
                self._note(node, report)
            return all(report is not None and report.outer_paired >= paired for report in reports)

        self._nodes.wait(what, reached, seconds)

    def _note(self, node: Node, report: StatusReport | None) -> None:
        if report is None or report.exchanging_with is None or self.watched.excused(time.time()):
            return
        ages = [row.age for row in report.peers if row.peer_id == report.exchanging_with and row.state]
        self.watched.silence = max(self.watched.silence, *ages, 0.0)

    def alone(self, *nodes: Node) -> int:
        """Outer steps that these took alone so far."""
        return sum(report.outer_solo for node in nodes if (report := node.report) is not None)

    def begun(self, node: Node, partner: Node) -> bool:
        report = node.report
        return report is not None and report.exchanging_with == partner.peer_id

    def cut(self, seconds: float, first: Node, second: Node, home: Home) -> None:
        """Cut the second's line in the midst of an exchange."""
        self._nodes.wait("an exchange begins", lambda: self.begun(first, second), _PAIR)
        time.sleep(self._into)
        reports = [first.report, second.report]
        before = max(report.outer_paired for report in reports if report is not None)
        home.cut()
        time.sleep(seconds)
        home.join()
        end = time.monotonic()
        self.watched.cuts.append((seconds, 0.0, time.time()))
        self.wait("the exchange that was cut", _PAIR, first, second, paired=before + 1)
        self.watched.cuts[-1] = (seconds, time.monotonic() - end, self.watched.cuts[-1][2])

    def stop(self, node: Node) -> None:
        """SIGTERM, as a container gets it."""
        assert node.process is not None
        began = time.monotonic()
        self.watched.first_stop = min(self.watched.first_stop, time.time())
        node.process.send_signal(signal.SIGTERM)
        try:
            status = node.process.wait(120)
        except subprocess.TimeoutExpired:
            raise LabError(f"{node.name} did not stop within 120 s.\n{node.tail()}") from None
        took = time.monotonic() - began
        sealed = stored_manifest(node.paths)
        assert sealed is not None
        found = checkpoint.find(node.paths.checkpoints, sealed.run_id)
        trouble = "; ".join(found.trouble) or ("" if found.path else "there is none")
        self.watched.stops[node.name] = took, status, trouble
        self._nodes.nodes.remove(node)


def watch(lab: Lab, nodes: Swarm, options: argparse.Namespace) -> dict[str, Node]:
    """Run it to its end; the nodes by what they were."""
    quiet = ("--checkpoint-every", str(options.checkpoint_every)) if options.checkpoint_every else ()
    first = lab.first(*quiet)
    home = lab.home()
    second = nodes.join(home.hosts[0], [first], *IN_JSON)
    lab.wait("the first exchange", _START + _PAIR, first, second, paired=1)
    alone = lab.alone(first, second)
    for seconds in options.cuts:
        lab.cut(seconds, first, second, home)
    lab.wait("their exchanges", options.paired * _PAIR, first, second, paired=options.paired)
    lab.watched.alone = lab.alone(first, second) - alone
    third_home = lab.home()
    if options.apart:
        nodes.wait("an exchange begins", lambda: lab.begun(second, first), _PAIR)
        lab.stop(second)
    third = nodes.join(third_home.hosts[0], [first], *IN_JSON)
    lab.wait("the newcomer's first exchange", _FETCH, third, paired=1)
    nodes.wait("its checkpoint", lambda: third.report is not None and third.report.checkpoint_round is not None, _PAIR)
    for node in (third, first) if options.apart else (third, second, first):
        lab.stop(node)
    return {"first": first, "second": second, "newcomer": third}


def wrong(seen: dict[str, Seen], watched: Watched) -> list[str]:
    found = [f"{watched.alone} steps alone after the first pair"] if watched.alone else []
    for name, one in seen.items():
        found += [f"{name}: {text}" for text in one.wrong]
        found += [f"{name}: {text}" for at, text in one.lost if "silen" in text and not watched.excused(at)]
    if len(seen["newcomer"].fetched) != 1:
        found.append(f"the newcomer fetched weights {len(seen['newcomer'].fetched)} times")
    for name, (took, status, trouble) in watched.stops.items():
        if took > STOP_SECONDS or status or trouble:
            found.append(f"{name} stopped within {took:.1f} s, exit status {status}; its last checkpoint: {trouble or 'whole'}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("model", choices=MODELS)
    add("--paired", type=int, default=20, metavar="N", help="outer steps of the two (%(default)s)")
    add("--inner", type=int, default=25, metavar="N", help="inner steps between outer steps (%(default)s)")
    add("--turns", type=int, default=0, metavar="N", help="of a phase (by its inner steps)")
    add("--into", type=float, default=5.0, metavar="SECONDS", help="of an exchange before its line is cut (%(default)s)")
    add("--sequence", type=int, default=16, metavar="N")
    add("--cuts", type=float, nargs="*", default=[20.0, 120.0], metavar="SECONDS", help="of the second's line (20 and 120)")
    add("--up", type=float, default=20.0, metavar="MBIT", help="of each line (%(default)s)")
    add("--down", type=float, default=100.0, metavar="MBIT", help="of each line (%(default)s)")
    add("--rtt", type=float, default=80.0, metavar="MS", help="from home to home (%(default)s)")
    add("--loss", type=float, default=0.1, metavar="PERCENT", help="of the packets from home to home (%(default)s)")
    add("--checkpoint-every", type=float, metavar="SECONDS", help="of the first (by size)")
    add("--apart", action="store_true", help="stop the second before the newcomer comes: memory for two nodes is enough")
    add("--keep", type=Path, metavar="DIR", help="keep the nodes' directories and logs there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process stays behind
    began = time.monotonic()
    load = Large(steps=options.inner, model=options.model, sequence=options.sequence, turns=options.turns)
    with ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nolocod-homes-")))
        net = stack.enter_context(internet())
        nodes = stack.enter_context(swarm(root, load))
        lab = Lab(net, nodes, options)
        were = watch(lab, nodes, options)
        seen = {name: Seen.of(node.log, lab.watched.first_stop) for name, node in were.items()}
    line = f"{options.down:g}/{options.up:g} Mbit/s, {options.rtt:g} ms, {options.loss:g} % loss"
    _say(f"{options.model}, {line}: {time.monotonic() - began:.0f} s")
    for name, one in seen.items():
        _say(f"{name}: {one}")
    for seconds, after, _ in lab.watched.cuts:
        _say(f"cut for {seconds:g} s: the exchange was applied by both {after:.0f} s after the line's return")
    _say(f"oldest news of a partner in an exchange: {lab.watched.silence:.1f} s")
    for name, (took, status, trouble) in lab.watched.stops.items():
        _say(f"{name} stopped within {took:.1f} s, exit status {status}; its last checkpoint: {trouble or 'whole'}")
    found = wrong(seen, lab.watched)
    sys.exit("\n".join(found) if found else 0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except NolocodError as error:
        sys.exit(str(error))
