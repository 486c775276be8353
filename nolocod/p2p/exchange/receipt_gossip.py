"""How receipts travel: now and then a node asks a member for those that it does not hold, and counts what is news.

The rule: only whoever is asked tells something, so nobody is listened to more than this node asks. Who tells what is not valid
is judged like one that passes on false heartbeats.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.errors import LocalError, ProtocolError, RemoteError
from nolocod.observe.events import Contributed, Troubled
from nolocod.p2p.exchange.context import in_a_thread
from nolocod.p2p.exchange.contributions import SKEW, Point, Tally, points
from nolocod.p2p.exchange.recent_receipts import RecentReceipts
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.transport.requests import Terms, answer, ask
from nolocod.p2p.transport.stream import RECEIPTS
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.receipt import read_line

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.exchange.context import Aside
    from nolocod.p2p.exchange.receipts import ReceiptStore
    from nolocod.p2p.transport.stream import Dial, Stream
    from nolocod.proto.receipt import Receipt
    from nolocod.proto.types import Member

EVERY, _QUICKEST, _PER_MEMBER = 20.0, 5.0, 0.4
"""Seconds between two questions of a node: at most, at least, and for each member that there is."""
KEPT_EVERY = 900.0
"""Seconds between two receipts that a node keeps for good."""
_SHOWN = 32
"""Nodes of whose contributions this node tells its owner, beside its own."""


@dataclass
class Swarm:
    """What the gossip asks of its node's mesh."""

    terms: Terms
    members: Callable[[], Sequence[Member]]
    """All live ones but ourselves."""
    near: Callable[[Sequence[Member]], Sequence[PeerId]]
    """Whom of them to ask."""
    dial: Dial
    judge: Callable[[PeerId, Conduct], None] = lambda _, __: None
    wall: Callable[[], float] = time.time


@dataclass
class OwnReceipts:
    """Of this node: `store` has them all for some days, `kept` one of each quarter of an hour for years."""

    store: ReceiptStore
    kept: ReceiptStore
    aside: Aside = in_a_thread


async def fetch(stream: Stream, recent: RecentReceipts, terms: Terms) -> pb.Receipts:
    """Ask whoever is at the other end for what `recent` lacks. Raises RemoteError."""
    return (await ask(stream, pb.Body(receipts_request=recent.question()), terms, "receipts")).receipts


class ReceiptGossip:
    """Keeps `recent` like others'. `run` does the work, and tells what was counted."""

    def __init__(self, swarm: Swarm, own: OwnReceipts, rng: random.Random, emit: Emit) -> None:
        self.recent = RecentReceipts(swarm.terms.run_id or "")
        self.tally = Tally(swarm.terms.identity.peer_id)
        self._swarm = swarm
        self._own = own
        self._rng = rng
        self._emit = emit
        self._kept_at = 0.0

    async def run(self) -> None:
        """Ask, and tell, until cancelled."""
        try:
            await self._remember()
        except LocalError as error:
            self._emit(Troubled(error.code, error.cause))
        while True:
            self.tell()
            await trio.sleep(self._pause() * self._rng.uniform(0.8, 1.2))
            self.recent.expire(self._swarm.wall())
            for receipt in self._own.store.fresh():
                await self._add(receipt)
            if peers := self._swarm.near(self._swarm.members()):
                await self._ask(self._rng.choice(peers))

    def _pause(self) -> float:
        return max(_QUICKEST, min(EVERY, _PER_MEMBER * len(self._swarm.members())))

    def tell(self) -> None:
        """What every node gave, as far as we know."""
        own = self._swarm.terms.identity.peer_id
        found = self.tally.seen_among(self._swarm.members())
        ours = next((one for one in found if one.peer_id == own), None)
        self._emit(Contributed(ours, tuple(one for one in found[:_SHOWN] if one.tokens)))

    async def _remember(self) -> None:
        """Count what is on our disk, which we checked when it came."""
        own = self._own
        latest = self._swarm.wall() + SKEW

        def read() -> float:
            kept, late = ([*self._of_disk(one, latest)] for one in (own.kept, own.store))
            self.tally.add_all([*kept, *late])
            return max((side.time for sides in kept for side in sides), default=0.0)

        self._kept_at = await own.aside(read)

    @staticmethod
    def _of_disk(store: ReceiptStore, latest: float) -> Iterator[tuple[Point, ...]]:
        """Their sides, without what a fault of the disk has made something else."""
        for receipt in store.all(read_line):
            with suppress(ProtocolError):
                if _before(latest, sides := points(receipt)):
                    yield sides

    async def _add(self, receipt: Receipt) -> None:
        """One of our own exchanges was committed."""
        sides = points(receipt)
        if not _before(self._swarm.wall() + SKEW, sides):
            return  # of a time when a clock was wrong: it would hide all that follows
        self.tally.add(sides)
        self.recent.keep(receipt, len(self._swarm.members()))
        if not sides or sides[0].time - self._kept_at < KEPT_EVERY:
            return
        try:
            await self._own.aside(self._own.kept.add, receipt)
            self._kept_at = sides[0].time
        except LocalError as error:
            self._emit(Troubled(error.code, error.cause))

    async def _ask(self, peer: PeerId) -> None:
        swarm = self._swarm
        try:
            told = await fetch(await swarm.dial(peer, RECEIPTS), self.recent, swarm.terms)
            members = {swarm.terms.identity.peer_id, *(one.peer_id for one in swarm.members())}
            news, faults = self.recent.learn(told, members, swarm.wall())
        except RemoteError:
            return  # an older release, or gone: there are others
        self.tally.add_all(one.sides for one in news)
        if faults:
            swarm.judge(peer, Conduct.FALSE_NEWS)

    async def handle(self, stream: Stream) -> None:
        """Answer a RECEIPTS stream."""

        async def reply(body: pb.Body) -> pb.Body:
            return pb.Body(receipts=self.recent.answer(body.receipts_request, self._rng))

        await answer(stream, self._swarm.terms, "receipts_request", reply)


def _before(time: float, sides: Sequence[Point]) -> bool:
    return all(side.time <= time for side in sides)
