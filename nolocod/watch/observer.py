"""How an observer knows the members: it asks one after another for what gossip tells, and tells nothing itself.

The rule: to the members an observer is a stranger with a question. It sends no heartbeat, so that it is no member, nobody's
partner and nobody's clock; where the run is by invitation it sends one in the state "watching", which shows by what right it
asks and makes no member either. It asks one member at a time, each again only after it had asked the others, and keeps a few
connections. What comes is checked and bounded as a node does it (`Gossip`, `Membership`, `RecentReceipts`).
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RemoteError
from nolocod.p2p.discovery.bootstrap import find_run
from nolocod.p2p.exchange.contributions import AWAY, Tally
from nolocod.p2p.exchange.receipt_gossip import fetch
from nolocod.p2p.exchange.recent_receipts import RecentReceipts
from nolocod.p2p.host import HostLimits, open_host
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.membership.admission import Admission, InvitedAdmission
from nolocod.p2p.membership.amended import AmendedRun
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import WATCHING, OwnHeartbeat
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.nat.circuit_relay import RelayClient
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.p2p.transport.stream import GOSSIP, RECEIPTS
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from nolocod.units import Address

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Sequence

    from nolocod.identity import Identity, PeerId
    from nolocod.observe.events import Contribution, Emit
    from nolocod.p2p.discovery.bootstrap import Contact
    from nolocod.p2p.exchange.contributions import Point
    from nolocod.p2p.host import Host
    from nolocod.p2p.settings import MeshSettings
    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.types import Member
    from nolocod.run.manifest import RunId, Sealed

TIMING = replace(Timing(), capacity=2048)
_SLOWEST, _QUICKEST = 3.0, 0.25
"""Seconds between two questions in a small run and in a large one."""
_ROUND = 20.0
"""Seconds in which as many heartbeats come as there are members, where `_QUICKEST` allows it."""
_RECEIPTS_EVERY = 2.0
_BOOTSTRAPS_EVERY = 30.0
_KEPT = 16
"""Connections that are kept."""
PAIRS = 512
"""Of which the last exchange is kept."""
_LIMITS = HostLimits(connections=64)
_LISTEN = Address("127.0.0.1", 0)
"""A host must listen somewhere; nobody is told of it."""


@dataclass(frozen=True)
class Seeker:
    """Somebody on the network who is no member yet: enough to find a run."""

    host: Host
    identity: Identity
    bootstrap: Sequence[Contact]
    emit: Emit

    async def find(self, run_id: RunId) -> Sealed:
        """The run, of which `run_id` may be the beginning of the id, or empty for any. Raises what `find_run` raises."""
        terms = Terms(self.identity, run_id, TIMING.request)
        return await find_run(self.host, self.bootstrap, terms, TIMING.bootstrap, self.emit)


@asynccontextmanager
async def open_seeker(
    identity: Identity, bootstrap: Sequence[Contact], prologue: bytes | None, emit: Emit
) -> AsyncIterator[Seeker]:
    """Be on the network, through relays too. `prologue`: of a private network's key."""
    gater = ConnectionGater(prologue)
    async with open_host(identity, (_LISTEN,), (), emit, _LIMITS, None, gater) as host:
        host.vouch(address for _, (address,) in bootstrap)
        host.through = RelayClient(host).connect
        yield Seeker(host, identity, bootstrap, emit)


