"""What must hold behind NATs, each as a function that lays its networks, starts real daemons and returns figures.

The rule: a scenario measures and does not judge; times are in seconds, None where something did not come within its
limit. `tests/lab/test_*.py` runs short forms and asserts, `python -m tests.lab` runs the long forms and writes
docs/network.md.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from tests.lab.nodes import Load, Resources, swarm
from tests.lab.topology import LabError, internet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nolocod.observe.status.report import ExchangeRow, StatusReport
    from tests.lab.nodes import Node, Swarm
    from tests.lab.topology import Home, Internet, Kind

Stack = Literal["4", "6", "both"]
"""Which versions of IP the hosts behind routers have. IPv6 is not translated, but filtered."""
Accident = Literal["forgotten", "moved", "readdressed", "cut"]

MEETING = 10.0
"""Within which two nodes that met are to have a straight connection."""
START = 300.0
"""What a node may take from its start to a training member: torch is slow to import where many do at once."""
PAIRING = 300.0
"""What anything that nodes do with each other may take on a busy machine: scenarios give up then."""
CAUGHT = Load(hidden=256, steps=20)
"""Of which an exchange takes long enough to be caught in its middle: a relay carries it in four seconds."""


def pairs(node: Node, other: Node) -> list[ExchangeRow]:
    """The committed exchanges with `other` in its report, newest first."""
    report = node.report
    rows = report.exchanges if report else ()
    return [row for row in rows if row.partner == other.peer_id and row.outcome == "committed"]


def reach(node: Node, other: Node) -> str | None:
    """How `node` says that it is connected with `other`."""
    row = node.row(other)
    return row.reach if row else None


def training(*nodes: Node) -> bool:
    return all((report := node.report) is not None and report.inner_steps > 0 for node in nodes)


def publics(net: Internet, nodes: Swarm, count: int, delay: float = 0.0) -> list[Node]:
    """Nodes that everybody reaches: the run's first, and others; helpers and relays of those behind routers."""
    found = started(net, nodes, count, delay)
    nodes.wait("the public nodes train", lambda: training(*found), START)
    return found


def started(
    net: Internet, nodes: Swarm, count: int, delay: float = 0.0, flags: Callable[[int], tuple[str, ...]] = lambda _: ()
) -> list[Node]:
    """The same before they train, so that others start beside them. `flags`: of each by its number."""
    found = [nodes.found(net.public(delay), *flags(0))]
    for number in range(1, count):
        found.append(nodes.public(net.public(delay), found[:1], *flags(number)))
    return found


# --- meeting -------------------------------------------------------------------------------------------------------


@dataclass
class Meeting:
    """One newcomer behind a router, and the node behind another that it meets."""

    straight: float | None
    """From when either first told of the other as connected, until both are straight."""
    reach: tuple[str | None, str | None]
    """How each says that they are connected, in the end."""
    paired: float | None
    """From then to a committed exchange of the two."""
    nat: tuple[str | None, str | None] = (None, None)
    why: tuple[str, str] = ("", "")
    rate: float | None = None
    """MB/s of that exchange, both ways together."""
    over6: bool = False
    """Whether the newcomer has a connection to the other over IPv6."""


def meetings(
    root: Path,
    kinds: tuple[Kind, Kind] = ("cone", "cone"),
    rtt: float = 0.0,
    trials: int = 1,
    load: Load | None = None,
    rate: float = 0.0,
    stack: Stack = "4",
) -> list[Meeting]:
    """Let a node behind one router meet a fresh one behind another, `trials` times; `rtt` in milliseconds, `rate` in Mbit/s."""
    found = []
    with internet(ipv6=stack != "4") as net, swarm(root, load) as nodes:
        homes = [net.home(kind, delay=rtt / 4, rate=rate) for kind in kinds]
        if stack == "6":
            for home in homes:
                home.only6()
        helpers = publics(net, nodes, 2)
        host = nodes.join(homes[0].hosts[0], helpers)
        nodes.wait("the first node behind a router trains", lambda: training(host), START)
        for _ in range(trials):
            guest = nodes.join(homes[1].hosts[0], helpers)
            found.append(meet(nodes, host, guest, straight=stack != "4" or "symmetric" not in kinds))
            nodes.drop(guest)
    return found


