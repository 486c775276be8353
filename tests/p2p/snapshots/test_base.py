"""Files that the manifest pins, from peers: several at once, checked chunk by chunk, resumable."""

from __future__ import annotations

import errno
import os
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.errors import DiskFullError, NoDonorError, PeerBusyError, RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.snapshots.base import fetch_file
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto.limits import Limits
from nolocod.proto.types import Standing, describe
from nolocod.run.base import BaseFile
from tests.p2p.snapshots.test_snapshots import _threads_inline
from tests.support.sim_net import Cut, Net

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SIZE, CHUNK = 5300, 100
LIMITS = Limits(chunk_bytes=CHUNK, chunks_per_request=16)
NEWCOMER = Identity.from_secret(bytes(32))
CONTENT = random.Random(0).randbytes(SIZE)
DESCRIPTION = describe(memoryview(CONTENT), CHUNK)
FILE = BaseFile("model.safetensors", SIZE, DESCRIPTION.root.hex())


__all__ = ["_threads_inline"]


class Peer:
    """One that has the file once `path` is set; `gave` counts the bytes that it sent."""

    def __init__(self, net: Net, number: int, path: Path | None) -> None:
        self.identity = Identity.from_secret(bytes([number]) * 32)
        self.peer_id = self.identity.peer_id
        self.path = path
        self.events: list[object] = []
        self.donor = Donor(
            Context(self.identity, "run", limits=LIMITS), self.weights, 2, self.events.append, pinned=self.pinned
        )
        net.handlers[self.peer_id, SNAPSHOT] = self.donor.handle

    async def weights(self) -> ServedSnapshot:
        raise AssertionError("nobody asks for weights here")

    def pinned(self, root: bytes) -> ServedSnapshot:
        if self.path is None:
            raise PeerBusyError("not here yet.", retry_after=3.0)
        assert root == DESCRIPTION.root
        return ServedSnapshot(self.path, Standing(0, 0, 0.0), DESCRIPTION)

    @property
    def gave(self) -> int:
        return sum(getattr(event, "size", 0) for event in self.events)


@asynccontextmanager
async def peers(*paths: Path | None, cuts: tuple[Cut, ...] = ()) -> AsyncIterator[tuple[list[Peer], Net]]:
    async with trio.open_nursery() as nursery:
        net = Net(nursery, list(cuts))
        made = [Peer(net, number, path) for number, path in enumerate(paths, 1)]
        yield made, net
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    for one in made:
        one.donor.close()


async def fetch(net: Net, donors: list[Peer], into: Path, blamed: dict[PeerId, RemoteError] | None = None) -> bytes:
    context = Context(NEWCOMER, "run", limits=LIMITS, rng=random.Random(0))
    blame = {} if blamed is None else blamed
    told = await fetch_file(
        context, net.dial(NEWCOMER.peer_id), lambda: [one.peer_id for one in donors], (FILE, into), blame.__setitem__
    )
    assert told == DESCRIPTION
    return into.read_bytes()  # noqa: ASYNC240 - a few bytes


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole"
    path.write_bytes(CONTENT)
    return path


async def test_several_peers_give_parts_of_one_file(tmp_path: Path, whole: Path, virtual_clock: object) -> None:
    async with peers(whole, whole, whole) as (donors, net):
        assert await fetch(net, donors, tmp_path / "in") == CONTENT
    gave = [donor.gave for donor in donors]
    assert min(gave) > 0
    assert SIZE <= sum(gave) <= SIZE + 3 * CHUNK, "hardly anything came twice"


async def test_an_altered_chunk_is_not_taken_and_its_giver_is_left(tmp_path: Path, whole: Path, virtual_clock: object) -> None:
    altered = tmp_path / "altered"
    altered.write_bytes(CONTENT[:100] + bytes(SIZE - 100))
    blamed: dict[PeerId, RemoteError] = {}
    async with peers(altered, whole) as (donors, net):
        assert await fetch(net, donors, tmp_path / "in", blamed) == CONTENT
    assert [error.code for error in blamed.values()] == ["NLC-205"]
    assert list(blamed) == [donors[0].peer_id]


async def test_who_offers_another_file_is_left(tmp_path: Path, whole: Path, virtual_clock: object) -> None:
    blamed: dict[PeerId, RemoteError] = {}
    other = describe(memoryview(bytes(SIZE)), CHUNK)
    async with peers(whole, whole) as (donors, net):
        donors[0].donor._pinned = lambda _: ServedSnapshot(whole, Standing(0, 0, 0.0), other)
        assert await fetch(net, donors, tmp_path / "in", blamed) == CONTENT
    assert blamed[donors[0].peer_id].code == "NLC-203"


async def test_what_came_before_a_restart_is_not_asked_for_again(tmp_path: Path, whole: Path, virtual_clock: object) -> None:
    (tmp_path / "in.partial").write_bytes(CONTENT[:2000] + bytes(100) + CONTENT[2100:3050])
    async with peers(whole) as (donors, net):
        assert await fetch(net, donors, tmp_path / "in") == CONTENT
    assert donors[0].gave == SIZE - 3000 + CHUNK, "the altered one too, and the one that was cut short"
    assert not (tmp_path / "in.partial").exists()


@pytest.mark.parametrize("at", range(1, 5000, 701))
async def test_a_broken_stream_costs_a_redial(tmp_path: Path, whole: Path, virtual_clock: object, at: int) -> None:
    async with peers(whole, cuts=(Cut(0, "in", at),)) as (donors, net):
        assert await fetch(net, donors, tmp_path / "in") == CONTENT
        assert len(net.lines) == 2


async def test_who_has_it_only_later_is_asked_later(tmp_path: Path, whole: Path, virtual_clock: object) -> None:
    async with peers(None) as (donors, net), trio.open_nursery() as nursery:

        async def come() -> None:
            await trio.sleep(30)
            donors[0].path = whole

        nursery.start_soon(come)
        assert await fetch(net, donors, tmp_path / "in") == CONTENT
        assert len(net.lines) > 2


async def test_nobody_is_waited_for_without_end(tmp_path: Path, virtual_clock: object) -> None:
    started = trio.current_time()
    async with peers(None) as (donors, net):
        with pytest.raises(NoDonorError, match=r"nobody gave model.safetensors"):
            await fetch(net, donors, tmp_path / "in")
    assert LIMITS.busy_seconds <= trio.current_time() - started < LIMITS.busy_seconds + 10
    assert not (tmp_path / "in").exists()


async def test_a_full_disk_is_told_as_such(
    tmp_path: Path, whole: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    async with peers(whole, whole) as (donors, net):
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFullError, match=r"in\.partial"):
            await fetch(net, donors, tmp_path / "in")


async def test_who_stands_still_is_not_waited_for_at_the_end(tmp_path: Path, whole: Path, virtual_clock: object) -> None:
    """What it owes is asked of another."""
    async with peers(whole, whole) as (donors, net):
        real = donors[0].donor._send_chunks

        async def stalled(*arguments: object) -> None:
            await trio.sleep(100)
            await real(*arguments)  # type: ignore[arg-type]

        donors[0].donor._send_chunks = stalled  # type: ignore[method-assign]
        started = trio.current_time()
        assert await fetch(net, donors, tmp_path / "in") == CONTENT
    assert trio.current_time() - started < 90
