"""Print the tables of docs/membership.md about drawn pairs: what they cost in mixing and solo steps, whom they protect.

The rule: who may offer to whom, and whom a node picks of those, is the product's own Draw and choose; training times, and
whether a peer answers, are modelled. One seed for each row, so that two runs print the same.
"""

from __future__ import annotations

import heapq
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from nolocod.identity import PeerId  # noqa: E402  # found by the line above
from nolocod.p2p.membership.draws import Draw  # noqa: E402
from nolocod.p2p.membership.peer_selection import choose  # noqa: E402
from nolocod.proto.types import Member, Standing  # noqa: E402

RUN = "cd" * 32
PHASE, PATIENCE, EXCHANGE = 60.0, 60.0, 5.0
"""Seconds of the mean inner phase, of looking for a partner, of one exchange."""
UNREACHABLE = 0.05
STALENESS = 3


@dataclass
class Node:
    name: PeerId
    seconds: float
    """Of its inner phase: machines differ."""
    draw: Draw
    value: float
    hostile: bool = False
    round: int = 0
    began: float = 0.0
    engaged_until: float = 0.0
    deadline: float | None = None
    tick: int = 0
    shunned: dict[PeerId, float] = field(default_factory=dict)


class Swarm:
    """`size` nodes with `draws`, `hostile` of whom do nothing but offer to the first honest one."""

    def __init__(self, size: int, draws: int, hostile: int = 0, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.now, self.tick = 0.0, 0
        self.queue: list[tuple[float, int, Node]] = []
        self.nodes = [self._node(number, draws, hostile=number >= size - hostile) for number in range(size)]
        self.by_name = {node.name: node for node in self.nodes}
        self.kinds = {"paired": 0, "solo": 0}
        self.others = self.members(self.nodes[0])
        """As many as each has: of more an answerer does not ask."""
        self.victims: list[bool] = []
        """For each exchange of the first node, whether it was with an attacker."""

    def _node(self, number: int, draws: int, *, hostile: bool) -> Node:
        name = PeerId(f"{number}-{self.rng.random()}")
        seconds = PHASE * self.rng.lognormvariate(0, 0.2)
        node = Node(name, seconds, Draw(RUN, name, draws), self.rng.gauss(0, 1), hostile)
        self.at(self.rng.uniform(0, PHASE) if not hostile else 0.0, node)
        return node

    def at(self, when: float, node: Node) -> None:
        self.tick += 1
        node.tick = self.tick
        heapq.heappush(self.queue, (when, self.tick, node))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.queue[0][0] <= end:
            self.now, tick, node = heapq.heappop(self.queue)
            if tick != node.tick:
                continue  # it took a step meanwhile, and has another turn
            self._attack(node) if node.hostile else self._look(node)
        self.now = end

    def members(self, own: Node) -> list[Member]:
        return [
            Member(node.name, Standing(node.round, 0, 0.0), "training", (), "", 0.0, None, lead=node.round - own.round)
            for node in self.nodes
            if node is not own
        ]

    def _look(self, node: Node) -> None:
        """As rounds do: at the boundary, one after another, until a step was taken."""
        if self.now < node.engaged_until or self.now < node.began + node.seconds:
            self.at(max(node.engaged_until, node.began + node.seconds), node)
            return
        if node.deadline is None:
            node.deadline = self.now + PATIENCE
        members = self.members(node)
        avoid = {peer for peer, until in node.shunned.items() if until > self.now} | node.draw.undrawn(members, node.round)
        found = choose(self.rng, members, Standing(node.round, 0, 0.0), STALENESS, avoid)
        waiting = any(until > self.now for until in node.shunned.values())
        if found is not None:
            self._offer(node, self.by_name[found])
        elif self.now >= node.deadline or not waiting:
            self.kinds["solo"] += 1
            self._step(node, node.round + 1, self.now)
        else:
            self.at(self.now + 0.5, node)

    def _offer(self, node: Node, other: Node) -> None:
        busy = self._refuses(node, other)
        if busy is None:
            self._exchange(node, other)
        else:
            node.shunned[other.name] = self.now + busy
            self.at(self.now + 0.1, node)

    def _refuses(self, node: Node, other: Node) -> float | None:
        """For how many seconds `other` is not to be asked again; None if it accepts."""
        if self.rng.random() < UNREACHABLE:
            return 30.0
        if other.draw.objection(node.name, node.round, lambda: self.others) is not None:
            return 30.0
        if abs(other.round - node.round) > STALENESS:
            return 30.0
        if self.now < other.engaged_until:
            return 1.0
        half = other.began + other.seconds / 2 - self.now
        return half if half > 0 and not other.hostile else None

    def _exchange(self, node: Node, other: Node) -> None:
        self.kinds["paired"] += 1
        other.draw.accepted(node.name, node.round)
        if self.nodes[0] in (node, other):
            self.victims.append(node.hostile or other.hostile)
        mean = (node.value + other.value) / 2
        for side in (node, other):
            self._step(side, side.round + 1, self.now + EXCHANGE)  # a partner far ahead takes nobody along (trainer/trust.py)
            side.value = mean

    def _step(self, node: Node, number: int, until: float) -> None:
        node.round, node.began, node.engaged_until, node.deadline = number, self.now, until, None
        node.shunned.clear()
        if not node.hostile:
            self.at(node.began + node.seconds, node)

    def _attack(self, node: Node) -> None:
        """Offer to the victim again and again, in whatever round of the window is drawn."""
        victim = self.nodes[0]
        for number in range(max(0, victim.round - STALENESS), victim.round + STALENESS + 1):
            node.round = number
            if victim.draw.objection(node.name, number, lambda: self.others) is None:
                if self._refuses(node, victim) is None:
                    self._exchange(node, victim)
                break
        node.round = victim.round
        self.at(self.now + 1.0 + self.rng.random(), node)


def variance(swarm: Swarm) -> float:
    return statistics.pvariance([node.value for node in swarm.nodes if not node.hostile])


def mixing(size: int, draws: int) -> tuple[float, float]:
    """The share of solo steps, and of the replicas' variance that is left after four phases."""
    solo, left = [], []
    for seed in range(3):
        swarm = Swarm(size, draws, seed=seed)
        before = variance(swarm)
        swarm.run(4 * PHASE)
        left.append(variance(swarm) / before)
        swarm.run(6 * PHASE)
        solo.append(swarm.kinds["solo"] / sum(swarm.kinds.values()))
    return statistics.mean(solo), statistics.geometric_mean(left)


def captured(size: int, draws: int, hostile: int) -> float:
    """The share of one victim's exchanges that are with attackers who offer to nobody else."""
    swarm = Swarm(size, draws, hostile)
    swarm.run(60 * PHASE)
    return statistics.mean(swarm.victims)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    say("| members | `draws` | solo steps | variance left after 4 phases |\n|---|---|---|---|")
    for size in (32, 96):
        for draws in (0, 4, 8, 16):
            if draws < size:
                solo, left = mixing(size, draws)
                say(f"| {size} | {draws} | {solo:.1%} | {left:.3f} |")
    say("\n| members | attackers after one victim | `draws` | of its exchanges with attackers |\n|---|---|---|---|")
    for size, hostile in ((32, 1), (32, 8)):
        for draws in (0, 4, 8):
            say(f"| {size} | {hostile} | {draws} | {captured(size, draws, hostile):.0%} |")


if __name__ == "__main__":
    main()
