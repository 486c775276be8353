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
