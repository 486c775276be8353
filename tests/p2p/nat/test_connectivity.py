"""Connectivity: what a node makes of what it knows of itself, and how long bulk waits for a straight connection."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from msgspec.structs import replace

from nolocod.errors import RelayBudgetError
from nolocod.identity import Identity
from nolocod.observe.events import Punched
from nolocod.p2p.host import open_host
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient, RelayLimits
from nolocod.p2p.nat.connectivity import Connectivity
from nolocod.p2p.settings import MeshSettings, Relaying
from nolocod.proto.types import Member, Standing
from nolocod.units import Address
from tests.support.wires import ENOUGH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.observe.events import Event, NatClass
    from nolocod.p2p.host import Host

LOOPBACK = (Address("127.0.0.1", 0),)
ANNOUNCED = ("/ip4/203.0.113.7/tcp/4001",)


@asynccontextmanager
async def host(announce: tuple[str, ...] = ()) -> AsyncIterator[Host]:
    async with open_host(Identity.generate(), LOOPBACK, announce, lambda _: None) as opened:
        yield opened


def connectivity(of: Host, path: Path, announce: tuple[str, ...] = (), relaying: Relaying | None = None) -> Connectivity:
    config = MeshSettings(data_dir=path, announce=announce, relaying=relaying or Relaying(), upnp=False)
    return Connectivity(of, config, (), random.Random(1), lambda _: None)


def member(of: Host, nat: NatClass | None = None) -> Member:
    return Member(of.own, Standing(1, 0, 0.0), "training", of.announced, "0", 0.0, "relayed", nat=nat)


@asynccontextmanager
async def relayed(limits: RelayLimits | None = None) -> AsyncIterator[tuple[Host, RelayClient, Host]]:
    """A node that reaches another one through a relay; its client's side, and the other node."""
    async with host() as middle, host() as near, host() as far:
        Relay(middle, limits).serve()
        for end in (near, far):
            await end.connect(middle.own, middle.announced)
        there, here = RelayClient(far), RelayClient(near)
        there.serve()
        await there.reserve(middle.own)
        await here.connect(middle.own, far.own)
        yield near, here, far


async def test_who_says_where_it_is_reached_gives_unless_its_owner_says_otherwise(tmp_path: Path) -> None:
    async with host(ANNOUNCED) as one:
        found = connectivity(one, tmp_path, ANNOUNCED)
        assert found.kind == "public"
        assert found.relays
        found.resting = lambda: True
        assert not found.relays
        assert not connectivity(one, tmp_path, ANNOUNCED, Relaying(serve=False)).relays
        assert not connectivity(one, tmp_path, ANNOUNCED, Relaying(only=True)).relays
    async with host() as one:
        assert connectivity(one, tmp_path).kind is None, "on a private address nobody knows before it was dialled back"
        assert not connectivity(one, tmp_path).relays


async def test_circuits_have_room_in_a_heartbeat_however_many_interfaces_there_are(tmp_path: Path) -> None:
    many = tuple(f"/ip4/203.0.113.{number}/tcp/4001" for number in range(1, 12))
    async with host(many) as one:
        one.circuits = tuple(f"/ip4/198.51.100.{number}/tcp/1/p2p/{one.own}/p2p-circuit" for number in range(1, 7))
        assert connectivity(one, tmp_path).heartbeat_addresses == (*many[:4], *one.circuits[:4])
        one.circuits = ()
        assert connectivity(one, tmp_path).heartbeat_addresses == many[:8]


async def test_bulk_waits_for_a_straight_connection_while_one_may_come(tmp_path: Path) -> None:
    async with relayed() as (near, _, far):
        found = connectivity(near, tmp_path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.dial_straight, far.own, far.announced, 5.0)
            with trio.fail_after(ENOUGH):
                await found.straighten(far.own, member(far, "cone"), 2 * ENOUGH)
            assert near.straight(far.own)


@pytest.mark.parametrize("how", ["symmetric", "told", "waited"])
async def test_bulk_does_not_wait_where_a_punch_cannot_succeed_or_has_just_failed(tmp_path: Path, how: str) -> None:
    events: list[Event] = []
    async with relayed() as (near, _, far):
        config = MeshSettings(data_dir=tmp_path, upnp=False)
        found = Connectivity(near, config, (), random.Random(1), events.append)
        nat: NatClass = "symmetric" if how == "symmetric" else "cone"
        if how == "told":
            found.follow(Punched(far.own, False, 9.0, "no answer"))
            assert events == [Punched(far.own, False, 9.0, "no answer")]
        if how == "waited":
            await found.straighten(far.own, member(far, nat), 0.1)
        with trio.fail_after(ENOUGH):
            await found.straighten(far.own, member(far, nat), 2 * ENOUGH)
        assert near.peers()[far.own] == "relayed"
        elsewhere = replace(member(far, "cone"), reach=None)
        assert found.behind_relays([elsewhere]) == (set() if how == "symmetric" else {far.own})
        found.wake()
        assert found.behind_relays([elsewhere]) == set(), "another network, another NAT"


async def test_more_than_a_relay_carries_is_not_begun(tmp_path: Path) -> None:
    async with relayed(RelayLimits(circuit_bytes=10_000_000)) as (near, _, far):
        found = connectivity(near, tmp_path)
        found.serve(lambda handler: handler)
        await near.disconnect(far.own)
        relay = next(peer for peer in near.peers())
        assert near.through is not None
        await near.through(relay, far.own)
        found.bulk = 4_000_000
        await found.straighten(far.own, member(far, "symmetric"), 0.1)
        found.bulk = 5_000_000
        with pytest.raises(RelayBudgetError, match="10 MB"):
            await found.straighten(far.own, member(far, "symmetric"), 0.1)
