"""Parts of other donors' weights, over the simulated network."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.errors import AlteredBytesError, PeerBusyError, PeerTooSlowError, RefusedError
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.snapshots.cross_check import CHUNKS, fetch_parts
from nolocod.proto.types import Standing, describe
from tests.p2p.snapshots.test_snapshots import CHUNK, LIMITS, NEWCOMER, SIZE, _threads_inline, donors

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.errors import RemoteError
    from nolocod.identity import PeerId
    from nolocod.p2p.snapshots.server import ServedSnapshot
    from nolocod.proto.types import SnapshotParts
    from tests.p2p.snapshots.test_snapshots import Node
    from tests.support.sim_net import Net

__all__ = ["_threads_inline"]


async def fetch(
    net: Net, nodes: list[Node], folder: Path, count: int = 2, seed: int = 0
) -> tuple[list[SnapshotParts], dict[PeerId, RemoteError]]:
    blamed: dict[PeerId, RemoteError] = {}
    context = Context(NEWCOMER, "run", limits=LIMITS, rng=random.Random(seed))
    peers = [node.peer_id for node in nodes]
    dial = net.dial(NEWCOMER.peer_id)
    return await fetch_parts(context, dial, peers, (count, SIZE), folder, LIMITS.sample_seconds, blamed.__setitem__), blamed


async def test_the_same_chunks_are_fetched_of_each_and_the_first(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 3) as (nodes, net):
        samples, blamed = await fetch(net, nodes, tmp_path)
        others, _ = await fetch(net, nodes[:1], tmp_path / "..", seed=1)
        carried = [line.sent["in"] for line in net.lines]
    assert (len(samples), blamed) == (2, {})
    assert samples[0].spans == samples[1].spans != others[0].spans, "drawn anew each time"
    assert CHUNKS <= len(samples[0].spans) <= CHUNKS + 1
    assert samples[0].spans[0] == (0, CHUNK)
    for node, one in zip(nodes, samples, strict=False):
        expected = bytearray(SIZE)
        for start, length in one.spans:
            expected[start : start + length] = node.content[start : start + length]
        assert one.path.read_bytes() == expected
    assert max(carried) < (CHUNKS + 1) * (CHUNK + 20) + 1200, "not the whole"
    for one in others:
        one.path.unlink()


async def test_who_does_not_give_does_not_count_and_leaves_nothing(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 5) as (nodes, net):
        busy, altered, other, silent, _ = nodes
        busy.busy = 1
        altered.served.path.write_bytes(bytes(SIZE))
        other.content += bytes(5000)
        other.served.path.write_bytes(other.content)
        other.served = type(other.served)(other.served.path, Standing(1, 1, 1.0), describe(memoryview(other.content), CHUNK))

        async def never() -> ServedSnapshot:
            await trio.sleep_forever()
            raise AssertionError

        silent.donor._snapshot = never
        into = tmp_path / "into"
        into.mkdir()
        began = trio.current_time()
        samples, blamed = await fetch(net, nodes, into)
        took = trio.current_time() - began
        assert samples == [], "of the five the fifth is not asked: four are enough for two samples"
        assert {type(error) for error in blamed.values()} == {
            PeerBusyError,
            AlteredBytesError,
            RefusedError,
            PeerTooSlowError,
        }
        assert took == pytest.approx(LIMITS.sample_seconds, abs=5)
        assert not list(into.iterdir())
        samples, blamed = await fetch(net, nodes[1:], into)
        assert len(samples) == 1
        assert altered.peer_id in blamed


async def test_a_cancelled_cross_check_leaves_no_file(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        into = tmp_path / "into"
        into.mkdir()
        read = nodes[0].donor._send_chunks

        async def slow(*arguments: object) -> None:
            await trio.sleep(4)
            await read(*arguments)  # type: ignore[arg-type]  # its own

        nodes[0].donor._send_chunks = slow  # type: ignore[method-assign]
        with trio.move_on_after(10) as scope:
            await fetch(net, nodes, into)
        assert scope.cancelled_caught
        assert not list(into.iterdir())


async def test_a_donor_serves_others_after_it_gave_parts(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        for _ in range(5):
            samples, _ = await fetch(net, nodes, tmp_path, count=1)
            assert len(samples) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert not nodes[0].donor._uploads
        assert not net.caught
