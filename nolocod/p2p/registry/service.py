"""How announcements travel: every few seconds a node asks a member for what it does not hold, and tells what is new.

The rule: what is told is looked into before it is told on, and each look takes seconds at most: the node at one of its
addresses is asked what it says of its own run. Who tells what is not valid is judged like one that passes on false heartbeats.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RemoteError
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.registry.records import read
from nolocod.p2p.transport.multiaddrs import split
from nolocod.p2p.transport.requests import Terms, answer, ask
from nolocod.p2p.transport.stream import REGISTRY
from nolocod.proto import nolocod_pb2 as pb
from nolocod.run import announcements

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.registry.records import Registry
    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.types import Member
    from nolocod.run.announcements import Announcement

EVERY = 5.0
"""Seconds between two questions of a node."""
_ABROAD = 0.05
"""Share of the questions that go to nodes of other runs."""
_ENOUGH = 8
"""Connected members: news still reach everybody in a random graph of that degree."""
_LOOKS = 4
"""Announcements that are looked into at once."""
_LOOK_SECONDS = 8.0
_MOST_PAGES = 32
"""Answers of one peer that a newcomer asks for."""


@dataclass
class Swarm:
    """What the registry asks of its node's mesh."""

    terms: Terms
    peers: Callable[[], Sequence[PeerId]]
    """Live members."""
    visit: Callable[[PeerId, str, Sequence[str]], Awaitable[Stream]]
    """Open a stream to anybody, at these addresses beside those that are known."""
    group: Callable[[PeerId], str] = lambda peer: peer
    """The address group from which a peer is connected."""
    judge: Callable[[PeerId, Conduct], None] = lambda _, __: None
    wall: Callable[[], float] = time.time


def near(members: Sequence[Member]) -> list[PeerId]:
    """Whom a node asks: those that are connected, where there are enough; a new connection costs more than an answer."""
    connected = [one.peer_id for one in members if one.reach]
    return connected if len(connected) >= _ENOUGH else [one.peer_id for one in members]


async def swap(swarm: Swarm, registry: Registry, peer: PeerId, addresses: Sequence[str] = ()) -> tuple[list[bytes], bytes]:
    """Tell `peer` what is new, and ask for what it has beside that: its records, and its own run's. Raises RemoteError."""
    stream = await swarm.visit(peer, REGISTRY, addresses)
    question = pb.Body(runs_request=registry.question(trio.current_time()))
    told = (await ask(stream, question, replace(swarm.terms, run_id=None), "runs")).runs
    return list(told.records), told.own


async def everything(swarm: Swarm, registry: Registry, peer: PeerId, addresses: Sequence[str]) -> None:
    """For a newcomer that wants to list runs: all that `peer` holds, as it says. Raises RemoteError."""
    for _ in range(_MOST_PAGES):
        records, own = await swap(swarm, registry, peer, addresses)
        before = len(registry.digests)
        for raw in [*records, *([own] if own else [])]:
            if (said := read(raw)).lasts(swarm.wall()):
                registry.confirmed(said, "", trio.current_time())
        if len(registry.digests) == before:
            return


class RegistryService:
    """Keeps `registry` the same as others'; `own` gives what the owner left for this node to announce, empty if nothing."""

    def __init__(self, registry: Registry, swarm: Swarm, rng: random.Random, own: Callable[[], bytes] = lambda: b"") -> None:
        self._registry = registry
        self._swarm = swarm
        self._rng = rng
        self._own = own
        self._looking = trio.CapacityLimiter(_LOOKS)
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Ask and tell until cancelled."""
        async with trio.open_nursery() as self._nursery:
            while True:
                await trio.sleep(EVERY * self._rng.uniform(0.8, 1.2))
                self._registry.expire(self._swarm.wall())
                if raw := self._own():
                    self._learn([raw], self._swarm.terms.identity.peer_id)
                self._nursery.start_soon(self._ask, *self._whom())

    def _whom(self) -> tuple[PeerId | None, tuple[str, ...]]:
        """A member; now and then a node of another run, so that all runs keep one registry."""
        peers = self._swarm.peers()
        others = [said for said in self._registry.runs() if said.run_id != self._swarm.terms.run_id]
        if others and (not peers or self._rng.random() < _ABROAD):
            peer, address = split(self._rng.choice(self._rng.choice(others).addresses))
            return peer, (address,)
        return (self._rng.choice(peers) if peers else None), ()

    async def _ask(self, peer: PeerId | None, addresses: Sequence[str]) -> None:
        try:
            if peer is not None:
                records, _ = await swap(self._swarm, self._registry, peer, addresses)
                self._learn(records, peer)
        except RemoteError:
            return  # an older release, or gone: there are others

    async def handle(self, stream: Stream) -> None:
        """Answer a REGISTRY stream; whoever asks may be in any run, or in none."""

        async def reply(body: pb.Body) -> pb.Body:
            request = body.runs_request
            self._learn(request.records, stream.remote)
            known = {*request.digests, *map(announcements.digest, request.records)}
            return pb.Body(runs=self._registry.answer(known), run_id=self._swarm.terms.run_id or "")

        await answer(stream, replace(self._swarm.terms, run_id=None), "runs_request", reply)

    def _learn(self, records: Sequence[bytes], carrier: PeerId) -> None:
        if self._nursery is None:
            return  # nobody could look into it yet; it will be told again
        found, faults = self._registry.learn(records, carrier, trio.current_time(), self._swarm.wall())
        if faults:
            self._swarm.judge(carrier, Conduct.FALSE_NEWS)
        for said in found:
            self._nursery.start_soon(self._look, said)

    async def _look(self, said: Announcement) -> None:
        """Ask a node of the announced run what it says of it."""
        try:
            peer, address = split(self._rng.choice(said.addresses))
            async with self._looking:
                with trio.fail_after(_LOOK_SECONDS):
                    _, own = await swap(self._swarm, self._registry, peer, (address,))
            there = read(own) if own else None
        except (RemoteError, trio.TooSlowError):
            there = None
        if there is None or there.key != said.key:
            self._registry.failed(said, trio.current_time())
        else:
            latest = max(there, said, key=lambda one: one.version)
            self._registry.confirmed(latest, self._swarm.group(peer), trio.current_time())
