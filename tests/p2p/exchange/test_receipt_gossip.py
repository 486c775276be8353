"""Receipts among simulated nodes: the product's gossip, beside its registry, on modelled lines, with liars among them.

Exchanges are given: each period pairs sign a receipt, as the product's exchange does, and the gossip takes it from there.
"""

from __future__ import annotations

import random
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.disk import make_folder
from nolocod.errors import SignatureError
from nolocod.observe.events import Contributed, Event, Troubled
from nolocod.p2p.exchange import receipt_gossip as module
from nolocod.p2p.exchange import recent_receipts
from nolocod.p2p.exchange.contributions import points
from nolocod.p2p.exchange.receipt_gossip import EVERY, KEPT_EVERY, OwnReceipts, ReceiptGossip, Swarm
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.transport.requests import Terms, answer
from nolocod.p2p.transport.stream import RECEIPTS
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto import receipt as receipts
from nolocod.proto.types import Member, Standing
from nolocod.run.manifest import RunId
from nolocod.studies.sim import clock
from nolocod.studies.sim.network import LineModel, Network
from tests.p2p.registry.test_swarm import TRAINED, Node, identity, wall
from tests.support.receipts import exchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.receipt import Receipt

KNOWN = 8
MINUTE = 60.0
PERIOD = 90.0
"""Seconds between two exchanges of a node; of twenty members all are passed on then."""


@pytest.fixture(autouse=True)
def checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of nodes in one process check the same signatures: once is enough."""

    once = receipts.check_signature

    @lru_cache(maxsize=1 << 16)
    def fits(*what: bytes) -> bool:
        try:
            once(*what)  # type: ignore[arg-type]  # as given
        except SignatureError:
            return False
        return True

    def check(*what: bytes) -> None:
        if not fits(*what):
            raise SignatureError("it does not fit.")

    monkeypatch.setattr(receipts, "check_signature", check)


class Store:
    """p2p.exchange.receipts.ReceiptStore in memory."""

    def __init__(self) -> None:
        self.added: deque[Receipt] = deque()

    def fresh(self) -> list[Receipt]:
        return [self.added.popleft() for _ in range(len(self.added))]

    def all(self, _: object) -> list[Receipt]:
        return []

    def add(self, receipt: Receipt) -> None: ...


async def at_once(work: Callable[..., object], *arguments: object) -> object:
    return work(*arguments)


class Trainer(Node):
    """A node of the registry's swarm that trains `rate` tokens a second, and gossips receipts too."""

    def __init__(self, network: Network, number: int, peers: Callable[[], Sequence[PeerId]], everybody: list[PeerId]) -> None:
        super().__init__(network, number, peers)
        self.rate = 100.0 * (1 + number % 3)
        self.store, self.asked = Store(), 0
        standing = Standing(0, 0, 0.0)
        members = [Member(peer, standing, "training", (), "", 0.0, None) for peer in everybody if peer != self.peer_id]
        dial = network.dial(self.port)

        async def counted(peer: PeerId, protocol: str) -> Stream:
            self.messages += 1
            return await dial(peer, protocol)

        own = OwnReceipts(self.store, self.store, at_once)  # type: ignore[arg-type]  # stand-ins
        terms = Terms(self.identity, TRAINED, 8.0)
        swarm = Swarm(terms, lambda: members, lambda _: peers(), counted, wall=wall)
        self.gossip = ReceiptGossip(swarm, own, self.rng, lambda _: None)

    async def answer_receipts(self, stream: Stream) -> None:
        self.messages += 1
        await self.gossip.handle(stream)

    registers = True
    """Whether it keeps the registry too."""

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self.port.spawn = nursery.start_soon
            self.port.handlers[RECEIPTS] = self.answer_receipts
            if self.registers:
                nursery.start_soon(super().run)
            await trio.sleep(self.rng.uniform(0.0, EVERY))
            await self.gossip.run()

    def claims(self, _: float) -> float:
        """Tokens a second that it tells to its partners."""
        return self.rate

    def given(self) -> dict[PeerId, float]:
        return {one.peer_id: one.tokens for one in self.gossip.tally.contributions()}


