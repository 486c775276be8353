"""Swarms of simulated nodes that only gossip, and what is measured of them."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import trio

from nolocod.observe.events import PartitionHealed
from nolocod.p2p.membership import heartbeat
from nolocod.p2p.timing import Timing
from nolocod.proto.types import Standing
from nolocod.studies.sim.member import SimMember, World
from nolocod.studies.sim.scenarios import Plan, Scenario
from nolocod.studies.sim.signing import read_once

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event

CALM = replace(Timing(), eager=0.0)
"""Newcomers' first contacts are no part of the steady state, and most of the computing."""


class Patch(Protocol):
    """pytest's monkeypatch, or what does its work."""

    def setattr(self, target: object, name: str, value: object, /) -> None: ...


class Checks:
    """The product's reader of heartbeats, which checks one signature each; each is read once for the whole swarm, and
    counted each time."""

    def __init__(self, patch: Patch) -> None:
        self.count = 0
        readers = read_once()
        self._read = readers["read"]
        patch.setattr(heartbeat, "read", self.read)
        patch.setattr(heartbeat, "glance", readers["glance"])

    def read(self, raw: bytes, run_id: str) -> heartbeat.Heartbeat:
        self.count += 1
        found: heartbeat.Heartbeat = self._read(raw, run_id)
        return found


class Member(SimMember):
    """In round 5 for ever."""

    @property
    def standing(self) -> Standing:
        return Standing(5, 1_000_000, 3.5)

    def live(self) -> list[PeerId]:
        """Whom it knows."""
        return [member.peer_id for member in self.table.live(trio.current_time())]

    def draw(self) -> PeerId | None:
        """One of those that the table gives: their hours are drawn uniformly by a hash."""
        now = trio.current_time()
        suspected = self.table.suspected(now)
        live = [peer for peer in self.live() if peer not in suspected]
        return self._rng.choice(live) if live else None


class GossipSwarm(World):
    """`members` in the order in which they came; `healed`: what they told of partitions."""

    def __init__(self, nursery: trio.Nursery, timing: Timing, seed: int) -> None:
        super().__init__(Plan(seed=seed, cheap=False), Scenario(timing=timing), nursery)
        self.members: list[Member] = []
        self.healed: list[PartitionHealed] = []

    def told(self, member: SimMember, event: Event) -> None:
        if isinstance(event, PartitionHealed):
            self.healed.append(event)

    def add(self, count: int, bootstraps: Sequence[Member] = (), side: int = 0) -> list[Member]:
        """Members that join at once, through one of `bootstraps` or of those that came before them."""
        made: list[Member] = []
        for _ in range(count):
            number = len(self.members)
            port = self.network.add(self.signing.identity(number).peer_id)
            port.side = side
            member = Member(self, number, port)
            known = [*bootstraps] or made
            self.nursery.start_soon(self._live, member, self.rng.choice(known) if known else None)
            self.members.append(member)
            made.append(member)
        return made

    async def _live(self, member: Member, known: Member | None) -> None:
        await trio.sleep(self.rng.uniform(0.0, 0.1))
        await member.run(None if known is None else known.peer_id)

    def live(self) -> list[Member]:
        return [member for member in self.members if member.port.up]

    def in_degrees(self) -> Counter[PeerId]:
        """For each live member, in how many live members' tables it is."""
        live = self.live()
        degrees: Counter[PeerId] = Counter({member.peer_id: 0 for member in live})
        for member in live:
            degrees.update(peer for peer in member.live() if peer in degrees)
        return degrees

    async def drawn(self, rounds: int, every: float) -> Counter[PeerId]:
        """Whom the members drew in so many rounds."""
        drawn: Counter[PeerId] = Counter()
        for _ in range(rounds):
            await trio.sleep(every)
            drawn.update(partner for member in self.live() if (partner := member.draw()) is not None)
        return drawn

    async def seconds_until_gone(self, dead: Iterable[Member], step: float, most: float) -> float:
        """How long after now the last of `dead` is in nobody's table."""
        began, gone = trio.current_time(), {member.peer_id for member in dead}
        while any(gone.intersection(member.live()) for member in self.live()):
            assert trio.current_time() - began < most, "the dead are not forgotten"
            await trio.sleep(step)
        return trio.current_time() - began


@asynccontextmanager
async def gossip_swarm(timing: Timing | None = None, seed: int = 0) -> AsyncIterator[GossipSwarm]:
    async with trio.open_nursery() as nursery:
        yield GossipSwarm(nursery, timing or Timing(), seed)
        nursery.cancel_scope.cancel()


def chi_square(drawn: Counter[PeerId], members: Sequence[Member]) -> tuple[float, float]:
    """Of the hits against equal ones: the statistic, and about how many standard deviations of a normal one it is
    above the mean (Wilson and Hilferty, PNAS 17(12), 1931)."""
    expected, free = drawn.total() / len(members), len(members) - 1
    statistic = sum((drawn[member.peer_id] - expected) ** 2 / expected for member in members)
    spread = 2 / (9 * free)
    return statistic, ((statistic / free) ** (1 / 3) - (1 - spread)) / spread**0.5
