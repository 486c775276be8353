"""A swarm in one process: the product's own Membership and Gossip, real signatures, a clock and a network that are modelled.

The rule: only what lies between two nodes is made up. A swap of views is one step without delay; it fails, and its
peer is suspected, where that peer is down or in another part of the network.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from nolocod.identity import Identity, PeerId, verify
from nolocod.p2p.membership.gossip import Gossip, Heard
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.peer_selection import choose
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.timing import Timing
from nolocod.proto import envelope
from nolocod.proto.types import Standing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nolocod.observe.events import PartitionHealed

RUN = "ab" * 32
WALL = 1_700_000_000.0
PER_MESSAGE = 475
"""Bytes that a message costs beside its content: signature, names, negotiation, yamux, noise; 445 to 500 on real sockets."""
CONNECTIONS = 256
CALM = replace(Timing(), eager=0.0)
"""Newcomers' first contacts are no part of the steady state, and most of the computing."""


class Patch(Protocol):
    """pytest's monkeypatch, or what does its work."""

    def setattr(self, target: object, name: str, value: object, /) -> None: ...


class Checks:
    """The product's check of a signature; each envelope's is computed once for the whole swarm, and counted each time."""

    def __init__(self, patch: Patch) -> None:
        self.count = 0
        self._good: set[tuple[str, bytes]] = set()
        patch.setattr(envelope, "verify", self.verify)

    def verify(self, peer: str, message: bytes, signature: bytes) -> None:
        self.count += 1
        if (peer, signature) not in self._good:
            verify(peer, message, signature)
            self._good.add((peer, signature))


@dataclass
class Node:
    number: int
    swarm: Swarm
    identity: Identity
    state: str = "training"
    round: int = 5
    up: bool = True
    side: int = 0
    born: float = 0.0
    connected: dict[PeerId, None] = field(default_factory=dict)
    sent: int = 0
    healed: list[tuple[float, PartitionHealed]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peer_id = self.identity.peer_id
        self.rng = random.Random(self.number)
        self.table = Membership(self.peer_id, RUN, self.swarm.timing)
        addresses = (f"/ip4/10.0.{self.number // 250}.{self.number % 250 + 1}/tcp/4001", "/ip6/2001:db8::1234:5678/tcp/4001")
        own_heartbeat = OwnHeartbeat(
            self.identity,
            RUN,
            lambda: (Standing(self.round, 1_000_000, 3.5), self.state),
            lambda: addresses,
            lambda: WALL + self.swarm.now,
        )
        self.gossip = Gossip(self.table, own_heartbeat, self.rng)

    def beat(self) -> None:
        now = self.swarm.now
        self.gossip.beat(now)
        for peer in self.gossip.targets(now, [*self.connected]):
            self.swap(peer)
        self.swarm.at(now + self.gossip.pause(), self)

    def swap(self, peer: PeerId) -> bool:
        other, now = self.swarm.nodes[peer], self.swarm.now
        if not (other.up and other.side == self.side):
            self.connected.pop(peer, None)
            self.table.suspect(peer, now)
            return False
        self._connect(other)
        question = self.gossip.question(now)
        answer, heard = other.gossip.reply(self.peer_id, question, now)
        self.sent += question.ByteSize() + PER_MESSAGE
        other.sent += answer.ByteSize() + PER_MESSAGE
        self.table.trust(peer)
        other._take(heard)
        self._take(self.gossip.learn(peer, answer, now))
        return True

    def _take(self, heard: Heard) -> None:
        assert heard.faults == 0
        if heard.healed is not None:
            self.healed.append((self.swarm.now, heard.healed))
        for peer in heard.contact:
            self.swarm.soon(self, peer)

    def _connect(self, other: Node) -> None:
        for one, two in ((self, other), (other, self)):
            one.connected[two.peer_id] = None
            while len(one.connected) > CONNECTIONS:
                last = next(iter(one.connected))
                del one.connected[last]
                self.swarm.nodes[last].connected.pop(one.peer_id, None)

    def draw(self) -> PeerId | None:
        """A partner, as the mesh draws it."""
        now = self.swarm.now
        return choose(self.rng, self.table.live(now), Standing(self.round, 0, 0.0), 4, self.table.suspected(now))


class Swarm:
    """`nodes` by peer id; the first ones are everybody's bootstraps."""

    def __init__(self, timing: Timing | None = None, seed: int = 0) -> None:
        self.timing = timing or Timing()
        self.now = 0.0
        self.nodes: dict[PeerId, Node] = {}
        self.rng = random.Random(seed)
        self._queue: list[tuple[float, int, Node, PeerId | None]] = []
        self._tick = 0

    def add(self, count: int, bootstraps: Sequence[Node] = (), side: int = 0) -> list[Node]:
        """Nodes that join at once, one after the other in no time, through one of `bootstraps` or the first of them."""
        made: list[Node] = []
        for _ in range(count):
            number = len(self.nodes)
            node = Node(number, self, Identity.from_secret(number.to_bytes(32, "big")), side=side, born=self.now)
            self.nodes[node.peer_id] = node
            through = self.rng.choice([*bootstraps] or made or [node])
            if through is not node:
                self.soon(node, through.peer_id)
            self.at(self.now + self.rng.uniform(0.1, 3.0), node)
            made.append(node)
        return made

    def at(self, when: float, node: Node, peer: PeerId | None = None) -> None:
        self._tick += 1
        heapq.heappush(self._queue, (when, self._tick, node, peer))

    def soon(self, node: Node, peer: PeerId) -> None:
        self.at(self.now + 0.1, node, peer)

    def run(self, seconds: float) -> None:
        """Let so much time go by."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, node, peer = heapq.heappop(self._queue)
            if node.up:
                node.beat() if peer is None else node.swap(peer)
        self.now = end

    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.up]

    def kill(self, nodes: Iterable[Node]) -> None:
        """They end without a word; their connections end with them."""
        for node in nodes:
            node.up = False
            for peer in node.connected:
                self.nodes[peer].connected.pop(node.peer_id, None)

    def in_degrees(self) -> Counter[PeerId]:
        """For each live node, in how many live nodes' tables it is."""
        degrees: Counter[PeerId] = Counter({node.peer_id: 0 for node in self.live()})
        for node in self.live():
            degrees.update(member.peer_id for member in node.table.live(self.now) if member.peer_id in degrees)
        return degrees


def chi_square(drawn: Counter[PeerId], nodes: Sequence[Node]) -> tuple[float, float]:
    """Of the hits against equal ones: the statistic, and about how many standard deviations of a normal one it is
    above the mean (Wilson and Hilferty, PNAS 17(12), 1931)."""
    expected, free = drawn.total() / len(nodes), len(nodes) - 1
    statistic = sum((drawn[node.peer_id] - expected) ** 2 / expected for node in nodes)
    spread = 2 / (9 * free)
    return statistic, ((statistic / free) ** (1 / 3) - (1 - spread)) / spread**0.5


def draw(swarm: Swarm, rounds: int, every: float) -> Counter[PeerId]:
    drawn: Counter[PeerId] = Counter()
    for _ in range(rounds):
        swarm.run(every)
        drawn.update(partner for node in swarm.live() if (partner := node.draw()) is not None)
    return drawn


def seconds_until_gone(swarm: Swarm, dead: set[PeerId], step: float, most: float) -> float:
    """How long after now the last of `dead` is in nobody's table."""
    began = swarm.now
    while any(member.peer_id in dead for node in swarm.live() for member in node.table.live(swarm.now)):
        assert swarm.now - began < most, "the dead are not forgotten"
        swarm.run(step)
    return swarm.now - began
