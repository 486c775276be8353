"""Who has a donor's upload slots: no identity, and no address group, holds them for longer than its turn."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.errors import RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.snapshots.client import fetch_snapshot
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import Dialogue
from tests.p2p.snapshots.test_snapshots import LIMITS, NEWCOMER, SIZE, _threads_inline, ask, donors

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.p2p.transport.channel import Channel
    from tests.p2p.snapshots.test_snapshots import Node
    from tests.support.sim_net import Net

__all__ = ["_threads_inline"]


QUICK = replace(LIMITS, turn_seconds=20.0)
"""A turn is over before a silent stream is."""


class Origins:
    """Where peers come from: by default each from an address group of its own, and not verified."""

    def __init__(self) -> None:
        self.groups: dict[PeerId, str] = {}
        self.verified: set[PeerId] = set()

    def __call__(self, peer: PeerId) -> tuple[str, bool]:
        return self.groups.get(peer, peer), peer in self.verified

    def of(self, donor: Node) -> Origins:
        donor.donor._origin = self
        return self


def stranger(number: int) -> Identity:
    return Identity.from_secret(bytes([100 + number]) * 32)


async def admitted(net: Net, donor: Node, newcomer: Identity) -> Channel | None:
    channel, body = await ask(net, donor, newcomer)
    return channel if body.HasField("snapshot_offer") else None


async def hold(net: Net, donor: Node, newcomer: Identity) -> None:
    """Ask every second until there is a slot, hold it with a chunk now and then, and again."""
    while True:
        dialogue = Dialogue(newcomer, "run", donor.peer_id, b"s" * 16, 1)
        with suppress(RemoteError):
            channel, body = await ask(net, donor, newcomer)
            while body.HasField("snapshot_offer"):
                chunk = pb.ChunkRequest(id=body.snapshot_offer.id, first=0, count=1)
                await channel.send_envelope(dialogue.seal(pb.Body(chunk_request=chunk)))
                frame = await channel.receive()
                assert not isinstance(frame, bytes)
                await channel.read_into(memoryview(bytearray(frame.length)))
                await trio.sleep(20)
        await trio.sleep(1)


async def fetched_after(net: Net, donor: Node, into: Path) -> float:
    context = Context(NEWCOMER, "run", limits=LIMITS, rng=random.Random(0))
    began = trio.current_time()
    await fetch_snapshot(context, net.dial(NEWCOMER.peer_id), [donor.peer_id], into, SIZE)
    return trio.current_time() - began


@pytest.mark.parametrize("groups", [1, 2, 40])
async def test_identities_that_trickle_do_not_hold_the_slots(tmp_path: Path, virtual_clock: object, groups: int) -> None:
    """Two held both for 600 s, and then again."""
    async with donors(tmp_path) as ((alice,), net):
        origins = Origins().of(alice)
        for number in range(2 if groups == 40 else 8):
            origins.groups[stranger(number).peer_id] = f"203.0.{number % groups}.0/24"
            net.nursery.start_soon(hold, net, alice, stranger(number))
        await trio.sleep(30)
        first = await fetched_after(net, alice, tmp_path / "into")
        second = await fetched_after(net, alice, tmp_path / "into")
    assert first < 70
    assert second < 70


async def test_slots_that_nobody_else_wants_may_all_be_of_one_address_group(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        origins = Origins().of(alice)
        for number in (1, 2, 3):
            origins.groups[stranger(number).peer_id] = "203.0.113.0/24"
        assert await admitted(net, alice, stranger(1))
        assert await admitted(net, alice, stranger(2))
        assert not await admitted(net, alice, stranger(3)), "all of one home: who came first"
        assert await admitted(net, alice, NEWCOMER), "another home has a slot of its own at once"
        assert not await admitted(net, alice, stranger(4)), "one each, and nobody had its turn"


async def test_who_fetches_well_is_not_displaced_before_it_has_all(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        Origins().of(alice)
        donor = alice.donor
        donor._limits = replace(LIMITS, turn_seconds=0.0, bytes_per_second=SIZE / 40)
        channels = [await admitted(net, alice, stranger(number)) for number in (1, 2)]
        for upload in donor._uploads.values():
            upload.size = SIZE // 2
        await trio.sleep(15)
        assert not await admitted(net, alice, NEWCOMER), "half of it in less than half of the time"
        await trio.sleep(10)
        assert await admitted(net, alice, NEWCOMER)
        assert all(channels)


async def test_the_time_that_our_trainer_takes_is_no_part_of_a_turn(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        Origins().of(alice)
        given = alice.donor._snapshot

        async def slowly() -> object:
            await trio.sleep(28)
            return await given()

        alice.donor._limits = QUICK
        alice.donor._snapshot = slowly  # type: ignore[assignment]  # the same thing, later
        for number in (1, 2):
            net.nursery.start_soon(ask, net, alice, stranger(number))
        await trio.sleep(40)
        alice.donor._snapshot = given
        assert not await admitted(net, alice, NEWCOMER)
        await trio.sleep(QUICK.turn_seconds - 5)
        assert await admitted(net, alice, NEWCOMER)


async def test_verified_members_come_first_until_they_had_their_turn(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        origins = Origins().of(alice)
        alice.donor._limits = QUICK
        origins.verified = {stranger(number).peer_id for number in (3, 4, 5)}
        for number in (1, 2):
            assert await admitted(net, alice, stranger(number))
        for number in (3, 4):
            assert await admitted(net, alice, stranger(number)), "a member, and these are not"
        assert not await admitted(net, alice, stranger(5)), "members, too"
        assert not await admitted(net, alice, NEWCOMER)
        await trio.sleep(QUICK.turn_seconds + 1)
        assert await admitted(net, alice, NEWCOMER), "they had their turn"
        await trio.testing.wait_all_tasks_blocked()
        assert len(alice.donor._uploads) == 2


async def test_a_group_that_had_its_turn_has_it_under_another_name_too(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        origins = Origins().of(alice)
        alice.donor._limits = QUICK
        for number in range(1, 5):
            origins.groups[stranger(number).peer_id] = f"203.0.{number % 2}.0/24"
        before = [await admitted(net, alice, stranger(number)) for number in (1, 2)]
        await trio.sleep(QUICK.turn_seconds + 1)
        for channel in before:
            assert channel is not None
            await channel.close()
        await trio.testing.wait_all_tasks_blocked()
        for number in (3, 4):
            assert await admitted(net, alice, stranger(number)), "nobody else wants it"
        assert await admitted(net, alice, NEWCOMER), "at once"


async def test_a_turn_is_as_long_as_one_snapshot_takes_whatever_was_fetched(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), net):
        donor, peer = alice.donor, stranger(1).peer_id
        assert await admitted(net, alice, stranger(1))
        donor._account(peer).size = 10**12
        donor._account(peer).seconds = LIMITS.turn_seconds - 1
        assert not donor._claim(peer)[0]
        donor._account(peer).seconds = LIMITS.turn(SIZE) + 1
        assert donor._claim(peer)[0]


async def test_what_is_remembered_of_address_groups_is_bounded_and_forgotten(tmp_path: Path, virtual_clock: object) -> None:
    async with donors(tmp_path) as ((alice,), _net):
        donor = alice.donor
        for number in range(3000):
            donor._account(PeerId(f"peer {number}")).seconds = 1e6
        assert len(donor._had) == 1024
        assert donor._claim(PeerId("peer 2999"))[0]
        await trio.sleep(3601)
        assert not donor._claim(PeerId("peer 2999"))[0]
