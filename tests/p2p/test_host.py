"""The host on real sockets: connections, streams, limits, and what a failure is called."""

from __future__ import annotations

import random
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.utils import read_exactly
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from nolocod.errors import (
    DiskFullError,
    PeerTooSlowError,
    PeerUnavailableError,
    PortTakenError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, PeerConnected, PeerDisconnected
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.limits.rate_limits import DialLimiter
from nolocod.p2p.transport.listen_addresses import announced
from nolocod.p2p.transport.multiaddrs import dialable, split
from nolocod.units import Address
from tests.support.wires import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from libp2p.abc import INetStream

    from nolocod.p2p.transport.stream import Stream

LOOPBACK = Address("127.0.0.1", 0)
ECHO = "/test/echo"
SHORT = HostLimits(connect=2.0, negotiate=2.0, progress=0.5, linger=0.5)


@asynccontextmanager
async def hosts(count: int, limits: HostLimits = SHORT) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_host(Identity.generate(), (LOOPBACK,), (), lambda event: None, limits))
            for _ in range(count)
        ]


async def echo(stream: Stream) -> None:
    size = int.from_bytes(await stream.read_exactly(4), "big")
    await stream.write(await stream.read_exactly(size))


async def roundtrip(stream: Stream, content: bytes) -> bytes:
    await stream.write(len(content).to_bytes(4, "big") + content)
    answer = await stream.read_exactly(len(content))
    await stream.close()
    return answer


def books(host: Host) -> int:
    """Streams that libp2p still keeps an account of."""
    swarm = host.basic.get_network()
    return sum(
        len(connection.muxed_conn.streams) + len(connection.streams)
        for connections in swarm.connections.values()
        for connection in connections
    )


