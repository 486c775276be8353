"""Print the table of docs/membership.md: what membership costs and how fast it is, in swarms of several sizes.

The rule: the nodes are the product's own Membership and Hearsay (tests/modelled_swarm.py); only clock and network are modelled.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "tests")]

from modelled_swarm import CALM, Checks, Swarm, chi_square, draw, seconds_until_gone  # noqa: E402  # found by the line above

from nolocod.p2p.timing import Timing  # noqa: E402

SIZES = (4, 8, 16, 24, 50, 200, 800)


class Setattr:
    """What pytest's monkeypatch does, for a process that ends soon."""

    def setattr(self, target: object, name: str, value: object, /) -> None:
        setattr(target, name, value)


def cost(checks: Checks, size: int) -> str:
    swarm = Swarm(CALM)
    swarm.add(size)
    swarm.run(150.0 if size <= 200 else 60.0)
    sent, checked, seconds = {node.number: node.sent for node in swarm.live()}, checks.count, 48.0
    swarm.run(seconds)
    spent = [(node.sent - sent[node.number]) / seconds for node in swarm.live()]
    ages = [member.age for node in swarm.live() for member in node.table.live(swarm.now)]
    known = statistics.mean(len(node.table) for node in swarm.live())
    rate = (checks.count - checked) / seconds / size
    return (
        f"| {size} | {statistics.mean(spent):.0f} | {max(spent):.0f} | {rate:.1f} | {known:.0f} "
        f"| {statistics.mean(ages):.0f} | {swarm.timing.pace(round(known)):.0f} | {swarm.timing.lasts(round(known)):.0f} |"
    )


def joined_and_vanished(size: int) -> str:
    known, gone = [], []
    for seed in range(5):
        swarm = Swarm(Timing(), seed)
        old = swarm.add(size - 1)
        swarm.run(150.0)
        (newcomer,) = swarm.add(1, old[:1])
        began = swarm.now
        while any(newcomer.peer_id not in node.table for node in old):
            swarm.run(0.2)
        known.append(swarm.now - began)
        swarm.run(60.0)
        swarm.kill([newcomer])
        gone.append(seconds_until_gone(swarm, {newcomer.peer_id}, 1.0, 300.0))
    return f"| {size} | {statistics.mean(known):.1f} | {max(known):.1f} | {statistics.mean(gone):.0f} | {max(gone):.0f} |"


def uniformity(seed: int) -> str:
    swarm = Swarm(CALM, seed)
    nodes = swarm.add(200)
    swarm.run(150.0)
    degrees = swarm.in_degrees().values()
    drawn = draw(swarm, rounds=20, every=15.0)
    statistic, deviations = chi_square(drawn, nodes)
    spread = f"{statistics.mean(degrees):.0f} ± {statistics.pstdev(degrees):.0f} ({min(degrees)} to {max(degrees)})"
    return f"| {seed} | {statistic:.0f} | {deviations:+.2f} | {spread} |"


def churn() -> str:
    swarm = Swarm(CALM, seed=2)
    nodes = swarm.add(200)
    swarm.run(100.0)
    dead = nodes[0:200:2]
    for start in range(0, 100, 20):
        swarm.kill(dead[start : start + 20])
        swarm.run(12.0)
    gone = {node.peer_id for node in dead}
    live = Counter(node.draw() not in gone for _ in range(10) for node in swarm.live())
    seconds = seconds_until_gone(swarm, gone, 5.0, 400.0)
    share = live[True] / live.total()
    return f"Live partners among draws right after: {share:.0%}; the last of the dead forgotten after {seconds:.0f} s more."


def healing(size: int) -> str:
    """Seconds from the first contact between two halves until every node knows somebody of the other one."""
    times, events = [], []
    for seed in range(5):
        swarm = Swarm(Timing(), seed)
        left, right = swarm.add(size), swarm.add(size, side=1)
        swarm.run(200.0)
        for node in right:
            node.side = 0
        swarm.rng.choice(left).swap(swarm.rng.choice(right).peer_id)
        began, sides = swarm.now, ({node.peer_id for node in left}, {node.peer_id for node in right})
        while any(not node.table.among(sides[node in left]) for node in swarm.live()):
            swarm.run(0.5)
        times.append(swarm.now - began)
        events.append(sum(len(node.healed) for node in swarm.live()))
    return f"| {size} + {size} | {statistics.mean(times):.1f} | {max(times):.1f} | {statistics.mean(events):.0f} |"


def show(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def head(*columns: str) -> None:
    show("", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns))


def main() -> None:
    checks = Checks(Setattr())
    head("nodes", "bytes/s sent", "most", "signatures/s", "members known", "their age, s", "beat, s", "believed for, s")
    for size in SIZES:
        show(cost(checks, size))
    head("nodes", "newcomer known to all, s", "most", "vanished one gone from all, s", "most")
    for size in (4, 8, 16, 50):
        show(joined_and_vanished(size))
    head("seed", "chi-square, 199 degrees of freedom", "standard deviations", "in how many tables a node is")
    for seed in (1, 2, 3):
        show(uniformity(seed))
    head("nodes", "every node knows the other half, s", "most", "PartitionHealed")
    for size in (3, 12, 50):
        show(healing(size))
    show("", churn())


if __name__ == "__main__":
    main()