class Liar(Trainer):
    """Answers what `lies` says, in place of what it holds."""

    lies: Callable[[Liar], list[bytes]] = staticmethod(lambda _: [])  # type: ignore[assignment]
    told = 1.0
    """Of its rate."""

    def claims(self, _: float) -> float:
        return self.rate * self.told

    async def answer_receipts(self, stream: Stream) -> None:
        async def reply(_: pb.Body) -> pb.Body:
            return pb.Body(receipts=pb.Receipts(receipts=self.lies()), run_id=TRAINED)

        await answer(stream, self.gossip._swarm.terms, "receipts_request", reply)


def withhold(_: Liar) -> list[bytes]:
    return []


def alter(liar: Liar) -> list[bytes]:
    """Honest receipts with a byte changed."""
    found = []
    for raw in liar.gossip.recent.answer(pb.ReceiptsRequest(), liar.rng).receipts:
        changed = bytearray(raw)
        changed[liar.rng.randrange(len(raw))] ^= 1
        found.append(bytes(changed))
    return found


def replay(liar: Liar) -> list[bytes]:
    """The oldest that it knows."""
    liar.__dict__.setdefault("oldest", liar.gossip.recent.answer(pb.ReceiptsRequest(), liar.rng).receipts)
    return list(liar.__dict__["oldest"])


def invent(liar: Liar) -> list[bytes]:
    """Exchanges of liars among each other that never were, of more tokens than there are."""
    time = max(60.0, trio.current_time() + liar.rng.uniform(-60.0, 500.0))
    others = [other for other in World.liars if other is not liar]
    pairs = [(liar, liar.rng.choice(others)) for _ in range(recent_receipts.PER_MESSAGE)]
    return [recent_receipts.packed(exchanged(one.identity, other.identity, time, rate=1e9, others=1e9)) for one, other in pairs]


def belittle(liar: Liar) -> list[bytes]:
    """Exchanges of liars of next to no tokens, which would make honest nodes look too fast."""
    return []


class World:
    """`count` nodes that train, of which each knows `KNOWN`; of them 30 % liars, if there are `lies`."""

    liars: tuple[Liar, ...] = ()

    def __init__(self, count: int, lies: Callable[[Liar], list[bytes]] | None = None, told: float = 1.0) -> None:
        self.rng, network = random.Random(0), Network(LineModel(latency=0.05), random.Random("network"))
        bad = set(self.rng.sample(range(count), count * 3 // 10))
        everybody = [Node(Network(LineModel(), random.Random(0)), number, list).peer_id for number in range(count)]
        self.nodes: list[Trainer] = []
        for number in range(count):
            peers = self.rng.sample([peer for peer in everybody if peer != everybody[number]], KNOWN)
            kind = Liar if lies and number in bad else Trainer
            node = kind(network, number, lambda peers=peers: peers, everybody)  # type: ignore[misc]  # bound now
            if isinstance(node, Liar):
                node.lies = lies.__get__(node)  # type: ignore[union-attr]
                node.told = told
            self.nodes.append(node)
        World.liars = tuple(node for node in self.nodes if isinstance(node, Liar))
        self.honest = [node for number, node in enumerate(self.nodes) if number not in bad]

    async def train(self, periods: int, rest: float) -> None:
        """Each period everybody exchanges with somebody; `rest` seconds go by after the first."""
        for period in range(periods):
            await trio.sleep(rest if period == 1 else PERIOD)
            order = self.rng.sample(self.nodes, len(self.nodes))
            for one, other in zip(order[::2], order[1::2], strict=False):
                now = trio.current_time()
                told = exchanged(
                    one.identity, other.identity, now, rate=one.claims(now), others=other.claims(now), run_id=TRAINED
                )
                for node in (one, other):
                    node.store.added.append(told)

    async def last(self, periods: int, rest: float = PERIOD) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.train, periods, rest)
            for node in self.nodes:
                nursery.start_soon(node.run)
            await trio.sleep((periods - 1) * PERIOD + 2 * rest)
            nursery.cancel_scope.cancel()


def test_200_nodes_gossip_receipts_and_keep_the_registry_for_less_than_a_kilobyte_a_second() -> None:
    """While all is new, so that there is as much to tell as ever."""

    async def main() -> list[float]:
        world = World(200)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.last, 1)
            await trio.sleep(PERIOD)
            before = [node.sent for node in world.nodes]
        assert sum(len(node.given()) for node in world.nodes) > 200 * 20, "much was told"
        return [(node.sent - sent) / PERIOD for node, sent in zip(world.nodes, before, strict=True)]

    rates = clock.run(main, seed=0)
    assert max(rates) <= 1000.0, "bytes a second of the node that sends most"


