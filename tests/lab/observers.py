"""Twelve real daemons behind routers of every kind, and `nolocod watch` behind one more: what of them its page knows.

The rule: what the observer shows is what its /run.json says, as a reader of the page gets it; what there is to show is what
the daemons say of themselves, and the receipts on their disks.
"""

from __future__ import annotations

import http.client
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from nolocod.observe.run.report import RunReport
from nolocod.p2p.exchange.contributions import points
from tests.lab.nodes import Load, swarm, within
from tests.lab.scenarios import PAIRING, START, started, training
from tests.lab.topology import LabError, internet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nolocod.observe.events import NatClass
    from nolocod.observe.run.report import MemberRow
    from tests.lab.nodes import Node
    from tests.lab.topology import Home, Internet, Place

MEMORY = 80.0
"""MB that an observer may take."""
SOON = 60.0
"""Seconds within which an exchange is to be shown, counted from its offer."""
ENOUGH = 0.95
"""Of the exchanges."""
SLOW = Load(steps=500, rounds=24, name="twelve-behind-nats", source="stdlib")
"""Of which a round takes about a minute: of quicker ones nodes do not pass on all receipts (docs/contributions.md)."""
_DUTY = ("--duty", "10%")
"""Twelve trainers on two cores leave them to what is measured."""
_APART = 5.0
"""Seconds between two starts: all import torch."""
_POLL = 1.0
_SAME = 2.0
"""Seconds by which the time of an exchange may differ between a receipt and the page, which tells ages."""
_NAMES = ("dahlia", "birch", "attic", "ann's box", "heron", "old laptop", "lab 3", "maple", "garage", "kite", "bureau", "fjord")


@dataclass
class Seen:
    """What the observer showed; seconds from its start, shares, MB."""

    nodes: dict[NatClass, tuple[int, int]]
    """By the class that the nodes tell of themselves: how many there are, and how many were shown training with it."""
    members: float | None
    """Until all were shown so."""
    exchanging: float | None
    """Until each was shown with an exchange."""
    minutes: float
    """In which exchanges were counted."""
    exchanges: dict[NatClass, tuple[int, int]] = field(default_factory=dict)
    """Of receipts with a node of that class on a side: how many there are, and how many were shown within `SOON`."""
    shown: int = 0
    """Of all `committed` within `SOON`."""
    committed: int = 0
    delays: Sequence[float] = ()
    """Of all that were shown, after their offer."""
    pairs: tuple[int, int] = (0, 0)
    """Different pairs of nodes in these receipts, and those of them that are drawn in the end."""
    memory: float = 0.0
    """The most that the observer took."""

    @property
    def wrong(self) -> str:
        """What is not as it should be; empty if all is."""
        found = []
        if self.members is None or any(there != shown for there, shown in self.nodes.values()):
            found.append("a node is not shown training, with its class")
        if not self.committed or self.shown < ENOUGH * self.committed:
            found.append(f"{self.shown} of {self.committed} exchanges were shown within {SOON:g} s")
        if self.memory > MEMORY:
            found.append(f"the observer takes {self.memory:.1f} MB")
        return "; ".join(found)


class Watcher:
    """`nolocod watch` at `place`, with its directory in `root`."""

    def __init__(self, place: Place, root: Path, nodes: Sequence[Node]) -> None:
        given = [part for node in nodes for part in node.bootstrap]
        line = [sys.executable, "-m", "nolocod", "watch", *given, "--data-dir", str(root)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            place.command(*line), stdout=subprocess.PIPE, text=True, process_group=0, env=environment
        )
        self._inside = within(place)
        self._where = ""

    def look(self) -> RunReport:
        """What its page says now."""
        return msgspec.json.decode(self._inside.submit(self._get).result(), type=RunReport)

    def _get(self) -> bytes:
        if not self._where:
            assert self.process.stdout is not None
            self._where = self.process.stdout.readline().partition("http://")[2].strip()
        connection = http.client.HTTPConnection(self._where, timeout=30)
        connection.request("GET", "/run.json")
        return connection.getresponse().read()

    @property
    def memory(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(20)
        self._inside.shutdown()


@contextmanager
def watcher(place: Place, root: Path, nodes: Sequence[Node]) -> Iterator[Watcher]:
    found = Watcher(place, root, nodes)
    try:
        yield found
    finally:
        found.end()


def nine(net: Internet) -> list[Place]:
    """Nine more in homes: five behind cones, of which two share one, three behind symmetric routers, one behind an open one."""
    homes: list[Home] = [net.home("cone", hosts=2, delay=10.0), *(net.home("cone", delay=10.0) for _ in range(3))]
    homes += [*(net.home("symmetric", delay=10.0) for _ in range(3)), net.home("open", delay=10.0)]
    return [place for home in homes for place in home.hosts]


def observed(root: Path, minutes: float) -> Seen:
    """Watch twelve for so many minutes; the last /run.json is kept as run.json in `root`."""
    with internet() as net, swarm(root, SLOW) as nodes:
        first = started(net, nodes, 3, 10.0, lambda number: (*_DUTY, "--name", _NAMES[number]))
        for number, place in enumerate(nine(net), len(first)):
            time.sleep(_APART)
            nodes.join(place, first, *_DUTY, "--name", _NAMES[number])
        ready = "all nodes train, and know how they are reached"
        nodes.wait(ready, lambda: training(*nodes.nodes) and bool(_classes(nodes.nodes)), 2 * START)
        with watcher(net.home("cone", delay=10.0).hosts[0], root / "watch", first) as watching:
            members = nodes.within(lambda: all_right(watching.look(), nodes.nodes), START)
            waited = nodes.within(lambda: exchanged(watching.look()) >= {one.peer_id for one in nodes.nodes}, PAIRING)
            exchanging = None if members is None or waited is None else members + waited
            seen, memory = _follow(watching, minutes * 60.0, root / "run.json")
            return _compare(nodes.nodes, Seen({}, members, exchanging, minutes, memory=memory), seen)


def _classes(nodes: Sequence[Node]) -> dict[str, NatClass]:
    """What each says of itself, by peer id; empty while one does not know it."""
    reports = {node.peer_id: node.report for node in nodes}
    found = {peer: one.reach.kind for peer, one in reports.items() if one is not None and one.reach.kind is not None}
    return {**found} if len(found) == len(nodes) else {}


def all_right(report: RunReport, nodes: Sequence[Node]) -> bool:
    """Whether all are shown training, with their class."""
    classes = _classes(nodes)
    rows = {one.peer_id: one for one in report.members}
    return bool(classes) and all(_right(rows.get(peer), kind) for peer, kind in classes.items())


def exchanged(report: RunReport) -> set[str]:
    """Who is shown with an exchange."""
    return {peer for one in report.exchanges for peer in one[:2]}


def _right(row: MemberRow | None, kind: NatClass) -> bool:
    return row is not None and (row.state, row.nat) == ("training", kind)


@dataclass
class _Followed:
    """What was shown in a time, on the clock of the day."""

    began: float
    ended: float = 0.0
    first: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)
    """Of each pair: when each of its exchanges was, and when it was first shown."""
    last: RunReport | None = None

    def note(self, report: RunReport, now: float) -> None:
        self.last = report
        for offerer, answerer, age in report.exchanges:
            known = self.first.setdefault((offerer, answerer), [])
            if all(abs(at - (now - age)) > _SAME for at, _ in known):
                known.append((now - age, now))

    def shown(self, offerer: str, answerer: str, at: float) -> float | None:
        """After how many seconds an exchange was shown that was offered then."""
        known = self.first.get((offerer, answerer), ())
        return next((when - at for said, when in known if abs(said - at) <= _SAME), None)