def meet(nodes: Swarm, host: Node, guest: Node, *, straight: bool) -> Meeting:
    """What becomes of two nodes that start to know of each other; whether they are to have a `straight` connection."""
    both = ((host, guest), (guest, host))
    nodes.wait("the two nodes meet", lambda: any(reach(*pair) is not None for pair in both), START)
    seconds = None
    if straight:
        seconds = nodes.within(lambda: all(reach(*pair) not in (None, "relayed") for pair in both), PAIRING)
    paired = nodes.within(lambda: bool(pairs(host, guest) and pairs(guest, host)), PAIRING)
    reports: list[StatusReport | None] = []
    reaches: list[str | None] = []

    def told() -> bool:
        """Whether both know their NATs and are connected, by one look at each: a busy node may not answer the next."""
        reports[:] = [node.report for node in (host, guest)]
        reaches[:] = [reach(*pair) for pair in both]
        return all(report is not None and report.reach.kind for report in reports) and None not in reaches

    nodes.within(told, START)
    rows = pairs(guest, host)
    return Meeting(
        seconds,
        (reaches[0], reaches[1]),
        paired,
        tuple(report.reach.kind if report else None for report in reports),
        tuple(report.reach.why if report else "" for report in reports),
        (rows[0].sent + rows[0].received) / rows[0].seconds / 1e6 if rows and rows[0].seconds else None,
        guest.over6(host),
    )


# --- a relay dies ----------------------------------------------------------------------------------------------------


@dataclass
class RelayKilled:
    """What became of an exchange whose relay was killed."""

    elsewhere: float | None
    """Until both ends hold two reservations, none of them at the dead relay."""
    paired: float | None
    """Until the two have committed another exchange."""
    agreed: bool
    """Whether both hold receipts of the same sessions with each other, and have applied as many."""
    during: bool
    """Whether an exchange was under way when the relay died."""
    told: list[str]
    """What each node that is left said in the end: its class, where it holds reservations, whom it banned, what went wrong."""


def relay_killed(root: Path) -> RelayKilled:
    """Kill the relay of two nodes behind symmetric routers with -9 in the middle of their exchange."""
    with internet() as net, swarm(root, CAUGHT) as nodes:
        relays = publics(net, nodes, 3)
        one, other = (nodes.join(net.home("symmetric").hosts[0], relays) for _ in range(2))
        return kill_relay(nodes, relays, one, other)


def kill_relay(nodes: Swarm, relays: Sequence[Node], one: Node, other: Node) -> RelayKilled:
    """Kill that of `relays` which carries the next exchange of two nodes that reach each other by relays only."""
    ends = (one, other)
    nodes.wait("both nodes hold two reservations", lambda: all(len(_held(end)) >= 2 for end in ends), START)

    def carrying() -> Node | None:
        if not any((report := a.report) and report.exchanging_with == b.peer_id for a, b in (ends, ends[::-1])):
            return None
        busy = [relay for relay in relays if (report := relay.report) and report.reach.carried.open]
        return busy[0] if busy else None

    victim: list[Node] = []

    def caught() -> bool:
        relay = carrying()
        if relay is not None:
            victim.append(relay)
        return relay is not None

    during = nodes.within(caught, PAIRING) is not None
    dead = victim[0] if victim else relays[1]
    before = len(one.receipts(other))
    dead.kill()
    elsewhere = nodes.within(lambda: all(len(_held(end)) >= 2 and dead.peer_id not in _held(end) for end in ends), PAIRING)
    paired = nodes.within(lambda: len(one.receipts(other)) > before, PAIRING)
    agreed = nodes.within(lambda: _agree(one, other), PAIRING) is not None
    left = [end for end in (*ends, *relays) if end is not dead]
    return RelayKilled(elsewhere, paired, agreed, during, [_stands(node) for node in left])


def _held(node: Node) -> set[str]:
    report = node.report
    return {row.peer_id for row in report.reach.relays} if report else set()