async def figures(lies: Callable[[Liar], list[bytes]] | None, told: float = 1.0) -> list[dict[PeerId, float]]:
    """What each of the honest among twenty nodes counts for all honest ones."""
    world = World(20, lies, told)
    for node in world.nodes:
        node.registers = False
    await world.last(8, SETTLED)
    honest = [node.peer_id for node in world.honest]
    return [{peer: node.given().get(peer, 0.0) for peer in honest} for node in world.honest]


SETTLED = 240.0
"""Seconds in which all have heard of all: at first, or counting begins later, and at last."""


@pytest.fixture(scope="module")
def without_liars() -> list[dict[PeerId, float]]:
    return clock.run(lambda: figures(None), seed=0)


@pytest.mark.parametrize(
    ("lies", "told"),
    [(withhold, 1.0), (alter, 1.0), (replay, 1.0), (invent, 1e7), (belittle, 1e-3)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_third_of_liars_changes_no_honest_figure_by_two_percent(
    without_liars: list[dict[PeerId, float]], lies: Callable[[Liar], list[bytes]], told: float
) -> None:
    found = clock.run(lambda: figures(lies, told), seed=0)
    worst = max(
        abs(given[peer] - honest[peer]) / honest[peer]
        for given, honest in zip(found, without_liars, strict=True)
        for peer in honest
    )
    assert worst <= 0.02


def test_a_node_tells_its_owner_of_so_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHOWN", 4)
    told: list[Event] = []
    node = World(10).nodes[0]
    node.gossip._emit = told.append
    for number in range(10):
        for minute in range(2):
            sides = points(exchanged(identity(number), identity(number + 1), MINUTE * (1 + minute) + number))
            node.gossip.tally.add(sides)
    node.gossip.tell()
    assert isinstance(told[0], Contributed)
    assert len(told[0].others) == 4
    assert told[0].own is not None


def test_what_a_node_gave_outlives_it_and_its_many_receipts(tmp_path: Path) -> None:
    """One receipt of each quarter of an hour is kept for good; a fault of the disk is told."""
    events: list[Event] = []
    make_folder(tmp_path)

    def node() -> ReceiptGossip:
        own = OwnReceipts(ReceiptStore(tmp_path / "receipts"), ReceiptStore(tmp_path / "contributions"), at_once)  # type: ignore[arg-type]
        swarm = Swarm(Terms(ONE.identity, RunId(TRAINED), 8.0), list, lambda _: [], network.dial(ONE.port), wall=wall)  # type: ignore[arg-type]
        return ReceiptGossip(swarm, own, random.Random(0), events.append)

    network = Network(LineModel(), random.Random(0))
    ONE, other = Node(network, 0, list), Node(network, 1, list)

    async def live(gossip: ReceiptGossip, minutes: range) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gossip.run)
            for minute in minutes:
                gossip._own.store.add(exchanged(ONE.identity, other.identity, MINUTE * minute, run_id=TRAINED))
                await trio.sleep(MINUTE)
            nursery.cancel_scope.cancel()

    async def main() -> None:
        await live(node(), range(100))
        kept = list(ReceiptStore(tmp_path / "contributions").all())
        assert len(kept) == 1 + 99 * MINUTE // KEPT_EVERY
        (tmp_path / "receipts").write_bytes(
            b'{"receipt": "AAAA", "offerer": "", "answerer": "", "skipped": ""}\n'
        )  # a fault of the disk
        await live(node(), range(100, 103))
        given = [event.own for event in events if isinstance(event, Contributed)][-1]
        assert given is not None
        assert given.tokens == 100 * MINUTE * 102
        unlucky = node()
        (tmp_path / "contributions").unlink()
        (tmp_path / "contributions").mkdir()
        await live(unlucky, range(103, 105))
        assert {event.code for event in events if isinstance(event, Troubled)} == {"NLC-108"}
        given = [event.own for event in events if isinstance(event, Contributed)][-1]
        assert given is not None, "it goes on"

    clock.run(main, seed=0)
