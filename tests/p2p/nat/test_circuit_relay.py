"""Circuits through a third node, on real sockets: what is carried, what is refused, what ends with what."""

from __future__ import annotations

import hashlib
import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import OK, HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as WirePeer

from nolocod.errors import PeerUnavailableError, RefusedError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, Relaying
from nolocod.p2p.host import HostLimits, open_host
from nolocod.p2p.limits.connection_manager import MEMBER, PARTNER, STRANGER
from nolocod.p2p.nat.circuit_relay import HOP, STOP, Relay, RelayClient, RelayLimits
from nolocod.p2p.transport.multiaddrs import through
from nolocod.units import Address
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

ECHO = "/test/echo"
SINK = "/test/sink"
PIECE = 1 << 20


class End:
    """A node that reaches others only through the relay."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.client = RelayClient(host)
        self.client.serve()
        self.received: list[bytes] = []
        self.fed = trio.Event()
        host.serve(ECHO, self.echo)
        host.serve(SINK, self.sink)

    async def echo(self, stream: Stream) -> None:
        while data := await stream.arrived(None):
            await stream.write(memoryview(data))

    async def sink(self, stream: Stream) -> None:
        digest = hashlib.sha256()
        while data := await stream.arrived(None):
            digest.update(data)
        self.received.append(digest.digest())
        self.fed.set()


@asynccontextmanager
async def node(seed: int, limits: HostLimits | None = None) -> AsyncIterator[Host]:
    identity = Identity.from_secret(bytes([seed]) * 32)
    async with open_host(identity, (Address("127.0.0.1", 0),), (), lambda _: None, limits) as host:
        yield host


@asynccontextmanager
async def three(
    limits: RelayLimits | None = None, middles: HostLimits | None = None
) -> AsyncIterator[tuple[Relay, Host, End, End]]:
    """A relay and two ends that are connected to it, and hold no reservation."""
    async with node(1, middles) as middle, node(2) as first, node(3) as second:
        relay = Relay(middle, limits)
        relay.serve()
        for end in (first, second):
            await end.connect(middle.own, middle.addresses)
        yield relay, middle, End(first), End(second)


async def test_a_circuit_carries_streams_both_ways_sealed_between_its_ends() -> None:
    async with three() as (relay, middle, alice, bob):
        assert 3500 < await bob.client.reserve(middle.own) <= 3600
        await alice.client.connect(middle.own, bob.host.own)
        assert alice.host.peers()[bob.host.own] == bob.host.peers()[alice.host.own] == "relayed"
        content = random.Random(1).randbytes(3 * PIECE + 7)
        stream = await alice.host.open_stream(bob.host.own, SINK)
        await stream.write(content)
        await stream.close()
        with trio.fail_after(ENOUGH):
            await bob.fed.wait()
        assert bob.received == [hashlib.sha256(content).digest()]
        back = await bob.host.open_stream(alice.host.own, ECHO)
        await back.write(b"from behind")
        assert await back.read_exactly(11) == b"from behind"
        assert relay.bytes_carried > len(content), "what the relay carries is sealed, and so a little longer"


async def test_without_a_reservation_nobody_is_reached() -> None:
    async with three() as (relay, middle, alice, bob):
        with pytest.raises(RefusedError, match="NO_RESERVATION"):
            await alice.client.connect(middle.own, bob.host.own)
        assert relay.refused == 1
        assert bob.host.own not in alice.host.peers()


async def test_a_relay_that_is_connected_through_another_one_is_dialled_straight_to_be_used() -> None:
    async with three() as (_, middle, alice, bob), node(4) as guest:
        await bob.client.reserve(middle.own)
        await alice.client.connect(middle.own, bob.host.own)
        Relay(bob.host).serve()
        await guest.connect(bob.host.own, bob.host.addresses)
        carol = End(guest)
        await carol.client.reserve(bob.host.own)
        assert not alice.host.straight(bob.host.own)
        alice.host.through = alice.client.connect
        await alice.host.connect(guest.own, [through(bob.host.own, bob.host.addresses[0])])
        assert alice.host.peers()[guest.own] == "relayed"
        assert alice.host.straight(bob.host.own)


@pytest.mark.parametrize("limits", [RelayLimits(reservations=1), RelayLimits(reservations_per_address=1)])
async def test_a_reservation_ends_with_its_holders_connection_and_makes_room(limits: RelayLimits) -> None:
    """In all, and at the address that both come from."""
    async with three(limits) as (_, middle, alice, bob):
        await bob.client.reserve(middle.own)
        with pytest.raises(RefusedError, match="RESERVATION_REFUSED"):
            await alice.client.reserve(middle.own)
        await bob.client.reserve(middle.own)  # its own again: renewed
        await bob.host.disconnect(middle.own)
        await until(lambda: not middle.connected(bob.host.own))
        assert await alice.client.reserve(middle.own) > 0


@asynccontextmanager
async def ranked(limits: RelayLimits, **ranks: int) -> AsyncIterator[tuple[Relay, Host, list[End]]]:
    """A relay, and ends to which it is connected; `ranks` are what these are to it."""
    async with AsyncExitStack() as stack:
        middle = await stack.enter_async_context(node(1))
        relay = Relay(middle, limits)
        relay.serve()
        ends = [End(await stack.enter_async_context(node(seed))) for seed, _ in enumerate(ranks, 2)]
        of = dict(zip([end.host.own for end in ends], ranks.values(), strict=True))
        middle.dialer.connection_manager.rank = lambda peer: of.get(peer, STRANGER)
        for end in ends:
            await end.host.connect(middle.own, middle.addresses)
        yield relay, middle, ends


async def test_members_take_the_reservations_of_strangers_and_partners_those_of_members() -> None:
    """Of two places strangers have one."""
    of = ranked(RelayLimits(reservations=2), ann=STRANGER, eve=STRANGER, bob=MEMBER, cat=MEMBER, dan=MEMBER, fay=PARTNER)
    async with of as (_, middle, (ann, eve, bob, cat, dan, fay)):
        await ann.client.reserve(middle.own)
        with pytest.raises(RefusedError, match="RESERVATION_REFUSED"):
            await eve.client.reserve(middle.own)
        await bob.client.reserve(middle.own)
        await cat.client.reserve(middle.own)
        await until(lambda: not ann.host.connected(middle.own))  # it looks for another relay
        with pytest.raises(RefusedError, match="RESERVATION_REFUSED"):
            await dan.client.reserve(middle.own)
        await bob.client.reserve(middle.own)  # its own again
        await fay.client.reserve(middle.own)
        await until(lambda: bob.host.connected(middle.own) != cat.host.connected(middle.own))


async def test_at_one_address_a_member_takes_a_strangers_reservation_though_there_is_room() -> None:
    limits = RelayLimits(reservations=16, reservations_per_address=1)
    async with ranked(limits, ann=STRANGER, bob=MEMBER, cat=MEMBER) as (_, middle, (ann, bob, cat)):
        await ann.client.reserve(middle.own)
        await bob.client.reserve(middle.own)
        await until(lambda: not ann.host.connected(middle.own))
        with pytest.raises(RefusedError, match="RESERVATION_REFUSED"):
            await cat.client.reserve(middle.own)


async def test_members_take_the_circuits_of_strangers() -> None:
    """Though these are in use; of two circuits strangers have one, with a member at the other end too."""
    limits = RelayLimits(circuits=2)
    async with ranked(limits, ann=STRANGER, eve=STRANGER, bob=MEMBER, cat=MEMBER, dan=MEMBER) as (_, middle, ends):
        ann, eve, bob, cat, dan = ends
        await bob.client.reserve(middle.own)
        await ann.client.connect(middle.own, bob.host.own)
        stream = await ann.host.open_stream(bob.host.own, SINK)
        await stream.write(bytes(PIECE))
        with pytest.raises(RefusedError, match="RESOURCE_LIMIT_EXCEEDED"):
            await eve.client.connect(middle.own, bob.host.own)
        await cat.client.connect(middle.own, bob.host.own)
        assert ann.host.connected(bob.host.own)
        await dan.client.connect(middle.own, bob.host.own)
        await until(lambda: not ann.host.connected(bob.host.own))
        assert cat.host.connected(bob.host.own)


async def test_for_members_only_a_relay_gives_strangers_nothing_and_takes_back_what_one_had_as_a_member() -> None:
    async with ranked(RelayLimits(), ann=STRANGER, bob=MEMBER) as (relay, middle, (ann, bob)):
        relay.strangers = 0
        await bob.client.reserve(middle.own)
        for asked in (ann.client.reserve(middle.own), ann.client.connect(middle.own, bob.host.own)):
            with pytest.raises(RefusedError, match="PERMISSION_DENIED"):
                await asked
        manager = middle.dialer.connection_manager
        manager.rank = {ann.host.own: MEMBER, bob.host.own: STRANGER}.__getitem__
        with pytest.raises(RefusedError, match="NO_RESERVATION"):
            await ann.client.connect(middle.own, bob.host.own)


async def test_a_member_that_a_relay_takes_for_a_stranger_introduces_itself_once() -> None:
    async with ranked(RelayLimits(), ann=STRANGER, bob=STRANGER) as (relay, middle, (ann, bob)):
        relay.strangers, members, introduced = 0, set[PeerId](), list[PeerId]()
        middle.dialer.connection_manager.rank = lambda peer: MEMBER if peer in members else STRANGER

        def introducing(end: End, *, known: bool) -> Callable[[PeerId], Awaitable[None]]:
            async def introduce(relay: PeerId) -> None:
                introduced.append(relay)
                members.update([end.host.own] if known else [])

            return introduce

        ann.client.introduce, bob.client.introduce = introducing(ann, known=True), introducing(bob, known=False)
        assert await ann.client.reserve(middle.own) > 0
        with pytest.raises(RefusedError, match="PERMISSION_DENIED"):
            await bob.client.connect(middle.own, ann.host.own)
        assert introduced == [middle.own, middle.own], "one that is none after all is not asked for ever"


async def test_one_circuits_end_is_not_another_ones() -> None:
    async with three() as (_, middle, alice, bob), node(4) as third:
        carol = End(third)
        await third.connect(middle.own, middle.addresses)
        await bob.client.reserve(middle.own)
        for end in (alice, carol):
            await end.client.connect(middle.own, bob.host.own)
        await alice.host.disconnect(bob.host.own)
        stream = await carol.host.open_stream(bob.host.own, ECHO)
        await stream.write(b"still here")
        assert await stream.read_exactly(10) == b"still here"


async def test_a_circuit_over_its_bytes_ends_and_the_connection_to_the_relay_stays() -> None:
    async with three(RelayLimits(circuit_bytes=PIECE)) as (_, middle, alice, bob):
        await bob.client.reserve(middle.own)
        await alice.client.connect(middle.own, bob.host.own)
        stream = await alice.host.open_stream(bob.host.own, SINK)
        with pytest.raises(PeerUnavailableError), trio.fail_after(ENOUGH):
            await stream.write(bytes(64 * PIECE))
        assert bob.received == []
        assert alice.host.connected(middle.own)
        assert bob.host.connected(middle.own)


async def test_no_more_circuits_than_allowed() -> None:
    async with three(RelayLimits(circuits_per_peer=1)) as (_, middle, alice, bob), node(4) as third:
        carol = End(third)
        await third.connect(middle.own, middle.addresses)
        await bob.client.reserve(middle.own)
        await alice.client.connect(middle.own, bob.host.own)
        with pytest.raises(RefusedError, match="RESOURCE_LIMIT_EXCEEDED"):
            await carol.client.connect(middle.own, bob.host.own)


GARBAGE = [b"\xff\xff\xff\xff\xff", b"\x85\x40" + bytes(64), b"\x03\xff\xff\xff", b"\x04\x08\x01\x12\x00"]
"""A length without end, one too long, no protobuf, a circuit to nobody."""


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_costs_a_stream_and_no_more(garbage: bytes) -> None:
    async with three() as (_, middle, alice, _):
        stream = await alice.host.open_stream(middle.own, HOP)
        await stream.write(garbage)
        with pytest.raises(PeerUnavailableError), trio.fail_after(ENOUGH):
            await stream.read_exactly(1)
        assert middle.faults == 1
        assert await alice.client.reserve(middle.own) > 0


@pytest.mark.parametrize("name", [b"\x01", b"\xff" * 64, b"\x12\x20" + bytes(3)])
async def test_a_circuit_from_what_is_no_peer_costs_a_stream_and_no_more(name: bytes) -> None:
    async with three() as (_, middle, _, bob):
        stream = await middle.open_stream(bob.host.own, STOP)
        message = StopMessage(type=StopMessage.CONNECT, peer=WirePeer(id=name)).SerializeToString()
        await stream.write(bytes([len(message)]) + message)
        with pytest.raises(PeerUnavailableError), trio.fail_after(ENOUGH):
            await stream.read_exactly(1)
        assert bob.host.faults == 1
        assert await bob.client.reserve(middle.own) > 0


async def test_a_target_that_never_answers_costs_the_relay_no_stream() -> None:
    async with three(RelayLimits(answer_seconds=1.0)) as (_, middle, alice, bob):
        pending, gone = trio.Event(), trio.Event()

        async def never(stream: Stream) -> None:
            pending.set()
            with suppress(PeerUnavailableError):
                while await stream.arrived(None):
                    pass
            gone.set()

        await bob.client.reserve(middle.own)
        bob.host.serve(STOP, never)
        with pytest.raises(RefusedError, match="CONNECTION_FAILED"):
            await alice.client.connect(middle.own, bob.host.own)
        assert pending.is_set()
        with trio.fail_after(ENOUGH):
            await gone.wait()


async def test_a_circuit_may_be_quiet_for_longer_than_the_deadline_on_progress() -> None:
    async with three(middles=HostLimits(progress=0.5)) as (_, middle, alice, bob):
        await bob.client.reserve(middle.own)
        await alice.client.connect(middle.own, bob.host.own)
        await trio.sleep(1.0)
        stream = await alice.host.open_stream(bob.host.own, ECHO)
        await stream.write(b"still here")
        assert await stream.read_exactly(10) == b"still here"


async def test_an_end_that_breaks_off_is_no_clean_end_for_one_that_has_said_all() -> None:
    async with three() as (_, middle, alice, bob):

        async def break_off(stream: Stream) -> None:
            await stream.arrived(None)
            answer = StopMessage(type=StopMessage.STATUS, status=OK).SerializeToString()
            await stream.write(bytes([len(answer)]) + answer)
            assert await stream.arrived(None) == b"all"
            while await stream.arrived(None):
                pass
            await stream.write(b"half")
            await stream.reset()

        bob.host.serve(STOP, break_off)
        await bob.client.reserve(middle.own)
        stream = await alice.host.open_stream(middle.own, HOP)
        request = HopMessage(type=HopMessage.CONNECT, peer=WirePeer(id=ID.from_string(bob.host.own).to_bytes()))
        await stream.write(bytes([request.ByteSize()]) + request.SerializeToString())
        assert await stream.arrived(None)
        await stream.write(b"all")
        await stream.close()
        with pytest.raises(PeerUnavailableError), trio.fail_after(ENOUGH):
            await stream.read_exactly(5)  # it may have four


async def test_circuits_keep_to_one_rate_and_share_it() -> None:
    rate = 1 << 18  # far less than a busy machine moves
    async with three(RelayLimits(rate=rate)) as (relay, middle, alice, bob), node(4) as third:
        carol = End(third)
        await third.connect(middle.own, middle.addresses)
        await bob.client.reserve(middle.own)
        moved = {alice: 0, carol: 0}

        async def pour(end: End) -> None:
            await end.client.connect(middle.own, bob.host.own)
            streams = [await end.host.open_stream(bob.host.own, ECHO) for _ in range(2 if end is alice else 1)]

            async def feed(stream: Stream) -> None:
                while True:
                    await stream.write(bytes(8192))

            async def drain(stream: Stream) -> None:
                while True:
                    moved[end] += len(await stream.arrived(None))

            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(feed, stream)
                    nursery.start_soon(drain, stream)

        began = trio.current_time()
        with trio.move_on_after(3.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pour, alice)
                nursery.start_soon(pour, carol)
        spent = trio.current_time() - began
        assert 0.5 * rate * spent < relay.bytes_carried < rate * (spent + 0.3)
        assert moved[carol] > 0.25 * moved[alice], "two streams on one circuit are no two circuits"


async def test_a_relay_gives_while_it_is_willing_and_tells_what() -> None:
    async with three() as (relay, middle, alice, bob), trio.open_nursery() as nursery:
        told: list[Event] = []
        await bob.client.reserve(middle.own)
        relay.willing = lambda: False
        with pytest.raises(RefusedError, match="PERMISSION_DENIED"):
            await alice.client.connect(middle.own, bob.host.own)
        with pytest.raises(RefusedError, match="PERMISSION_DENIED"):
            await alice.client.reserve(middle.own)
        relay.willing = lambda: True
        await alice.client.reserve(middle.own)
        nursery.start_soon(relay.run, told.append)  # from now on: it tells what is new every three seconds
        await until(lambda: told)
        assert told == [Relaying(reservations=2, open=0, circuits=0, bytes=0)]
        nursery.cancel_scope.cancel()


async def test_no_reservation_over_a_circuit() -> None:
    async with three() as (_, middle, alice, bob):
        second = Relay(bob.host)
        second.serve()
        await bob.client.reserve(middle.own)
        await alice.client.connect(middle.own, bob.host.own)
        with pytest.raises(RefusedError, match="PERMISSION_DENIED"):
            await alice.client.reserve(bob.host.own)


async def test_both_ends_know_what_their_circuit_may_carry() -> None:
    async with three(RelayLimits(circuit_bytes=PIECE)) as (_, middle, alice, bob):
        assert alice.client.carries(bob.host.own) is None
        await bob.client.reserve(middle.own)
        await alice.client.connect(middle.own, bob.host.own)
        assert alice.client.carries(bob.host.own) == bob.client.carries(alice.host.own) == PIECE


async def test_a_circuit_that_is_not_used_makes_room_for_another_one() -> None:
    limits = RelayLimits(circuits_per_peer=1, idle_seconds=0.2)
    async with three(limits) as (_, middle, alice, bob), node(4) as third:
        carol = End(third)
        await third.connect(middle.own, middle.addresses)
        await bob.client.reserve(middle.own)
        await alice.client.connect(middle.own, bob.host.own)
        stream = await alice.host.open_stream(bob.host.own, SINK)
        await stream.write(bytes(PIECE))
        await trio.sleep(0.3)
        with pytest.raises(RefusedError, match="RESOURCE_LIMIT_EXCEEDED"):
            await carol.client.connect(middle.own, bob.host.own)  # a megabyte a moment ago is no idleness
        await alice.host.disconnect(bob.host.own)
        await until(lambda: not bob.host.connected(alice.host.own))
        await carol.client.connect(middle.own, bob.host.own)
        await trio.sleep(0.3)
        await alice.client.connect(middle.own, bob.host.own)
        await until(lambda: not carol.host.connected(bob.host.own))
        assert alice.host.peers()[bob.host.own] == "relayed"