def _stands(node: Node) -> str:
    if (report := node.report) is None:
        return f"{node.peer_id} does not answer"
    reach, banned = report.reach, [peer.peer_id for peer in report.peers if peer.banned_for]
    return f"{node.peer_id} is {reach.kind} ({reach.why}), held by {_held(node)}, banned {banned}, {report.errors}"


def _agree(one: Node, other: Node) -> bool:
    """Whether both hold the same receipts about each other, and each has taken as many paired steps as it holds receipts."""
    reports = [(node, node.report) for node in (one, other)]
    stepped = all(report is not None and report.outer_paired == len(node.receipts()) for node, report in reports)
    return stepped and one.receipts(other) == other.receipts(one)


# --- a line fails ----------------------------------------------------------------------------------------------------


@dataclass
class Recovery:
    accident: Accident
    heard: float | None
    """From the line's return until a public node has heard it anew."""
    paired: float | None
    """From the line's return until the node has committed another exchange."""


def recoveries(root: Path, accidents: tuple[Accident, ...], down: float = 60.0) -> list[Recovery]:
    """Let accidents befall the router of one node, one after the other, and see when it pairs again."""
    with internet() as net, swarm(root) as nodes:
        helpers = publics(net, nodes, 2)
        home, far = net.home("cone"), net.home("cone")
        node, other = (nodes.join(where.hosts[0], helpers) for where in (home, far))
        nodes.wait("the nodes behind routers have paired", lambda: all(_committed(n) for n in (node, other)), START)
        return [recover(nodes, home, node, helpers, accident, down) for accident in accidents]


def recover(nodes: Swarm, home: Home, node: Node, helpers: Sequence[Node], accident: Accident, down: float = 0.0) -> Recovery:
    """Let an accident befall the router of `home`, where `node` is, and see when it is heard and pairs again."""
    _befall(home, accident, down)
    returned = time.monotonic()

    def heard(other: Node) -> bool:
        row = other.row(node)
        return row is not None and row.age < time.monotonic() - returned

    first = nodes.within(lambda: any(heard(helper) for helper in helpers), PAIRING)
    paired = nodes.within(lambda: _fresh(node, time.monotonic() - returned), PAIRING)
    return Recovery(accident, first, None if paired is None else time.monotonic() - returned)


def _befall(home: Home, accident: Accident, down: float) -> None:
    match accident:
        case "forgotten":
            home.forget()
        case "moved":
            home.move()
        case "readdressed":
            home.readdress(home.hosts[0])
        case "cut":
            home.cut()
            time.sleep(down)
            home.join()


def _committed(node: Node) -> bool:
    report = node.report
    return bool(report and report.exchanges_by_outcome.get("committed"))


def _fresh(node: Node, seconds: float) -> bool:
    """Whether `node` has begun and committed an exchange within the last `seconds`."""
    report = node.report
    rows = report.exchanges if report else ()
    return any(row.outcome == "committed" and row.age + row.seconds < seconds for row in rows)


# --- many, coming and going --------------------------------------------------------------------------------------------


_HELD = tuple(part.name for part in fields(Resources))


@dataclass
class Churn:
    nodes: int
    minutes: float
    paired: int
    """Of the nodes alive at the end that had a minute's time, those that have paired within the last two minutes."""
    asked: int
    """Those."""
    tried: dict[str, int] = field(default_factory=dict)
    """Outcomes of all exchanges that nodes alive at the end have taken part in."""
    success: float | None = None
    """Committed, as a share of those that were tried: with a partner that said yes, or could not be had."""
    steady: int = 0
    """Nodes that lived throughout: of their network processes are the figures below."""
    held: dict[str, list[float]] = field(default_factory=dict)
    """What they hold, by name (memory in MiB, threads, files, tasks): the median after each minute, and at the end."""
    growth: dict[str, list[float]] = field(default_factory=dict)
    """Of each of them: by how much that grows in a minute, as a straight line through the time after the first third."""


