"""Donors that claim, stall or trickle: what they cost a newcomer is seconds, whatever they say."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import pytest
import trio
import trio.testing

from nolocod.errors import NoDonorError
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.snapshots import client
from nolocod.p2p.snapshots.client import fetch_snapshot
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import describe_to_wire
from nolocod.proto.types import describe
from tests.p2p.snapshots.test_snapshots import CHUNK, LIMITS, NEWCOMER, SIZE, _threads_inline, donors

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.p2p.snapshots.client import Fetched
    from nolocod.p2p.snapshots.server import ServedSnapshot
    from nolocod.p2p.transport.stream import Stream
    from tests.p2p.snapshots.test_snapshots import Node
    from tests.support.sim_net import Line, Net

__all__ = ["_threads_inline"]


@dataclass
class Trickle:
    """A stream over which `rate` bytes of chunks a second are written."""

    inner: Stream
    rate: float
    stalls_at: float = float("inf")
    """Bytes after which some come every 20 s, below the deadline on progress."""
    sent: int = 0

    @property
    def remote(self) -> PeerId:
        return self.inner.remote

    async def write(self, data: bytes | memoryview) -> None:
        if isinstance(data, bytes):
            await self.inner.write(data)
            return
        for start in range(0, len(data), 20):
            self.sent += 20
            await trio.sleep(20 / self.rate if self.sent < self.stalls_at else 20.0)
            await self.inner.write(bytes(data[start : start + 20]))

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def trickle(net: Net, node: Node, rate: float, stalls_at: float = float("inf")) -> None:
    async def handle(stream: Stream) -> None:
        await node.donor.handle(cast("Stream", Trickle(stream, rate, stalls_at)))

    net.handlers[node.peer_id, SNAPSHOT] = handle


@pytest.fixture(autouse=True)
def _counted_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SLICE", 20)  # where a chunk has 500 bytes


def is_over(line: Line) -> bool:
    """For the newcomer."""
    return line.ends["out"]._broken


async def fetch(net: Net, nodes: list[Node], into: Path, size: int = SIZE) -> Fetched:
    context = Context(NEWCOMER, "run", limits=LIMITS, rng=random.Random(0))
    dial = net.dial(NEWCOMER.peer_id)
    return await fetch_snapshot(context, dial, [node.peer_id for node in nodes], into, size)


@pytest.mark.parametrize("claim", [SIZE - 4097, SIZE + 4097, 76 * SIZE])
async def test_weights_of_another_size_than_the_runs_are_not_begun(tmp_path: Path, virtual_clock: object, claim: int) -> None:
    """As a claim of 76 GB in a run of 10 MB, for which a newcomer waited 20 h."""
    async with donors(tmp_path, 2) as (nodes, net):
        liar, honest = nodes
        liar.served = replace(liar.served, description=describe(memoryview(bytes(claim)), CHUNK))
        fetched = await fetch(net, nodes, tmp_path / "into")
        assert fetched.donor == honest.peer_id
        described = net.lines[0].sent["in"]
        with pytest.raises(NoDonorError, match=f"has weights of {claim} bytes where {SIZE} are due"):
            await fetch(net, [liar], tmp_path / "none")
        assert described == net.lines[2].sent["in"] < CHUNK + claim // CHUNK * 40, "and no chunk asked for"
        assert trio.current_time() < 5


async def test_donors_that_trickle_cost_a_newcomer_seconds(tmp_path: Path, virtual_clock: object) -> None:
    """At a rate at which a chunk is in time, and the whole is not."""
    async with donors(tmp_path, 9) as (nodes, net):
        for node in nodes[:8]:
            trickle(net, node, rate=8.0)
        fetched = await fetch(net, nodes, tmp_path / "into")
        took = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
    assert fetched.donor == nodes[8].peer_id
    assert took < 300, took
    assert [name for name in os.listdir(tmp_path) if "into" in name] == ["into"]


async def test_donors_that_only_say_that_they_work_cost_a_newcomer_seconds(tmp_path: Path, virtual_clock: object) -> None:
    async def never() -> ServedSnapshot:
        await trio.sleep_forever()
        raise AssertionError

    async with donors(tmp_path, 3) as (nodes, net):
        for node in nodes[:2]:
            node.donor._snapshot = never
        fetched = await fetch(net, nodes, tmp_path / "into")
        took = trio.current_time()
    assert fetched.donor == nodes[2].peer_id
    assert took < 30, took


async def test_a_chunk_that_does_not_come_is_not_waited_for_as_long_as_for_the_whole(
    tmp_path: Path, virtual_clock: object
) -> None:
    async with donors(tmp_path) as (nodes, net):
        trickle(net, nodes[0], rate=1000.0, stalls_at=2000)
        limits = replace(LIMITS, exchange_seconds=1e6, resumes=0)
        context = Context(NEWCOMER, "run", limits=limits, rng=random.Random(0))
        with pytest.raises(NoDonorError, match="a chunk took more than 180 s"):
            await fetch_snapshot(context, net.dial(NEWCOMER.peer_id), [nodes[0].peer_id], tmp_path / "into", SIZE)
        assert trio.current_time() < 220


async def test_a_donor_that_gives_well_is_not_disturbed(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 3) as (nodes, net):
        trickle(net, nodes[0], rate=200.0)  # half a minute for all, where a minute is enough
        assert (await fetch(net, nodes, tmp_path / "into")).donor == nodes[0].peer_id
        assert len(net.lines) == 1
        assert trio.current_time() > 25


async def test_of_two_slow_donors_the_one_that_is_done_first_stays(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 2) as (nodes, net):
        trickle(net, nodes[0], rate=12.0)
        trickle(net, nodes[1], rate=60.0)
        fetched = await fetch(net, nodes, tmp_path / "into")
        assert is_over(net.lines[0]), "the slower one was let go"
    assert fetched.donor == nodes[1].peer_id
    assert trio.current_time() < 150


async def test_who_was_left_as_the_slower_one_is_asked_again_when_the_faster_one_dies(
    tmp_path: Path, virtual_clock: object
) -> None:
    async with donors(tmp_path, 2) as (nodes, net):
        slow, fast = nodes
        trickle(net, slow, rate=12.0)
        trickle(net, fast, rate=60.0)

        async def dies() -> None:
            await trio.sleep(60)
            assert is_over(net.lines[0])
            net.down = lambda peer: peer == fast.peer_id
            await net.lines[1].ends["in"].reset()

        net.nursery.start_soon(dies)
        assert (await fetch(net, nodes, tmp_path / "into")).donor == slow.peer_id


async def test_a_transfer_that_goes_on_is_never_too_long(tmp_path: Path, virtual_clock: object) -> None:
    """Of 454 MB 394 came in 604 s; a donor with 5 Mbit/s could never serve 125 M parameters."""
    told: list[int] = []
    context = Context(NEWCOMER, "run", limits=replace(LIMITS, slowest_rate=SIZE / 300), rng=random.Random(0))
    async with donors(tmp_path) as (nodes, net):
        trickle(net, nodes[0], rate=4.0)
        dial, peers = net.dial(NEWCOMER.peer_id), [nodes[0].peer_id]
        await fetch_snapshot(context, dial, peers, tmp_path / "into", SIZE, tell=lambda _, here: told.append(here))
        assert trio.current_time() > 2 * context.limits.whole(SIZE)
    assert told == sorted(told)
    assert 0 in told
    assert len(told) == int(trio.current_time()) // 10, "every ten seconds"
    assert told[-1] > SIZE * 0.9


def left(folder: Path, end: str = "") -> list[Path]:
    """What a fetch into `into` left."""
    return sorted(folder.glob(f"into*{end}"))


@pytest.mark.parametrize("damaged", ["", "a chunk", "its end", "the offer", "another model"])
async def test_what_came_is_kept_over_a_restart_of_the_newcomer(tmp_path: Path, virtual_clock: object, damaged: str) -> None:
    async with donors(tmp_path, 2) as (nodes, net):
        alice = nodes[0]
        trickle(net, alice, rate=100.0)
        with trio.move_on_after(31):
            await fetch(net, [alice], tmp_path / "into")
        (part,), (offer,) = left(tmp_path, ".partial"), left(tmp_path, ".offer")
        came = part.stat().st_size
        assert came == 3000
        match damaged:
            case "a chunk":
                with part.open("r+b") as file:
                    file.seek(CHUNK)
                    file.write(b"not what was sent")
            case "its end":
                os.truncate(part, came - 1)
            case "the offer":
                offer.write_bytes(b"not an offer")
            case "another model":
                description = describe(memoryview(bytes(3 * SIZE)), CHUNK)
                wire = pb.SnapshotOffer(standing=pb.Standing(round=1), content=describe_to_wire(description))
                offer.write_bytes(wire.SerializeToString())
        before = net.lines[0].sent["in"]
        fetched = await fetch(net, [nodes[1], alice], tmp_path / "into")
        again = sum(line.sent["in"] for line in net.lines) - before
    kept = {"": came, "a chunk": CHUNK, "its end": came - CHUNK}.get(damaged, 0)
    assert fetched.donor == alice.peer_id, "who gave most of it goes on"
    assert fetched.path.read_bytes() == alice.content
    assert 0 < again - (SIZE - kept) < 1500
    assert left(tmp_path) == [tmp_path / "into"]


async def test_of_several_that_gave_a_part_only_the_furthest_stays(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 3) as (nodes, net):
        for node, rate in zip(nodes, (12.0, 60.0, 24.0), strict=True):
            trickle(net, node, rate)
        with trio.move_on_after(60):
            await fetch(net, nodes, tmp_path / "into")
    assert [nodes[1].peer_id in path.name for path in left(tmp_path)] == [True, True]


async def test_who_is_busy_in_the_middle_is_waited_for_as_at_the_beginning(tmp_path: Path, virtual_clock: object) -> None:
    """Its slot went to another newcomer, ten minutes after this one had begun."""
    async with donors(tmp_path) as ((alice,), net):
        limits = replace(LIMITS, busy_seconds=60.0, turn_seconds=1.0, resumes=1)
        context = Context(NEWCOMER, "run", limits=limits, rng=random.Random(0))
        trickle(net, alice, rate=50.0)

        async def evict() -> None:
            await trio.sleep(80)
            alice.donor._max_uploads = 0
            alice.donor._uploads.pop(NEWCOMER.peer_id).scope.cancel()
            await trio.sleep(45)
            alice.donor._max_uploads = 2

        alice.donor._make_room = lambda _: False  # type: ignore[method-assign]  # none to be had
        net.nursery.start_soon(evict)
        fetched = await fetch_snapshot(context, net.dial(NEWCOMER.peer_id), [alice.peer_id], tmp_path / "into", SIZE)
    assert fetched.path.read_bytes() == alice.content