async def test_streams_carry_bytes_both_ways_and_leave_nothing_behind() -> None:
    async with hosts(2) as (ann, bob):
        bob.serve(ECHO, echo)
        content = random.Random(0).randbytes(1_500_000)
        stream = await ann.open_stream(bob.own, ECHO, bob.announced)
        assert stream.remote == bob.own
        sent = content + b"!"
        view = memoryview(bytearray(len(sent)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, len(sent).to_bytes(4, "big") + sent)
            await stream.read_into(view)
        await stream.close()
        assert view == sent
        for _ in range(20):
            assert await roundtrip(await ann.open_stream(bob.own, ECHO), b"hello") == b"hello"
        await until(lambda: books(ann) == books(bob) == 0)
        assert ann.peers() == {bob.own: "direct"}
        assert bob.peers() == {ann.own: "inbound"}


async def test_libp2p_as_it_is_shipped_on_the_other_side() -> None:
    content = random.Random(9).randbytes(400_000)

    async def stock_echo(stream: INetStream) -> None:
        size = int.from_bytes(await read_exactly(stream, 4), "big")
        await stream.write(await read_exactly(stream, size))
        await stream.close()

    stock = new_host(key_pair=create_new_key_pair(Identity.generate().secret))
    async with hosts(1) as (ann,), stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        ann.serve(ECHO, echo)
        stock.set_stream_handler(ECHO, stock_echo)
        address = str(stock.get_transport_addrs()[0])
        stream = await ann.open_stream(PeerId(str(stock.get_id())), ECHO, [address])
        assert await roundtrip(stream, content) == content
        await ann.disconnect(PeerId(str(stock.get_id())))
        await until(lambda: not stock.get_network().connections)
        await stock.connect(info_from_p2p_addr(Multiaddr(ann.addresses[0])))
        raw = await stock.new_stream(ID.from_string(ann.own), [ECHO])
        await raw.write(len(content).to_bytes(4, "big") + content)
        assert await read_exactly(raw, len(content)) == content
        await raw.close()


async def test_nothing_is_offered_but_noise_and_yamux() -> None:
    async with hosts(1) as (ann,):
        upgrader = ann.basic.get_network().upgrader
        assert list(upgrader.security_multistream.transports) == ["/noise"]
        assert list(upgrader.muxer_multistream.transports) == ["/yamux/1.0.0"]


async def test_a_stream_that_is_reset_when_all_is_cancelled_leaves_nothing_behind() -> None:
    async with hosts(2) as (ann, bob):
        bob.serve(ECHO, echo)
        stream = await ann.open_stream(bob.own, ECHO, bob.addresses)
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.reset()
        await until(lambda: books(ann) == books(bob) == 0)


async def test_many_streams_at_once() -> None:
    async with hosts(2) as (ann, bob):
        bob.serve(ECHO, echo)
        answers: list[bytes] = []

        async def one(number: int) -> None:
            answers.append(await roundtrip(await ann.open_stream(bob.own, ECHO, bob.announced), bytes([number]) * 1000))

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(one, number)
        assert sorted(answers) == [bytes([number]) * 1000 for number in range(16)]
        assert sum(len(connections) for connections in ann.basic.get_network().connections.values()) == 1, "one dial for all"


async def test_connections_are_told_once_each() -> None:
    told: list[Event] = []
    async with open_host(Identity.generate(), (LOOPBACK,), (), told.append) as ann:
        async with hosts(1) as (bob,):
            await ann.connect(bob.own, bob.announced)
            await ann.connect(bob.own, bob.announced)
            await until(lambda: PeerConnected(bob.own, "direct") in told)
        await until(lambda: PeerDisconnected(bob.own) in told)
        assert told == [PeerConnected(bob.own, "direct"), PeerDisconnected(bob.own)]
        assert ann.peers() == {}


async def test_a_dial_names_its_cause() -> None:
    async with hosts(2) as (ann, bob):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            closed = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}"
            with pytest.raises(PeerUnavailableError, match="refused"):
                await ann.connect(bob.own, [closed])
            unused.listen()  # somebody who never says a word
            with pytest.raises(PeerTooSlowError, match="no progress"):
                await ann.connect(bob.own, [closed])
        stranger = Identity.generate().peer_id
        with pytest.raises(PeerUnavailableError, match="another peer"):
            await ann.connect(stranger, bob.announced)
        with pytest.raises(PeerUnavailableError, match="no address"):
            await ann.connect(stranger, ["/ip4/0.0.0.0/tcp/1"])
        with pytest.raises(PeerUnavailableError, match="ourselves"):
            await ann.connect(ann.own, ann.announced)
        with pytest.raises(RefusedError, match="protocol"):
            await ann.open_stream(bob.own, "/test/unknown", bob.announced)


