"""Weights for newcomers: whole and verified, or no file; a donor's memory and slots stay bounded."""

from __future__ import annotations

import os
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.errors import DiskFullError, NoDonorError, PeerBusyError, PeerTooSlowError, ProtocolError
from nolocod.identity import Identity
from nolocod.observe.events import Event, WeightsServed
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.snapshots.client import Fetched, fetch_snapshot
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import Dialogue
from nolocod.proto.framing import ChunkHead
from nolocod.proto.limits import Limits
from nolocod.proto.snapshot_states import SERVING, Service, Serving
from nolocod.proto.types import Standing, describe
from tests.support.sim_net import Cut, Net

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


SIZE, CHUNK = 5300, 500
LIMITS = Limits(chunk_bytes=CHUNK, chunks_per_request=4)
NEWCOMER = Identity.from_secret(bytes(32))


@pytest.fixture(autouse=True)
def _threads_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual clock does not wait for threads, and would jump over every deadline meanwhile."""

    async def run_sync(function: Callable[..., object], *args: object) -> object:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


class Node:
    """A donor with a snapshot of its own."""

    def __init__(self, net: Net, number: int, folder: Path, max_uploads: int = 2) -> None:
        self.identity = Identity.from_secret(bytes([number]) * 32)
        self.peer_id = self.identity.peer_id
        self.folder = folder
        self.events: list[Event] = []
        self.busy = 0
        self.refresh(number)
        self.donor = Donor(Context(self.identity, "run", limits=LIMITS), self.snapshot, max_uploads, self.events.append)
        net.handlers[self.peer_id, SNAPSHOT] = self.donor.handle

    def refresh(self, round: int) -> None:
        self.content = random.Random(round).randbytes(SIZE)
        path = self.folder / f"{self.peer_id}-{round}"
        path.write_bytes(self.content)
        self.served = ServedSnapshot(path, Standing(round, round * 10, 1.5), describe(memoryview(self.content), CHUNK))

    async def snapshot(self) -> ServedSnapshot:
        await trio.lowlevel.checkpoint()
        if self.busy:
            self.busy -= 1
            raise PeerBusyError("no weights yet.", retry_after=3.0)
        return self.served


@asynccontextmanager
async def donors(folder: Path, count: int = 1, cuts: tuple[Cut, ...] = ()) -> AsyncIterator[tuple[list[Node], Net]]:
    async with trio.open_nursery() as nursery:
        net = Net(nursery, list(cuts))
        nodes = [Node(net, number, folder) for number in range(1, count + 1)]
        yield nodes, net
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    for node in nodes:
        node.donor.close()


async def fetch(net: Net, nodes: list[Node], into: Path, limits: Limits = LIMITS) -> Fetched:
    context = Context(NEWCOMER, "run", limits=limits, rng=random.Random(0))
    return await fetch_snapshot(context, net.dial(NEWCOMER.peer_id), [node.peer_id for node in nodes], into, SIZE)


async def test_the_file_is_the_donors(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        context = Context(NEWCOMER, "run", limits=LIMITS)
        dial = net.dial(NEWCOMER.peer_id)
        fetched = await fetch_snapshot(context, dial, [alice.peer_id], tmp_path / "in" / "w", SIZE)
    assert fetched.path.read_bytes() == alice.content
    assert (fetched.standing, fetched.donor, fetched.size) == (Standing(1, 10, 1.5), alice.peer_id, SIZE)
    assert [file.name for file in (tmp_path / "in").iterdir()] == ["w"]
    assert [(e.peer_id, e.size, e.whole) for e in alice.events if isinstance(e, WeightsServed)] == [
        (NEWCOMER.peer_id, SIZE, True)
    ]


@pytest.mark.parametrize("direction", ["out", "in"])
async def test_a_stream_broken_anywhere_is_resumed_with_what_was_verified(
    tmp_path: Path, virtual_clock: object, direction: str
) -> None:
    async with donors(tmp_path) as (nodes, net):
        await fetch(net, nodes, tmp_path / "whole")
        total = net.lines[0].sent[direction]
    for at in range(1, total, 331):
        async with donors(tmp_path, cuts=(Cut(0, direction, at),)) as (nodes, net):
            fetched = await fetch(net, nodes, tmp_path / "into")
            carried = sum(line.sent["in"] for line in net.lines)
        assert fetched.path.read_bytes() == nodes[0].content
        assert carried < SIZE + 4 * CHUNK + 3 * 1200, at  # a batch and some messages are repeated, not all
        assert not net.caught


async def test_a_refreshed_snapshot_does_not_hurt_who_reads_the_old_one(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, cuts=(Cut(0, "in", 3000),)) as (nodes, net):
        old = nodes[0].content

        async def handle_then_refresh(stream: object) -> None:
            try:
                await first(stream)  # type: ignore[arg-type]  # the net's own streams
            finally:
                nodes[0].served.path.unlink(missing_ok=True)
                nodes[0].refresh(9)

        first = net.handlers[nodes[0].peer_id, SNAPSHOT]
        net.handlers[nodes[0].peer_id, SNAPSHOT] = handle_then_refresh
        fetched = await fetch(net, nodes, tmp_path / "into")
    assert fetched.path.read_bytes() == old
    assert len(net.lines) == 2


async def test_a_snapshot_that_is_gone_is_started_over(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, cuts=(Cut(0, "in", 3000),)) as (nodes, net):
        alice = nodes[0]

        async def born_again(stream: object) -> None:
            if len(net.lines) == 2:  # its process was started again, with another snapshot
                alice.refresh(9)
                alice.donor = Donor(Context(alice.identity, "run", limits=LIMITS), alice.snapshot, 2, alice.events.append)
            await alice.donor.handle(stream)  # type: ignore[arg-type]  # the net's own streams

        net.handlers[alice.peer_id, SNAPSHOT] = born_again
        fetched = await fetch(net, nodes, tmp_path / "into")
    assert fetched.path.read_bytes() == alice.content
    assert fetched.standing.round == 9


async def test_a_donor_that_dies_is_replaced_by_the_next(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 2, cuts=(Cut(0, "in", 3000),)) as (nodes, net):
        net.down = lambda peer: peer == nodes[0].peer_id and bool(net.lines)
        fetched = await fetch(net, nodes, tmp_path / "into")
    assert fetched.donor == nodes[1].peer_id
    assert fetched.path.read_bytes() == nodes[1].content


async def test_a_lying_donor_is_left_at_the_first_altered_chunk(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 2) as (nodes, net):
        content = bytearray(nodes[0].content)
        content[CHUNK] ^= 1
        nodes[0].served.path.write_bytes(content)
        fetched = await fetch(net, nodes, tmp_path / "into")
        took = net.lines[0].sent["in"]
    assert fetched.donor == nodes[1].peer_id
    assert took < 5 * CHUNK + 1200
    async with donors(tmp_path) as (nodes, net):
        nodes[0].served.path.write_bytes(content)
        with pytest.raises(NoDonorError, match="chunk 1 does not have the hash"):
            await fetch(net, nodes, tmp_path / "none")
    assert not any(name.startswith("none") for name in os.listdir(tmp_path)), "nor is a part of it gone on with"


async def test_busy_is_waited_for(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        nodes[0].busy = 2
        started = trio.current_time()
        fetched = await fetch(net, nodes, tmp_path / "into")
        took = trio.current_time() - started
    assert fetched.size == SIZE
    assert 6.0 <= took < 10.0


async def test_donors_that_stay_busy_are_given_up(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 2) as (nodes, net):
        for node in nodes:
            node.busy = 10**6
        started = trio.current_time()
        with pytest.raises(NoDonorError, match="no weights yet"):
            await fetch(net, nodes, tmp_path / "into", Limits(chunk_bytes=CHUNK, busy_seconds=60, turn_seconds=1))
        took = trio.current_time() - started
    assert 60 <= took < 70


async def test_nobody_gives_weights(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path, 2) as (nodes, net):
        net.down = lambda _peer: True
        with pytest.raises(NoDonorError) as caught:
            await fetch(net, nodes, tmp_path / "into")
    for node in nodes:
        assert node.peer_id[-8:] in caught.value.cause


async def test_a_snapshot_above_the_limit_is_not_begun(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        limits = Limits(chunk_bytes=CHUNK, snapshot_bytes=SIZE - 1)
        with pytest.raises(NoDonorError, match="is outside 1 to"):
            await fetch(net, nodes, tmp_path / "into", limits)


async def test_a_disk_too_small_is_told_before_the_download(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = SIZE - 1

    monkeypatch.setattr("nolocod.p2p.snapshots.client.shutil.disk_usage", lambda _path: Usage)
    async with donors(tmp_path) as (nodes, net):
        with pytest.raises(DiskFullError):
            await fetch(net, nodes, tmp_path / "into")
        assert not net.lines


async def test_a_newcomer_that_trickles_loses_its_slot(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        channel, body = await ask(net, nodes[0])
        dialogue = Dialogue(NEWCOMER, "run", nodes[0].peer_id, b"s" * 16, 1)
        request = pb.ChunkRequest(id=body.snapshot_offer.id, first=0, count=1)
        while trio.current_time() < LIMITS.whole(SIZE):
            await channel.send_envelope(dialogue.seal(pb.Body(chunk_request=request)))
            frame = await channel.receive()
            assert isinstance(frame, ChunkHead)
            await channel.read_into(memoryview(bytearray(frame.length)))
            await trio.sleep(14.0)
        assert not nodes[0].donor._uploads
        assert {type(error) for error in net.caught} == {PeerTooSlowError}


async def test_a_newcomer_has_one_slot_and_its_last_stream_has_it(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        await ask(net, alice)
        for before in range(5):
            again, _ = await ask(net, alice)
            await trio.testing.wait_all_tasks_blocked()
            assert len(alice.donor._uploads) == 1
            assert [type(error) for error in net.caught] == [PeerTooSlowError] * (before + 1), "the one before has ended"
        dialogue = Dialogue(NEWCOMER, "run", alice.peer_id, b"s" * 16, 1)
        request = pb.ChunkRequest(id=alice.served.description.root, first=0, count=1)
        await again.send_envelope(dialogue.seal(pb.Body(chunk_request=request)))
        assert isinstance(await again.receive(), ChunkHead)


async def test_a_snapshot_is_held_from_the_moment_it_is_given(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        alice = nodes[0]
        given = alice.donor._snapshot

        async def gone_at_once() -> ServedSnapshot:
            found = await given()
            trio.lowlevel.current_trio_token().run_sync_soon(found.path.unlink)
            return found

        alice.donor._snapshot = gone_at_once
        fetched = await fetch(net, nodes, tmp_path / "into")
        assert fetched.path.read_bytes() == alice.content
        assert not net.caught


async def test_slots_are_counted_and_freed(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        alice = nodes[0]
        first, second, third = [await ask(net, alice, Identity.from_secret(bytes([seed]) * 32)) for seed in (50, 51, 52)]
        assert third[1].busy.retry_after_ms > 0
        assert first[1].HasField("snapshot_offer")
        assert second[1].HasField("snapshot_offer")
        await first[0].close()
        await trio.testing.wait_all_tasks_blocked()
        assert (await ask(net, alice))[1].HasField("snapshot_offer")


async def ask(net: Net, node: Node, newcomer: Identity = NEWCOMER) -> tuple[Channel, pb.Body]:
    channel = Channel(await net.dial(newcomer.peer_id)(node.peer_id, SNAPSHOT), LIMITS)
    dialogue = Dialogue(newcomer, "run", node.peer_id, b"s" * 16)
    await channel.send_envelope(dialogue.seal(pb.Body(snapshot_request=pb.SnapshotRequest())))
    return channel, dialogue.open(await channel.receive_envelope())


async def test_a_newcomer_that_asks_nothing_more_loses_its_slot(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        alice = nodes[0]
        for _ in range(2):
            await ask(net, alice)
        await trio.sleep(LIMITS.chunk_seconds + 1)
        assert (await ask(net, alice))[1].HasField("snapshot_offer")
        assert {type(error) for error in net.caught} == {PeerTooSlowError}


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 5), (8, 4), (2**32 - 1, 1), (0, 2**32 - 1)])
async def test_a_request_outside_the_content_ends_the_stream(
    tmp_path: Path, virtual_clock: object, first: int, count: int
) -> None:
    async with donors(tmp_path) as (nodes, net):
        channel, body = await ask(net, nodes[0])
        dialogue = Dialogue(NEWCOMER, "run", nodes[0].peer_id, b"s" * 16, 1)
        request = pb.ChunkRequest(id=body.snapshot_offer.id, first=first, count=count)
        sent = net.lines[0].sent["in"]
        await channel.send_envelope(dialogue.seal(pb.Body(chunk_request=request)))
        await trio.testing.wait_all_tasks_blocked()
        assert net.lines[0].sent["in"] == sent
        assert [error.code for error in net.caught] == ["NLC-203"]  # type: ignore[attr-defined]  # ours all have one


async def test_files_kept_open_are_bounded(tmp_path: Path, virtual_clock: object) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with donors(tmp_path) as (nodes, net):
        for number in range(10, 20):
            nodes[0].refresh(number)
            await fetch(net, nodes, tmp_path / "into")
        await trio.testing.wait_all_tasks_blocked()
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_cancelled_fetch_leaves_no_part(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as (nodes, net):
        net.handlers[nodes[0].peer_id, SNAPSHOT] = silent
        with trio.move_on_after(5) as scope:
            await fetch(net, nodes, tmp_path / "into")
    assert scope.cancelled_caught
    assert not (tmp_path / "into.partial").exists()


async def silent(_stream: object) -> None:
    await trio.sleep_forever()


def test_what_the_table_of_serving_lacks_is_the_peers_fault_or_our_own() -> None:
    service = Service("newcomer", NEWCOMER.peer_id)
    service.step(">snapshot_request")
    with pytest.raises(ProtocolError, match="sent commit to a newcomer that is ASKED"):
        service.step("<commit")
    with pytest.raises(AssertionError, match="chunk_request in state ASKED"):
        service.step(">chunk_request")
    service.step("<snapshot_offer")
    assert service.state is Serving.DESCRIBED


@pytest.mark.parametrize("side", SERVING)
def test_every_state_of_serving_is_in_the_table_and_can_be_reached(side: str) -> None:
    table = SERVING[side]
    assert set(table) == set(Serving)
    assert {Serving.NEW, *(state for steps in table.values() for state in steps.values())} == set(Serving)
