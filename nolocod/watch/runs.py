"""The runs that are announced, for somebody who is in none yet: asked of any nodes, with what each run's own nodes say now."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import trio

from nolocod.errors import NoBootstrapError, NolocodError, RemoteError
from nolocod.identity import Identity
from nolocod.p2p.discovery.bootstrap import verdict
from nolocod.p2p.membership import heartbeat
from nolocod.p2p.registry.records import Registry
from nolocod.p2p.registry.service import Swarm, everything, swap
from nolocod.p2p.transport.multiaddrs import split
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.p2p.transport.stream import GOSSIP
from nolocod.proto import nolocod_pb2 as pb
from nolocod.trainer import memory
from nolocod.watch.observer import TIMING, open_seeker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.discovery.bootstrap import Contact
    from nolocod.run.announcements import Announcement
    from nolocod.watch.observer import Seeker

T = TypeVar("T")

_SECONDS = 15.0
_LIVE_SECONDS = 6.0


@dataclass(frozen=True)
class Found:
    """One announced run. `nodes`: members that its node named, of some more; None if it did not answer, or only members."""

    said: Announcement
    nodes: int | None = None
    round: int = 0
    loss: float | None = None
    releases: tuple[str, ...] = ()
    """Of those members, in order."""


async def as_stranger(addresses: Sequence[str], work: Callable[[Seeker], Awaitable[T]], prologue: bytes | None = None) -> T:
    """What `work` gives to somebody with an identity of this moment, who knows nodes at these addresses. `prologue`: of a
    private network's key."""
    bootstrap = [(peer, (address,)) for peer, address in map(split, addresses)]
    failed: NolocodError | None = None
    async with open_seeker(Identity.generate(), bootstrap, prologue, lambda _: None) as seeker:
        try:
            return await work(seeker)
        except NolocodError as error:
            failed = error  # on its own, not in a group for each nursery around it
    raise failed


async def find_runs(seeker: Seeker) -> list[Found]:
    """All runs that the bootstraps know, those with most nodes first. NoBootstrapError with each address's cause if none
    answers."""
    registry, swarm = Registry(), _swarm(seeker)
    causes: dict[PeerId, RemoteError] = {}

    async def fetch(contact: Contact) -> None:
        try:
            await everything(swarm, registry, *contact)
        except RemoteError as error:
            causes[contact[0]] = error

    with trio.move_on_after(_SECONDS):
        async with trio.open_nursery() as nursery:
            for contact in seeker.bootstrap:
                nursery.start_soon(fetch, contact)
    if len(causes) == len(dict(seeker.bootstrap)) and not registry.runs():
        raise NoBootstrapError(verdict(seeker.bootstrap, {**causes}).cause)
    found = {said.key: Found(said) for said in registry.runs()}

    async def look(said: Announcement) -> None:
        with suppress(RemoteError):
            found[said.key] = await live(seeker, said)

    with trio.move_on_after(_LIVE_SECONDS):
        async with trio.open_nursery() as nursery:
            for said in registry.runs():
                nursery.start_soon(look, said)
    return sorted(found.values(), key=lambda one: (-(one.nodes or 0), one.said.name))


async def tell(seeker: Seeker, said: Announcement) -> dict[PeerId, RemoteError]:
    """Tell all bootstraps of an announcement; why those did not take the question that did not."""
    registry = Registry()
    causes: dict[PeerId, RemoteError] = {}
    registry.confirmed(said, "", trio.current_time())

    async def push(contact: Contact) -> None:
        try:
            await swap(_swarm(seeker), registry, *contact)
        except RemoteError as error:
            causes[contact[0]] = error

    async with trio.open_nursery() as nursery:
        for contact in seeker.bootstrap:
            nursery.start_soon(push, contact)
    return causes


def fits(said: Announcement) -> bool:
    """Whether this machine has the memory that a node of the run needs, on its device or without one."""
    return said.memory <= memory.total()


def _swarm(seeker: Seeker) -> Swarm:
    return Swarm(Terms(seeker.identity, None, TIMING.request), list, seeker.host.open_stream, wall=time.time)


async def live(seeker: Seeker, said: Announcement) -> Found:
    """What the first of the run's nodes that answers knows of its members."""
    for address in said.addresses:
        peer, where = split(address)
        with suppress(RemoteError):
            stream = await seeker.host.open_stream(peer, GOSSIP, (where,))
            terms = Terms(seeker.identity, said.run_id, TIMING.request)
            body = await ask(stream, pb.Body(gossip=pb.Gossip(answer=True)), terms, "gossip")
            members: dict[PeerId, heartbeat.Heartbeat] = {}
            for raw in body.gossip.heartbeats:
                with suppress(RemoteError):
                    one = heartbeat.read(raw, said.run_id)
                    members[one.peer] = one
            releases = tuple(sorted(one.version for one in members.values()))
            training = [one.standing for one in members.values() if one.state == "training"]
            if not training:
                return Found(said, len(members), releases=releases)
            rounds, losses = zip(*((one.round, one.loss) for one in training), strict=True)
            return Found(said, len(members), statistics.median_low(rounds), statistics.median_low(losses), releases)
    return Found(said)