def _follow(watching: Watcher, seconds: float, path: Path) -> tuple[_Followed, float]:
    """What is shown of the exchanges of so many seconds, of which the last ones get their minute too."""
    found, memory = _Followed(time.time()), 0.0
    found.ended = found.began + seconds
    while time.time() < found.ended + SOON:
        report = watching.look()
        found.note(report, time.time())
        memory = max(memory, watching.memory)
        path.write_bytes(msgspec.json.encode(report))
        time.sleep(_POLL)
    return found, memory


def _compare(nodes: Sequence[Node], found: Seen, seen: _Followed) -> Seen:
    """Fill in of `found` what the daemons' receipts tell."""
    if seen.last is None:
        raise LabError("the observer showed nothing.")
    classes = _classes(nodes)
    rows = {one.peer_id: one for one in seen.last.members}
    kinds = sorted(set(classes.values()), key=["public", "cone", "symmetric", "client"].index)
    for kind in kinds:
        here = [peer for peer, its in classes.items() if its == kind]
        found.nodes[kind] = (len(here), sum(_right(rows.get(peer), kind) for peer in here))
    delays, by_class, pairs = [], {kind: [0, 0] for kind in kinds}, set()
    signed = {one.session: points(one) for node in nodes for one in node.signed()}
    for offerer, answerer in signed.values():
        if not seen.began <= offerer.time < seen.ended:
            continue
        delay = seen.shown(offerer.peer, answerer.peer, offerer.time)
        delays += [] if delay is None else [delay]
        soon = delay is not None and delay <= SOON
        found.committed += 1
        found.shown += soon
        pairs.add(frozenset((offerer.peer, answerer.peer)))
        for kind in {classes[offerer.peer], classes[answerer.peer]}:
            by_class[kind][0] += 1
            by_class[kind][1] += soon
    drawn = {frozenset(one[:2]) for one in seen.last.exchanges}
    found.exchanges = {kind: (there, shown) for kind, (there, shown) in by_class.items()}
    found.delays, found.pairs = sorted(delays), (len(pairs), len(pairs & drawn))
    return found


def rows(found: Seen) -> list[tuple[str, str]]:
    """For a table of what was measured."""
    until = ["never" if one is None else f"{one:.0f} s" for one in (found.members, found.exchanging)]
    median = f", {statistics.median(found.delays):.0f} s after the offer (median)" if found.delays else ""
    told = [
        (
            f"{kind}: members shown with their class; exchanges with one of them, shown within {SOON:g} s",
            f"{found.nodes[kind][1]} of {found.nodes[kind][0]}; {found.exchanges[kind][1]} of {found.exchanges[kind][0]}",
        )
        for kind in found.nodes
    ]
    return [
        ("from its start until all are shown training, with their class; until each has an exchange", "; ".join(until)),
        *told,
        (
            f"exchanges of {found.minutes:g} minutes by the receipts of both partners; shown within {SOON:g} s",
            f"{found.committed}; {found.shown}{median}",
        ),
        ("different pairs of nodes in these receipts; drawn in the end", f"{found.pairs[0]}; {found.pairs[1]}"),
        ("memory of the observer, at most", f"{found.memory:.1f} MB"),
    ]
