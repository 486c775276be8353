"""What one who asks for more than anybody needs may still cost: on real hosts, whatever it asks for.

The rule: it is refused before its bytes are looked at, then blamed, then banned, and with that its connection is closed; and
who shares its address goes on.
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message

from nolocod.errors import PeerUnavailableError, RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.discovery.kademlia import PROTOCOL as DHT
from nolocod.p2p.discovery.kademlia import open_dht, provider_key
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.limits.connection_manager import ConnectionLimits
from nolocod.p2p.limits.rate_limits import BANNED, Rate
from nolocod.p2p.mesh import open_mesh
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.p2p.transport.stream import GOSSIP, PING
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, RunId, seal
from nolocod.units import Address
from tests.support.strangers import calling
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

HERE = (Address("127.0.0.1", 0),)
FEW = HostLimits(connect=ENOUGH, negotiate=ENOUGH, inbound=ConnectionLimits(arrivals=Rate(0.001, 40)))


@asynccontextmanager
async def victim(bans_after: int = 1 << 30) -> AsyncIterator[tuple[Host, list[PeerId]]]:
    """A host, and whom it has blamed for a flood; it bans who was blamed so often."""
    blamed = list[PeerId]()
    async with open_host(Identity.generate(), HERE, (), lambda _: None, FEW) as host:
        host.judge = lambda peer, error: None if error else blamed.append(peer)
        host.refuses = lambda peer: blamed.count(peer) >= bans_after
        yield host, blamed


def port(host: Host) -> int:
    return int(host.announced[0].rpartition("/")[2])


async def test_streams_beyond_a_rate_are_refused_before_they_are_negotiated() -> None:
    async with victim() as (host, blamed), calling(port(host), Identity.generate()) as stranger:
        async with stranger.muxed(host.own) as muxed:
            with trio.fail_after(ENOUGH):
                while not blamed:
                    await (await muxed.open_stream()).reset()  # nothing is ever said on it
        assert set(blamed) == {stranger.identity.peer_id}


async def test_who_floods_until_it_is_banned_is_cut_off_and_its_address_lets_in_fewer() -> None:
    async with victim(bans_after=3) as (host, _):
        for number in (1, 2):
            async with calling(port(host), Identity.generate()) as stranger, stranger.muxed(host.own) as muxed:
                with trio.fail_after(ENOUGH):
                    while not muxed.is_closed:
                        with suppress(Exception):
                            await (await muxed.open_stream()).reset()
            await until(lambda: not host.peers())
            assert host.dialer.connection_manager.turned_away == 0, number
        async with calling(port(host), Identity.generate()) as neighbour:
            assert not await neighbour.socket.receive_some(1), "two bans were paid for with sixty arrivals"
        async with calling(port(host), Identity.generate(), "127.0.0.9") as other, other.muxed(host.own):
            await until(lambda: other.identity.peer_id in host.peers())


async def test_a_banned_one_comes_often_enough_to_be_told_why_and_no_more() -> None:
    async with victim(bans_after=0) as (host, _):
        identity, told = Identity.generate(), 0
        with trio.fail_after(ENOUGH), suppress(Exception):
            while True:
                async with calling(port(host), identity) as stranger, stranger.muxed(host.own) as muxed:
                    await (await muxed.open_stream()).reset()
                    told += 1
        assert told <= BANNED.burst + 2
        assert host.dialer.connection_manager.turned_away == 0, "others of its address do come"
        async with calling(port(host), Identity.generate()) as another, another.muxed(host.own) as muxed:
            with trio.fail_after(ENOUGH):
                while not muxed.is_closed:
                    with suppress(Exception):
                        await (await muxed.open_stream()).reset()


async def test_a_partner_goes_on_when_those_of_its_address_have_had_their_share() -> None:
    async with victim() as (host, _):
        partner, number = PeerId("partner"), 0
        host.memory.is_partner = lambda peer: peer == partner
        while host.may_open(PeerId(f"stranger {number}"), "203.0.113.0/24"):
            number += 1
        assert host.may_open(partner, "203.0.113.0/24")


async def test_pings_on_one_stream_are_answered_with_a_pause() -> None:
    async with victim() as (host, _), open_host(Identity.generate(), HERE, (), lambda _: None) as guest:
        stream = await guest.open_stream(host.own, PING, host.announced)
        began = trio.current_time()
        await stream.write(bytes(96))
        assert await stream.read_exactly(96) == bytes(96)
        assert trio.current_time() - began >= 2.0
        await stream.reset()


async def test_the_dht_answers_one_question_of_a_stream() -> None:
    run = RunId("ab" * 32)
    async with victim() as (host, _), open_dht(host, run), open_host(Identity.generate(), HERE, (), lambda _: None) as guest:
        stream = await guest.open_stream(host.own, DHT, host.announced)
        for _ in range(2):
            await send_message(stream, Message(type=Message.GET_PROVIDERS, key=provider_key(run)))
        with trio.fail_after(ENOUGH):
            await receive_message(stream, Message, 1 << 16)
            with pytest.raises(RemoteError):
                await receive_message(stream, Message, 1 << 16)


async def test_each_protocol_has_a_rate_of_its_own() -> None:
    async def nothing(_: object) -> None: ...

    async with victim() as (host, blamed), open_host(Identity.generate(), HERE, (), lambda _: None) as guest:
        host.serve("/test/rare", nothing, Rate(0.001, 3))
        host.serve("/test/other", nothing)
        for _ in range(3):
            await (await guest.open_stream(host.own, "/test/rare", host.announced)).finish(ENOUGH)
        with pytest.raises(PeerUnavailableError):
            await (await guest.open_stream(host.own, "/test/rare")).read_exactly(1)
        await until(lambda: blamed == [guest.own])
        await (await guest.open_stream(host.own, "/test/other")).finish(ENOUGH)
        assert len(blamed) == 1


async def test_who_gossips_again_and_again_is_not_heard_though_it_asks_seldom(tmp_path: Path) -> None:
    """Three questions a beat are more than anybody has; of other things ten a second are not."""
    run = seal(Manifest(name="t", model={"model_type": "llama"}), Identity.generate())
    config, me, evil = MeshSettings(tmp_path, listen=HERE, upnp=False), Identity.generate(), Identity.generate()
    timing, terms = Timing(heartbeat=6000.0), Terms(evil, run.run_id, ENOUGH)
    async with (
        open_mesh(config, me, lambda _: None, rng=random.Random(1), timing=timing) as mesh,
        open_host(evil, HERE, (), lambda _: None) as guest,
    ):
        await mesh.enter(run, lambda: (Standing(1, 1, 5.0), "training"))

        async def heard() -> bool:
            with suppress(PeerUnavailableError):
                stream = await guest.open_stream(me.peer_id, GOSSIP, mesh._host.announced)
                await ask(stream, pb.Body(gossip=pb.Gossip(answer=True)), terms, "gossip")
                return True
            return False

        while await heard():
            pass
        await trio.sleep(0.5)
        assert not await heard()
