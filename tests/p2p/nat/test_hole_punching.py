"""From a relayed connection to a straight one by dialling both at once. Loopback needs no punching, and so shows all but
the NATs; what their being there changes is in tests/lab."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.dcutr import DCUtRProtocol
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits as StockLimits
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from nolocod.errors import RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, Punched
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.limits.connection_manager import ConnectionLimits, ConnectionManager
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.p2p.nat.hole_punching import DCUTR, HolePuncher, PunchLimits
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.dialer import Dialer
from nolocod.p2p.transport.exceptions import FOREIGN
from nolocod.p2p.transport.multiaddrs import through
from nolocod.units import Address
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from libp2p.abc import IHost
    from libp2p.network.swarm import Swarm

    from nolocod.p2p.transport.stream import Stream

LOOPBACK = (Address("127.0.0.1", 0),)
HIDDEN = ("/dns4/nowhere.invalid/tcp/1",)
ECHO = "/test/echo"
QUICK = PunchLimits(dialling=0.5)
"""For punches that come to nothing."""


@dataclass
class Node:
    """Somebody whom only the relay has ever seen."""

    host: Host
    relay: Host
    puncher: HolePuncher
    told: list[Event] = field(default_factory=list)

    @property
    def circuit(self) -> tuple[str, ...]:
        return (through(self.relay.own, self.relay.announced[0]),)

    @property
    def port(self) -> int:
        found = self.host.dialer.port("127.0.0.1")
        assert found is not None
        return found

    def punches(self) -> list[Punched]:
        return [event for event in self.told if isinstance(event, Punched)]


@asynccontextmanager
async def two(limits: PunchLimits | None = None) -> AsyncIterator[tuple[Node, Node]]:
    async with AsyncExitStack() as stack:

        async def opened(announce: tuple[str, ...], seed: int) -> Host:
            identity, short = Identity.from_secret(bytes([seed]) * 32), HostLimits(connect=3.0, negotiate=3.0)
            return await stack.enter_async_context(open_host(identity, LOOPBACK, announce, lambda _: None, short))

        middle = await opened((), 1)
        Relay(middle).serve()
        nodes = []
        for seed in (2, 3):
            host = await opened(HIDDEN, seed)
            host.announce((), HIDDEN)  # not even its interfaces' addresses are known: it is punched to where the relay sees it
            host.serve(ECHO, echo)
            told: list[Event] = []
            nodes.append(Node(host, middle, HolePuncher(host, told.append, limits), told))
            client = RelayClient(host)
            client.serve()
            host.through = client.connect
            host.vouch(middle.announced)
            await host.connect(middle.own, middle.announced)
        await RelayClient(nodes[1].host).reserve(middle.own)
        yield nodes[0], nodes[1]


async def echo(stream: Stream) -> None:
    while data := await stream.arrived(None):
        await stream.write(memoryview(data))


async def test_a_relayed_connection_becomes_a_straight_one_by_itself() -> None:
    async with two() as (ann, bob):
        for node in (ann, bob):
            node.puncher.serve()
        await ann.host.connect(bob.host.own, bob.circuit)
        with trio.fail_after(ENOUGH):
            await ann.host.straightened(bob.host.own)
            await bob.host.straightened(ann.host.own)
        assert ann.host.peers()[bob.host.own] == bob.host.peers()[ann.host.own] == "punched"
        stream = await ann.host.open_stream(bob.host.own, ECHO)
        assert stream.origin.reach == "punched"
        await stream.write(b"straight")
        assert await stream.read_exactly(8) == b"straight"
        await until(lambda: ann.punches() and bob.punches())
        for node, peer in ((ann, bob), (bob, ann)):
            (event,) = node.punches()
            assert (event.peer_id, event.succeeded, event.reason) == (peer.host.own, True, "")
        await until(lambda: len(ann.host.basic.get_network().get_connections(bob.host.basic.get_id())) == 1)
        assert not ann.host.dialer.expected
        assert not bob.host.dialer.expected


@pytest.mark.parametrize("head_start", [-0.05, 0.0, 0.05])
async def test_whoever_dials_first_the_one_agreed_upon_is_the_client(head_start: float) -> None:
    async with two() as (ann, bob):
        await ann.host.connect(bob.host.own, bob.circuit)
        worked: list[bool] = []

        async def dial(one: Node, other: Node, client: bool, delay: float) -> None:
            await trio.sleep(delay)
            worked.append(await one.host.punch(other.host.own, [("127.0.0.1", other.port)], ENOUGH, client=client))

        for client, server in ((ann, bob), (bob, ann)):
            async with trio.open_nursery() as nursery:
                # each expects the other from the beginning, as it does once both have told their addresses
                with (
                    client.host.dialer.expecting(server.host.own, [("127.0.0.1", server.port)], client=True),
                    server.host.dialer.expecting(client.host.own, [("127.0.0.1", client.port)], client=False),
                ):
                    nursery.start_soon(dial, client, server, True, max(0.0, -head_start))
                    nursery.start_soon(dial, server, client, False, max(0.0, head_start))
                    with trio.fail_after(ENOUGH):
                        await client.host.straightened(server.host.own)
                        await server.host.straightened(client.host.own)
        assert worked == [True] * 4
        assert ann.host.peers()[bob.host.own] == bob.host.peers()[ann.host.own] == "punched"


async def test_dials_that_cross_are_one_connection_with_the_roles_agreed_upon() -> None:
    async with two() as (ann, bob):
        for client, server in ((ann, bob), (bob, ann)):
            ends = await crossed()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.host.dialer.punched, ends[0], server.host.own, client=True))
                nursery.start_soon(partial(server.host.dialer.punched, ends[1], client.host.own, client=False))
            assert ann.host.peers()[bob.host.own] == bob.host.peers()[ann.host.own] == "punched"
            stream = await ann.host.open_stream(bob.host.own, ECHO)
            await stream.write(b"crossed")
            assert await stream.read_exactly(7) == b"crossed"
            await ann.host.disconnect(bob.host.own)
            await until(lambda: not bob.host.connected(ann.host.own))


async def crossed() -> tuple[trio.socket.SocketType, trio.socket.SocketType]:
    """Two ends of one TCP connection of which neither has accepted anything, as far as they know."""
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()
        one = trio.socket.socket()
        await one.connect(listener.getsockname())
        other, _ = await listener.accept()
        return one, other


async def test_an_ordinary_dial_that_crossed_the_peers_own_is_done_again() -> None:
    async with two() as (ann, bob):
        refused: list[str] = []

        async def answer(stream: trio.SocketStream) -> None:
            first = not refused
            try:
                await bob.host.dialer.punched(stream.socket, ann.host.own, client=first)
                await trio.sleep_forever()
            except FOREIGN as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, answer, [listener])
            address = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
            await ann.host.connect(bob.host.own, [address])
            assert ann.host.peers()[bob.host.own] == "direct"
            assert len(refused) == 1, "two clients understand that they are"
            nursery.cancel_scope.cancel()


async def test_one_that_is_expected_and_says_nothing_is_hung_up_on() -> None:
    async with two() as (ann, bob):
        with trio.socket.socket() as silent:
            await silent.bind(("127.0.0.1", 0))
            with ann.host.dialer.expecting(bob.host.own, [silent.getsockname()], client=True):
                await silent.connect(("127.0.0.1", ann.port))
                with trio.fail_after(ENOUGH):
                    while await silent.recv(1000):
                        pass


async def test_libp2p_as_it_is_shipped_punches_with_us() -> None:
    async with two() as (_, bob), background_stock() as stock:
        bob.puncher.serve()
        protocol = CircuitV2Protocol(stock, StockLimits(3600, 1 << 30, 9, 9), allow_hop=False)
        roles = RelayConfig(roles=RelayRole.STOP | RelayRole.CLIENT, limits=protocol.limits)
        async with background_trio_service(protocol), background_trio_service(DCUtRProtocol(stock)):
            await stock.connect(info_from_p2p_addr(Multiaddr(bob.relay.addresses[0])))
            await CircuitV2Transport(stock, protocol, roles).dial(Multiaddr(f"{bob.circuit[0]}/p2p/{bob.host.own}"))
            peer = PeerId(str(stock.get_id()))
            with trio.fail_after(ENOUGH):
                await bob.host.straightened(peer)
            assert bob.host.peers()[peer] == "punched"
            await until(bob.punches)
            assert bob.punches()[0].succeeded


@asynccontextmanager
async def background_stock() -> AsyncIterator[IHost]:
    stock = new_host(key_pair=create_new_key_pair(Identity.generate().secret))
    async with stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        yield stock


async def test_a_peer_with_a_public_address_is_simply_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nolocod.p2p.nat.hole_punching.public", lambda host: host == "127.0.0.1")
    async with two() as (ann, bob):
        ann.host.announce(LOOPBACK, [f"/ip4/127.0.0.1/tcp/{ann.port}"])
        await ann.host.connect(bob.host.own, bob.circuit)
        assert await bob.puncher.punch(ann.host.own), "and nobody there answers punches"
        assert bob.host.peers()[ann.host.own] == "direct"


async def test_a_punch_that_fails_says_why_costs_no_more_than_its_tries_and_leaves_nothing() -> None:
    async with two(PunchLimits(tries=2, rounds=2, dialling=0.2)) as (ann, bob):
        ann.host.serve(DCUTR, ann.puncher.handle)
        await ann.host.connect(bob.host.own, bob.circuit)
        for number, node in enumerate((ann, bob), 1):  # a symmetric NAT: the relay sees a port that nobody else can use
            await until(lambda host=node.host: host.observed)
            seen = node.host.observed[node.relay.own]
            node.host.observed[node.relay.own] = replace(seen, address=f"/ip4/127.0.0.1/tcp/{number}")
        tries = [await bob.puncher.punch(ann.host.own) for _ in range(3)]
        assert tries == [False] * 3
        assert [event.succeeded for event in bob.punches()] == [False] * 2, "the third is not begun"
        assert "2 rounds" in bob.punches()[0].reason
        await until(lambda: len(ann.punches()) == 4)
        assert bob.host.peers()[ann.host.own] == "relayed"
        assert not ann.host.dialer.expected
        assert not bob.host.dialer.expected


async def test_a_cancelled_punch_leaves_nothing() -> None:
    async with two() as (ann, bob):
        reached = trio.Event()

        async def never(stream: Stream) -> None:
            await receive_message(stream, HolePunch, 4096)
            reached.set()
            await trio.sleep_forever()

        ann.host.serve(DCUTR, never)
        await ann.host.connect(bob.host.own, bob.circuit)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bob.puncher.punch, ann.host.own)
            await reached.wait()
            nursery.cancel_scope.cancel()
        assert bob.punches() == []
        assert not bob.host.dialer.expected
        ann.host.serve(DCUTR, ann.puncher.handle)
        assert await bob.puncher.punch(ann.host.own), "and is in nobody's way"


async def test_a_peer_that_does_not_punch_stays_relayed_and_is_told_as_no_failure() -> None:
    async with two() as (ann, bob):
        await ann.host.connect(bob.host.own, bob.circuit)
        assert not await bob.puncher.punch(ann.host.own)
        assert bob.punches() == [], "an observer is no failed attempt"


async def test_both_open_and_one_gives_way() -> None:
    async with two() as (ann, bob):
        for node in (ann, bob):
            node.host.serve(DCUTR, node.puncher.handle)
        await ann.host.connect(bob.host.own, bob.circuit)
        worked: list[bool] = []

        async def punch(one: Node, other: Node) -> None:
            worked.append(await one.puncher.punch(other.host.own))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(punch, ann, bob)
            nursery.start_soon(punch, bob, ann)
        assert worked == [True, True]
        assert not ann.host.dialer.expected
        assert not bob.host.dialer.expected


async def test_a_node_that_only_relays_reach_does_not_punch() -> None:
    async with two() as (ann, bob):
        ann.puncher.serve()
        ann.host.straight_to = lambda peer: peer == ann.relay.own
        await ann.host.connect(bob.host.own, bob.circuit)
        assert not await bob.puncher.punch(ann.host.own)
        assert ann.punches() == []


async def sync_first(stream: Stream) -> None:
    await send_message(stream, HolePunch(type=HolePunch.SYNC))


async def too_long(stream: Stream) -> None:
    await stream.write(b"\xff\xff\x7f")


async def no_message(stream: Stream) -> None:
    await stream.write(b"\x03\xff\xff\xff")


@pytest.mark.parametrize("talk", [sync_first, too_long, no_message])
async def test_nonsense_costs_a_stream(talk: Callable[[Stream], Awaitable[None]]) -> None:
    async with two() as (ann, bob):
        ann.puncher.serve()
        await ann.host.connect(bob.host.own, bob.circuit)
        stream = await bob.host.open_stream(ann.host.own, DCUTR)
        await talk(stream)
        with pytest.raises(RemoteError), trio.fail_after(ENOUGH):
            await stream.read_exactly(1)
        assert ann.host.faults == 1
        assert ann.host.peers()[bob.host.own] == "relayed"


async def test_nobody_has_us_dial_where_we_have_no_business() -> None:
    async with two(QUICK) as (ann, bob):
        ann.puncher.serve()
        await ann.host.connect(bob.host.own, bob.circuit)
        dialled: list[tuple[str, int]] = []

        async def note(target: tuple[str, int]) -> trio.socket.SocketType:
            dialled.append(target)
            raise OSError

        ann.host.dialer.punch = note  # type: ignore[method-assign]
        told = [
            *("/ip4/192.168.7.7/tcp/80", "/ip4/169.254.169.254/tcp/80", "/ip4/224.0.0.1/tcp/1", "/dns4/example.org/tcp/80"),
            *("/ip4/203.0.113.1/udp/9", f"/ip4/127.0.0.1/tcp/{ann.port}", "/ip6/fe80::1/tcp/9"),
            *(f"/ip4/203.0.113.{number}/tcp/80" for number in range(1, 20)),
        ]
        stream = await bob.host.open_stream(ann.host.own, DCUTR)
        raw = [Multiaddr(text).to_bytes() for text in told]
        await send_message(stream, HolePunch(type=HolePunch.CONNECT, ObsAddrs=[b"\x99\x99", *raw]))
        await receive_message(stream, HolePunch, 4096)
        await send_message(stream, HolePunch(type=HolePunch.SYNC))
        await until(lambda: ann.punches())
        assert sorted(dialled) == [(f"203.0.113.{number}", 80) for number in range(1, 9)]


async def test_one_machine_is_punched_to_so_often_whatever_ports_it_is_said_to_have(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    dialled: list[tuple[str, int]] = []

    async def refused(target: tuple[str, int], _source: Address | None) -> trio.socket.SocketType:
        await trio.lowlevel.checkpoint()
        dialled.append(target)
        raise ConnectionRefusedError

    monkeypatch.setattr("nolocod.p2p.transport.dialer._open", refused)
    manager = ConnectionManager(8, ConnectionLimits())
    dialer = Dialer(cast("Swarm", SimpleNamespace()), [Address("127.0.0.1", 4001)], 1.0, manager)
    for host, most in (("127.0.0.77", 60 + 12), ("127.0.0.78", 60 + 4)):
        dialled.clear()
        for _ in range(3 if host == "127.0.0.77" else 1):
            with trio.move_on_after(4.05):
                async with trio.open_nursery() as nursery:
                    for port in range(1, 9):
                        nursery.start_soon(dialer.punch, (host, port))
        assert most - 1 <= len(dialled) <= most + 1, "each has its own share"
