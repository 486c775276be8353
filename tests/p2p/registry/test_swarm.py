"""The registry among simulated nodes: the product's services and messages on modelled lines, with liars among them.

A run that nobody of them is in is announced to one node; all others hear of it from each other.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.identity import Identity, PeerId
from nolocod.p2p.registry.records import PER_MESSAGE, Registry
from nolocod.p2p.registry.service import RegistryService, Swarm, near, swap
from nolocod.p2p.transport.requests import Terms, answer
from nolocod.p2p.transport.stream import REGISTRY
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Member, Standing
from nolocod.run.announcements import Announcement, sign
from nolocod.run.manifest import RunId
from nolocod.studies.sim import clock
from nolocod.studies.sim.member import WALL
from nolocod.studies.sim.network import LineModel, Network
from tests.run.test_announcements import SAID

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nolocod.p2p.transport.stream import Stream

PER_MESSAGE_SENT = 475
"""Bytes that a message costs beside its content, at most (studies.sim.member)."""
KNOWN = 8
"""Members that a node asks: as few as `near` gives."""
TRAINED = RunId("cd" * 32)
OWNER = Identity.from_secret(bytes([200]) * 32)


def wall() -> float:
    return WALL + trio.current_time()


def identity(number: int) -> Identity:
    return Identity.from_secret((number + 1).to_bytes(32, "big"))


def announced(*hosts: PeerId, version: float = 0.0, name: str = "verse", by: Identity = OWNER) -> Announcement:
    addresses = tuple(f"/ip4/10.0.0.{n + 1}/tcp/4001/p2p/{peer}" for n, peer in enumerate(hosts))
    times = {"version": WALL + version, "expires": WALL + 86400}
    return sign(replace(SAID, name=name, addresses=addresses, **times), by)  # type: ignore[arg-type]  # as given


class Node:
    """Number `number` of a swarm; of the announced run if it is a `host`."""

    def __init__(self, network: Network, number: int, peers: Callable[[], Sequence[PeerId]], *, host: bool = False) -> None:
        self.identity = identity(number)
        self.peer_id = self.identity.peer_id
        self.port = network.add(self.peer_id)
        self.registry = Registry(SAID.run_id, OWNER.peer_id) if host else Registry(TRAINED, "somebody")
        dial = network.dial(self.port)

        async def visit(peer: PeerId, protocol: str, _: Sequence[str]) -> Stream:
            self.messages += 1
            return await dial(peer, protocol)

        self.messages = 0
        terms = Terms(self.identity, RunId(SAID.run_id) if host else TRAINED, 8.0)
        self.swarm = Swarm(terms, peers, visit, wall=wall)
        self.rng = random.Random(f"node {number}")
        self.service = RegistryService(self.registry, self.swarm, self.rng)

    async def handle(self, stream: Stream) -> None:
        self.messages += 1
        await self.service.handle(stream)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self.port.spawn = nursery.start_soon
            self.port.handlers[REGISTRY] = self.handle
            await self.service.run()

    @property
    def names(self) -> list[str]:
        return [said.name for said in self.registry.runs()]

    @property
    def sent(self) -> int:
        return self.port.sent + PER_MESSAGE_SENT * self.messages


class Liar(Node):
    """Tells `lies`, of its own number, to whoever asks and to whomever it asks, and nothing else."""

    lies: Callable[[Liar], list[bytes]] = staticmethod(lambda _: [])  # type: ignore[assignment]

    async def handle(self, stream: Stream) -> None:
        async def reply(_: pb.Body) -> pb.Body:
            lies = self.lies()
            return pb.Body(runs=pb.Runs(records=lies, own=lies[0] if lies else b""), run_id=TRAINED)

        await answer(stream, replace(self.swarm.terms, run_id=None), "runs_request", reply)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self.port.spawn = nursery.start_soon
            self.port.handlers[REGISTRY] = self.handle
            while self.lies():
                await trio.sleep(5.0 * self.rng.uniform(0.8, 1.2))
                nursery.start_soon(self._push, self.rng.choice(self.swarm.peers()))
            await trio.sleep_forever()

    async def _push(self, peer: PeerId) -> None:
        registry = Registry()
        registry.question = lambda _: pb.RunsRequest(records=self.lies())  # type: ignore[method-assign]
        await swap(self.swarm, registry, peer)


def withhold(_: Liar) -> list[bytes]:
    return []


def alter(liar: Liar) -> list[bytes]:
    raw = bytearray(announced(identity(0).peer_id).raw)
    raw[liar.rng.randrange(len(raw))] ^= 1
    return [bytes(raw)]


def replay(_: Liar) -> list[bytes]:
    return [announced(identity(0).peer_id, version=-3600.0, name="of yesterday").raw]


def usurp(liar: Liar) -> list[bytes]:
    return [announced(identity(0).peer_id, version=-60.0, name="usurped", by=liar.identity).raw]


def invent(liar: Liar) -> list[bytes]:
    """Runs that nobody is in, each message other ones."""
    found = []
    for _ in range(PER_MESSAGE):
        number = liar.rng.randrange(10**6, 10**9)
        said = announced(identity(number).peer_id, name=f"invented {number}", by=identity(number))
        found.append(said.raw)
    return found


class World:
    def __init__(self, count: int, lies: Callable[[Liar], list[bytes]] | None, seed: int = 0) -> None:
        """`count` nodes beside two hosts of the announced run; of them 30 % liars, if there are `lies`."""
        rng = random.Random(seed)
        network = Network(LineModel(latency=0.05), random.Random(f"{seed} network"))
        self.hosts = [Node(network, number, list, host=True) for number in range(2)]
        self.said = announced(*(host.peer_id for host in self.hosts))
        bad = set(rng.sample(range(1, count), count * 3 // 10)) if lies else set()
        everybody = [identity(2 + number).peer_id for number in range(count)]
        self.honest: list[Node] = []
        self.all: list[Node] = [*self.hosts]
        for number in range(count):
            peers = rng.sample(everybody, KNOWN)
            kind = Liar if number in bad else Node
            node = kind(network, 2 + number, lambda peers=peers: peers)  # type: ignore[misc]  # bound now
            if isinstance(node, Liar):
                node.lies = lies.__get__(node)  # type: ignore[union-attr]
            else:
                self.honest.append(node)
            self.all.append(node)

    async def announce(self) -> None:
        """The owner tells its hosts, and one node of the others."""
        for host in self.hosts:
            host.registry.hear(self.said.raw, host.peer_id, trio.current_time(), wall())
        await swap(self.hosts[0].swarm, self.hosts[0].registry, self.honest[0].peer_id)

    async def spread(self, most: float) -> float:
        """Seconds until all honest nodes hold what was announced."""
        began = trio.current_time()
        while not all("verse" in node.names for node in self.honest):
            assert trio.current_time() - began < most, sum("verse" in node.names for node in self.honest)
            await trio.sleep(1.0)
        return trio.current_time() - began


def test_an_announcement_reaches_200_nodes_in_a_minute_for_less_than_a_kilobyte_a_second() -> None:
    async def main() -> tuple[float, float]:
        world = World(200, None)
        async with trio.open_nursery() as nursery:
            for node in world.all:
                nursery.start_soon(node.run)
            await trio.sleep(30.0)
            await world.announce()
            seconds = await world.spread(60.0)
            await trio.sleep(60.0 - seconds)
            cost = max(node.sent for node in world.honest) / 90.0
            nursery.cancel_scope.cancel()
        return seconds, cost

    seconds, cost = clock.run(main, seed=0)
    assert seconds <= 60.0
    assert cost <= 1000.0, "bytes a second of the node that sends most"


@pytest.mark.parametrize("lies", [withhold, alter, replay, usurp, invent], ids=lambda lies: lies.__name__)
def test_a_third_of_liars_changes_nothing(lies: Callable[[Liar], list[bytes]]) -> None:
    async def main() -> None:
        world = World(80, lies)
        async with trio.open_nursery() as nursery:
            for node in world.all:
                nursery.start_soon(node.run)
            await trio.sleep(30.0)
            await world.announce()
            await world.spread(60.0)
            await trio.sleep(30.0)
            assert [node.registry.runs() for node in world.honest] == [[world.said]] * len(world.honest)
            assert max(node.sent for node in world.honest) / 120.0 <= 2000.0
            for node in world.all:
                if isinstance(node, Liar):
                    node.lies = list  # type: ignore[assignment]  # no more of it
            await trio.sleep(60.0)
            assert not any(node.registry._pending for node in world.honest), "what was looked into is forgotten"
            nursery.cancel_scope.cancel()

    clock.run(main, seed=0)


def test_connected_members_are_asked_where_there_are_enough() -> None:
    standing = Standing(0, 0, 0.0)
    members = [Member(PeerId(f"{n}"), standing, "training", (), "", 0.0, "direct" if n < 8 else None) for n in range(20)]
    assert near(members) == [f"{n}" for n in range(8)]
    assert len(near(members[1:])) == 19


def test_the_nodes_of_announced_runs_keep_one_registry() -> None:
    """A node asks those of other runs too, so that who was told in one run is found through a node of any."""

    async def main() -> tuple[list[str], list[str]]:
        network = Network(LineModel(latency=0.05), random.Random(0))
        ours, theirs = Node(network, 0, list), Node(network, 1, list, host=True)
        ours.registry.owner = ours.peer_id
        mine = announced(ours.peer_id, name="ours", by=ours.identity)
        mine = sign(replace(mine, run_id=TRAINED), ours.identity)
        ours.registry.hear(mine.raw, ours.peer_id, 0.0, wall())
        theirs.registry.hear(announced(theirs.peer_id).raw, theirs.peer_id, 0.0, wall())
        async with trio.open_nursery() as nursery:
            for node in (ours, theirs):
                nursery.start_soon(node.run)
            await trio.lowlevel.checkpoint()
            await swap(theirs.swarm, theirs.registry, ours.peer_id)  # its owner tells us once
            await trio.sleep(120.0)
            nursery.cancel_scope.cancel()
        return sorted(ours.names), sorted(theirs.names)

    assert clock.run(main, seed=0) == (["ours", "verse"], ["ours", "verse"])