async def test_something_else_than_libp2p_answers() -> None:
    async def web(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await stream.aclose()

    async with hosts(1) as (ann,), trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, web, listeners)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(PeerUnavailableError, match="not a libp2p node"):
            await ann.connect(Identity.generate().peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
        nursery.cancel_scope.cancel()


async def test_the_second_address_is_tried_and_a_failure_is_not_remembered() -> None:
    async with hosts(2) as (ann, bob):
        dead = "/ip4/127.0.0.1/tcp/1"
        with pytest.raises(PeerUnavailableError):
            await ann.connect(bob.own, [dead])
        await ann.connect(bob.own, [dead, *bob.announced])
        assert bob.own in ann.peers()


async def test_a_dial_that_lost_to_another_address_was_not_in_vain_and_one_that_ran_out_of_time_was() -> None:
    outcomes = []

    class Noted(DialLimiter):
        def answered(self, host: str, now: float) -> None:
            outcomes.append("answered")

        def overtaken(self, host: str, now: float) -> None:
            outcomes.append("overtaken")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
        async with hosts(2, replace(SHORT, connect=1.0)) as (ann, bob):
            ann.dialer._dial_limiter = Noted()
            await ann.connect(bob.own, [mute, *bob.announced])
            assert sorted(outcomes) == ["answered", "overtaken"]
            outcomes.clear()
            with pytest.raises(PeerTooSlowError):
                await ann.connect(Identity.generate().peer_id, [mute])
            assert outcomes == []


async def test_a_silent_peer_is_too_slow_and_an_early_end_is_unavailable() -> None:
    async with hosts(2) as (ann, bob):
        asked = trio.Event()

        async def silent(stream: Stream) -> None:
            asked.set()
            await trio.sleep_forever()

        async def short(stream: Stream) -> None:
            await stream.write(b"abc")

        bob.serve("/test/silent", silent)
        bob.serve("/test/short", short)
        stream = await ann.open_stream(bob.own, "/test/silent", bob.announced)
        with pytest.raises(PeerTooSlowError):
            await stream.read_exactly(1)
        assert asked.is_set()
        stream = await ann.open_stream(bob.own, "/test/short")
        with pytest.raises(PeerUnavailableError):
            await stream.read_exactly(4)


async def test_a_peer_that_takes_nothing_fails_the_write() -> None:
    async with hosts(2) as (ann, bob):

        async def deaf(stream: Stream) -> None:
            await trio.sleep_forever()

        bob.serve("/test/deaf", deaf)
        stream = await ann.open_stream(bob.own, "/test/deaf", bob.announced)
        with pytest.raises(PeerTooSlowError):
            await stream.write(bytes(8 << 20))  # more than libp2p's window


async def test_a_faulty_peer_loses_its_stream_and_nothing_else() -> None:
    async with hosts(2) as (ann, bob):

        async def strict(stream: Stream) -> None:
            await stream.read_exactly(1)
            raise ProtocolError("not like this.")

        bob.serve("/test/strict", strict)
        bob.serve(ECHO, echo)
        stream = await ann.open_stream(bob.own, "/test/strict", bob.announced)
        await stream.write(b"x")
        with pytest.raises(PeerUnavailableError):
            await stream.read_exactly(1)
        assert bob.faults == 1
        assert await roundtrip(await ann.open_stream(bob.own, ECHO), b"on we go") == b"on we go"


async def test_a_fault_of_our_own_stops_the_host() -> None:
    async def broken(stream: Stream) -> None:
        raise DiskFullError("full.")

    async with hosts(1) as (ann,):
        with pytest.RaisesGroup(DiskFullError, flatten_subgroups=True):
            async with open_host(Identity.generate(), (LOOPBACK,), (), lambda event: None, SHORT) as bob:
                bob.serve("/test/broken", broken)
                await ann.open_stream(bob.own, "/test/broken", bob.announced)
                await trio.sleep(5)
                pytest.fail("the host went on")


async def test_cancelled_passes_through_every_call() -> None:
    async with hosts(2) as (ann, bob):

        async def deaf(stream: Stream) -> None:
            await trio.sleep_forever()

        bob.serve("/test/deaf", deaf)
        bob.serve(ECHO, echo)
        with trio.CancelScope() as scope:
            scope.cancel()
            await ann.connect(bob.own, bob.announced)
        assert scope.cancelled_caught
        stream = await ann.open_stream(bob.own, "/test/deaf", bob.announced)
        for call in (stream.read_exactly(1), stream.write(b"x"), ann.open_stream(bob.own, ECHO)):
            with trio.CancelScope() as scope:
                scope.cancel()
                await call
            assert scope.cancelled_caught
        assert await roundtrip(await ann.open_stream(bob.own, ECHO), b"unharmed") == b"unharmed"


async def test_a_peer_may_have_so_many_streams_and_no_more() -> None:
    limits = HostLimits(streams_per_peer=3, progress=1.0, linger=0.5)
    async with hosts(2, limits) as (ann, bob):
        release = trio.Event()

        async def held(stream: Stream) -> None:
            await stream.write(b"1")
            await release.wait()

        bob.serve("/test/held", held)
        for _ in range(3):
            stream = await ann.open_stream(bob.own, "/test/held", bob.announced)
            assert await stream.read_exactly(1) == b"1"
        with pytest.raises(PeerUnavailableError):
            await (await ann.open_stream(bob.own, "/test/held")).read_exactly(1)
        release.set()


async def test_so_many_connections_and_no_more() -> None:
    limits = HostLimits(connections=3, connect=1.0, negotiate=1.0)
    async with open_host(Identity.generate(), (LOOPBACK,), (), lambda event: None, limits) as popular, hosts(4) as guests:
        for guest in guests[:3]:
            await guest.connect(popular.own, popular.announced)
        await until(lambda: len(popular.peers()) == 3)
        with pytest.raises(PeerUnavailableError):
            await guests[3].connect(popular.own, popular.announced)
        assert len(popular.peers()) == 3
        await guests[0].disconnect(popular.own)
        await until(lambda: len(popular.peers()) == 2)
        await guests[3].connect(popular.own, popular.announced)


async def test_a_taken_port_is_told() -> None:
    async with hosts(1) as (ann,):
        taken = Address("127.0.0.1", int(ann.announced[0].rpartition("/")[2]))
        with pytest.raises(PortTakenError, match=str(taken.port)):
            async with open_host(Identity.generate(), (taken,), (), lambda event: None):
                pytest.fail("opened a second time")


@pytest.mark.parametrize("listen", [Address("192.0.2.77", 0), Address("not-an-address", 0)])
async def test_an_address_of_another_machine_is_told(listen: Address) -> None:
    with pytest.raises(UsageError, match="--listen"):
        async with open_host(Identity.generate(), (listen,), (), lambda event: None):
            pytest.fail("opened")


def test_a_wildcard_is_never_announced() -> None:
    told = announced([Address("0.0.0.0", 7)])
    assert told
    assert all(dialable(address) and "0.0.0.0" not in address for address in told)
    assert announced([Address("127.0.0.1", 7)]) == ("/ip4/127.0.0.1/tcp/7",)


@pytest.mark.parametrize("address", ["203.0.113.5:4001", "/ip4/203.0.113.5/tcp/99999", "/ip4/0.0.0.0/tcp/4001", ""])
async def test_what_nobody_could_dial_is_not_announced(address: str) -> None:
    """The first peer that asked who we are would otherwise have stopped the node."""
    with pytest.raises(UsageError, match="--announce"):
        async with open_host(Identity.generate(), (Address("127.0.0.1", 0),), (address,), lambda event: None):
            pytest.fail("opened")


async def test_announce_replaces_what_others_are_told() -> None:
    override = "/dns4/node.example.org/tcp/9"
    async with open_host(Identity.generate(), (LOOPBACK,), (override,), lambda event: None) as ann:
        assert ann.addresses == (f"{override}/p2p/{ann.own}",)
        assert [str(address) for address in ann.basic.get_addrs()] == list(ann.addresses)


@pytest.mark.parametrize(
    "text",
    ["", "/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/udp/5/p2p/x", "/ip4/0.0.0.0/tcp/5/p2p/x", "/ip4/1.2.3.4/tcp/5/p2p/x"],
)
def test_a_bootstrap_address_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--bootstrap"):
        split(text)


def test_a_bootstrap_address() -> None:
    peer = Identity.generate().peer_id
    assert split(f"/dns4/example.org/tcp/5/p2p/{peer}") == (PeerId(peer), "/dns4/example.org/tcp/5")


async def test_a_dial_of_a_host_that_is_closing_is_an_error_of_ours() -> None:
    """libp2p's service starts nothing any more once it ends, and says so in an exception of its own."""
    async with hosts(2) as (alice, bob):
        stopping = False
        swarm = alice.basic.get_network()
        connect = alice.dialer._swarm.upgrade_outbound_raw_conn

        async def upgrade_and_stop(*arguments: object) -> object:
            nonlocal stopping
            swarm.manager.cancel()  # as closing does, between the handshake and the muxer
            stopping = True
            return await connect(*arguments)  # type: ignore[arg-type]  # its own

        alice.dialer._swarm.upgrade_outbound_raw_conn = upgrade_and_stop  # type: ignore[method-assign,assignment]
        with pytest.raises(PeerUnavailableError):
            await alice.connect(bob.own, bob.announced)
        assert stopping