class Observer:
    """Of the run `sealed`; `settings` has the data directory where an invitation was kept.

    Raises what InvitedAdmission raises if the run is by invitation and this observer has none.
    """

    def __init__(self, seeker: Seeker, sealed: Sealed, settings: MeshSettings, rng: random.Random) -> None:
        self._seeker = seeker
        invited = sealed.manifest.access == "invited"
        own = seeker.identity.peer_id
        self._admission = InvitedAdmission(sealed, own, settings.paths) if invited else Admission()
        self._table = Membership(own, sealed.run_id, TIMING, self._admission)
        nothing = Standing(0, 0, 0.0)
        shown = self._admission.shown
        self._heartbeat = OwnHeartbeat(seeker.identity, sealed.run_id, lambda: (nothing, WATCHING), tuple, admission=shown)
        self.amended = AmendedRun(sealed, None, lambda: 0, seeker.emit)
        self._gossip = Gossip(self._table, self._heartbeat, rng, self.amended)
        self._terms = Terms(seeker.identity, sealed.run_id, TIMING.request)
        self._rng = rng
        self._receipts = RecentReceipts(sealed.run_id)
        self._receipts_at = 0.0
        self._tally = Tally()
        self._late: dict[frozenset[PeerId], tuple[Point, ...]] = {}
        self._asked: dict[PeerId, float] = {}
        self._kept: deque[PeerId] = deque()
        self.answered = trio.Event()
        """Set once somebody has answered."""

    def live(self) -> list[Member]:
        """All live members."""
        return self._table.live(trio.current_time(), self._seeker.host.peers())

    async def dial(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to a member. Raises what `Host.open_stream` raises."""
        return await self._seeker.host.open_stream(peer, protocol, self._table.addresses(peer))

    def contributions(self) -> list[Contribution]:
        """What each member gave while it was watched."""
        return self._tally.seen_among(self.live())

    def exchanges(self) -> list[tuple[PeerId, PeerId, float]]:
        """The last one of each pair, of the last hour: who offered, to whom, and how many seconds ago; newest first."""
        wall = time.time()
        self._late = {pair: one for pair, one in self._late.items() if one[0].time > wall - AWAY}
        found = ((one.peer, other.peer, max(0.0, wall - one.time)) for one, other in self._late.values())
        return sorted(found, key=lambda one: one[2])

    async def run(self) -> None:
        """Ask until cancelled; it may be run again."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_bootstraps)
            nursery.start_soon(self._admission.run, self._seeker.emit)
            while True:
                self._gossip.beat(trio.current_time())  # a question is a beat of ours: so many heartbeats are listened to
                if (peer := self._next()) is not None:
                    await self._ask(peer, ())
                await trio.sleep(self._pause())

    def _pause(self) -> float:
        heard = TIMING.view + 1
        return max(_QUICKEST, min(_SLOWEST, _ROUND * heard / max(len(self._table), 1)))

    def _next(self) -> PeerId | None:
        """The member that was asked longest ago, or never; None if there is nobody to ask now."""
        now = trio.current_time()
        doubted = self._table.suspected(now)
        free = [one for one in self._table.sample(self._rng, len(self._table), now) if one not in doubted]
        self._asked = {peer: when for peer, when in self._asked.items() if peer in self._table}
        due = min(free, key=lambda one: self._asked.get(one, 0.0), default=None)
        return None if due is None or now - self._asked.get(due, -_SLOWEST) < _SLOWEST else due

    async def _ask_bootstraps(self) -> None:
        """Now and then: they are where a run that fell apart meets again."""
        while True:
            async with trio.open_nursery() as nursery:
                for peer, addresses in self._seeker.bootstrap:
                    nursery.start_soon(self._ask, peer, addresses)
            await trio.sleep(_BOOTSTRAPS_EVERY if self._table else _SLOWEST)

    async def _ask(self, peer: PeerId, addresses: Sequence[str]) -> None:
        host, table = self._seeker.host, self._table
        self._asked[peer] = trio.current_time()
        try:
            stream = await host.open_stream(peer, GOSSIP, (*addresses, *table.addresses(peer)))
            shown = [self._heartbeat.heartbeat()] if self._admission.shown else []
            body = await ask(stream, pb.Body(gossip=pb.Gossip(heartbeats=shown, answer=True)), self._terms, "gossip")
            self._gossip.learn(peer, body.gossip, trio.current_time())
        except RemoteError:
            table.suspect(peer, trio.current_time())
            return
        table.met(peer, *host.way(peer))
        self.answered.set()
        await self._keep(peer)
        with suppress(RemoteError):  # an older release, or it has gone
            await self._fetch_receipts(peer)

    async def _fetch_receipts(self, peer: PeerId) -> None:
        """Now and then: what this member knows of exchanges of all."""
        if (now := trio.current_time()) - self._receipts_at < _RECEIPTS_EVERY:
            return
        self._receipts_at = now
        told = await fetch(await self._seeker.host.open_stream(peer, RECEIPTS, ()), self._receipts, self._terms)
        members = {one.peer_id for one in self.live()}
        self._receipts.expire(time.time())
        news, _ = self._receipts.learn(told, members, time.time())
        self._tally.add_all(one.sides for one in news)
        for one in news:
            self._note(one.sides)

    def _note(self, sides: tuple[Point, ...]) -> None:
        """Receipts that are passed on are the newest of each member; for the page those of a while are kept."""
        pair = frozenset(side.peer for side in sides)
        if pair not in self._late or self._late[pair][0].time < sides[0].time:
            self._late.pop(pair, None)  # those that were heard of last come last
            self._late[pair] = sides
        while len(self._late) > PAIRS:
            del self._late[next(iter(self._late))]

    async def _keep(self, peer: PeerId) -> None:
        with suppress(ValueError):
            self._kept.remove(peer)
        self._kept.append(peer)
        if len(self._kept) > _KEPT:
            await self._seeker.host.disconnect(self._kept.popleft())