def churn(
    root: Path, nodes_in_all: int = 20, homes: int = 5, minutes: float = 10.0, every: float = 60.0, delay: float = 10.0
) -> Churn:
    """Nodes in private networks of all kinds and three public ones; one killed and one joined each `every` seconds."""
    rng = random.Random(4)
    kinds: tuple[Kind, ...] = ("cone", "cone", "symmetric", "cone", "open")
    with internet() as net, swarm(root, Load(steps=200)) as nodes:
        first = publics(net, nodes, 3, delay)
        hosts = [net.home(kinds[number % len(kinds)], delay=delay) for number in range(homes)]
        live = list(first)
        for number in range(nodes_in_all - len(first)):
            live.append(nodes.join(hosts[number % homes].host(), first))
            time.sleep(1.0)  # or they all import torch at once
        nodes.wait("all nodes train", lambda: training(*live), START)
        stayed = set(live)
        began = time.monotonic()
        joined: dict[Node, float] = {}
        turns = int(minutes * 60 / every)
        samples: dict[Node, list[tuple[float, Resources]]] = {node: [] for node in live}
        for turn in range(1, turns + 1):
            time.sleep(max(0.0, began + turn * every - time.monotonic()))
            for node in stayed:
                if found := node.resources():
                    samples[node].append(((time.monotonic() - began) / 60, found))
            if turn == turns:
                break
            dead = rng.choice([node for node in live if node not in first[:1]])
            dead.kill()
            live.remove(dead)
            stayed.discard(dead)
            live.append(nodes.join(rng.choice(hosts).host(), first))
            joined[live[-1]] = time.monotonic()
        asked = [node for node in live if time.monotonic() - joined.get(node, began) > 60.0]
        outcome: dict[str, int] = {}
        for node in live:
            report = node.report
            for name, count in report.exchanges_by_outcome.items() if report else ():
                outcome[name] = outcome.get(name, 0) + count
        tried = sum(count for name, count in outcome.items() if name not in ("busy", "refused"))
        kept = [samples[node] for node in stayed if len(samples[node]) == turns]
        of = {what: [[(at, float(getattr(held, what))) for at, held in one] for one in kept] for what in _HELD}
        return Churn(
            nodes_in_all,
            minutes,
            sum(_fresh(node, 120.0) for node in asked),
            len(asked),
            outcome,
            outcome.get("committed", 0) / tried if tried else None,
            len(kept),
            {what: _medians(lines) for what, lines in of.items()},
            {what: [slope(line, minutes / 3) for line in lines] for what, lines in of.items()},
        )


def _medians(lines: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Of what several hold, at each time."""
    return [statistics.median(held for _, held in turn) for turn in zip(*lines, strict=True)]


def slope(line: Sequence[tuple[float, float]], start: float) -> float:
    """Of the straight line that lies best through the points from `start` on."""
    at, values = zip(*[point for point in line if point[0] >= start], strict=True)
    return statistics.linear_regression(at, values).slope


# --- the doctor --------------------------------------------------------------------------------------------------------


@dataclass
class Diagnosis:
    """What `nolocod doctor` says behind one router."""

    router: str
    status: int
    """Its exit status."""
    reachability: dict[str, str]
    """The finding about reachability: its status, what was found, and the remedy."""
    troubles: dict[str, str]
    """All findings that are a warning or a failure, by name."""


def diagnoses(root: Path) -> list[Diagnosis]:
    """`nolocod doctor` behind each kind of router, and on a public host."""
    found = []
    with internet() as net, swarm(root) as nodes:
        helpers = publics(net, nodes, 2)
        places = {kind: net.home(kind).hosts[0] for kind in ("cone", "symmetric", "open")}
        for router, place in {"none": net.public(), **places}.items():
            given = [part for helper in helpers for part in helper.bootstrap]
            node = nodes.node(place)
            done = node.command("doctor", "--json", "--data", str(node.data), *given)
            try:
                findings = json.loads(done.stdout)["checks"]
            except ValueError as error:
                raise LabError(f"the doctor says {done.stdout[-300:]!r} {done.stderr[-600:]!r}.") from error
            told = next((one for one in findings if one["name"] == "reachability"), {})
            troubles = {one["name"]: one["found"] for one in findings if one["status"] in ("warn", "fail")}
            found.append(Diagnosis(router, done.returncode, told, troubles))
    return found
