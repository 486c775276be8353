"""Connections on real sockets: from which port, over which way, and what peers see of us."""

from __future__ import annotations

import socket
import threading
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from multiaddr import Multiaddr

from nolocod import __version__
from nolocod.errors import PeerUnavailableError, PortTakenError, ProtocolError, RefusedError, RemoteError, UsageError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import PeerConnected
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.p2p.transport import dialer
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.identify import IDENTIFY, Observation
from nolocod.p2p.transport.libp2p_stream import LibStream
from nolocod.p2p.transport.listen_addresses import claim
from nolocod.p2p.transport.multiaddrs import dialable, endpoint, interleave, near, public, straight, through, via
from nolocod.units import Address
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from nolocod.observe.events import Event
    from nolocod.p2p.transport.stream import Stream

LOOPBACK = (Address("127.0.0.1", 0),)
BOTH = (Address("127.0.0.1", 0), Address("::1", 0))
HIDDEN = ("/dns4/nowhere.invalid/tcp/1",)
"""What a node announces that nobody shall find by its own word."""
ECHO = "/test/echo"
SHORT = HostLimits(connect=2.0, negotiate=2.0, progress=15.0, linger=0.5)


@asynccontextmanager
async def hosts(count: int, listen: Sequence[Address] = LOOPBACK, announce: Sequence[str] = ()) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_host(Identity.generate(), listen, announce, lambda _: None, SHORT))
            for _ in range(count)
        ]


@asynccontextmanager
async def around_a_relay(announce: Sequence[str] = ()) -> AsyncIterator[tuple[Host, Host, Host]]:
    """A relay, and two hosts that can dial through it; the second holds a reservation."""
    async with hosts(1) as (middle,), hosts(2, LOOPBACK, announce) as (ann, bob):
        Relay(middle).serve()
        for host in (ann, bob):
            host.serve(ECHO, echo)
            client = RelayClient(host)
            client.serve()
            host.through = client.connect
        await bob.connect(middle.own, middle.announced)
        await RelayClient(bob).reserve(middle.own)
        bob.circuits = (through(middle.own, middle.announced[0]),)
        yield middle, ann, bob


async def echo(stream: Stream) -> None:
    while data := await stream.arrived(None):
        await stream.write(memoryview(data))


async def test_peers_see_the_port_that_we_listen_on_both_ways() -> None:
    async with hosts(2) as (ann, bob):
        await ann.connect(bob.own, bob.announced)
        await until(lambda: bool(ann.observed and bob.observed))
        for one, other in ((ann, bob), (bob, ann)):
            seen = one.observed[other.own]
            assert seen.address == one.announced[0]
            assert seen.from_listen_port
        await ann.disconnect(bob.own)
        await until(lambda: not ann.observed and not bob.observed)


async def test_ipv6_is_dialled_from_the_listening_port_and_observed_too() -> None:
    async with hosts(2, BOTH) as (ann, bob):
        assert [address.split("/")[1] for address in bob.announced] == ["ip4", "ip6"]
        assert len({address.rpartition("/")[2] for address in bob.announced}) == 1, "one port for both"
        await ann.connect(bob.own, [address for address in bob.announced if address.startswith("/ip6")])
        await until(lambda: bool(ann.observed))
        assert ann.observed[bob.own].address == next(text for text in ann.announced if text.startswith("/ip6"))


async def test_a_second_connection_between_the_same_two_ports_leaves_from_another_one() -> None:
    async with hosts(2) as (ann, bob):
        await ann.connect(bob.own, bob.announced)
        assert await bob.dial_straight(ann.own, ann.announced, ENOUGH)
        await until(lambda: bob.peers() == {ann.own: "direct"})
        assert ann.peers() == {bob.own: "direct"}


async def test_two_that_dial_each_other_at_the_same_moment_are_connected() -> None:
    for _ in range(5):  # now and then TCP makes one connection of both dials
        async with hosts(2) as (ann, bob):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ann.connect, bob.own, bob.announced)
                nursery.start_soon(bob.connect, ann.own, ann.announced)
            assert ann.straight(bob.own)
            assert bob.straight(ann.own)


async def test_a_name_is_resolved() -> None:
    async with hosts(2) as (ann, bob):
        port = bob.announced[0].rpartition("/")[2]
        await ann.connect(bob.own, [f"/dns4/localhost/tcp/{port}"])
        assert ann.peers() == {bob.own: "direct"}
        with pytest.raises(PeerUnavailableError, match=r"nowhere\.invalid"):
            await bob.probe(ann.own, HIDDEN[0])


async def test_an_address_of_a_name_that_is_silent_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(2) as (ann, bob):
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            targets = [deaf.getsockname(), endpoint(bob.announced[0])]

            async def found(_: str) -> list[tuple[str, int]]:
                return targets

            monkeypatch.setattr(dialer, "resolve", found)
            await ann.probe(bob.own, HIDDEN[0])
            await ann.connect(bob.own, HIDDEN)
        assert ann.peers() == {bob.own: "direct"}


async def test_names_that_nobody_answers_for_take_no_threads_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def tarpit(*_: object) -> None:
        release.wait(2 * ENOUGH)
        raise socket.gaierror("nobody")

    monkeypatch.setattr(socket, "getaddrinfo", tarpit)
    try:
        async with trio.open_nursery() as nursery:
            for number in range(60):  # more than trio's threads
                nursery.start_soon(dialer.resolve, f"/dns4/{number}.invalid/tcp/1")
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(ENOUGH):
                await trio.to_thread.run_sync(lambda: None)
            nursery.cancel_scope.cancel()
    finally:
        release.set()


async def test_what_a_peer_that_has_gone_said_of_us_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(2) as (ann, bob):
        await ann.connect(bob.own, bob.announced)
        await until(lambda: bool(ann.observed))
        whole = LibStream.reset

        async def gone_by_then(stream: LibStream) -> None:
            await ann.disconnect(bob.own)
            await whole(stream)

        monkeypatch.setattr(LibStream, "reset", gone_by_then)
        await ann.identify(bob.own)
        assert not ann.observed


async def test_no_private_network_is_near_because_a_peer_says_so() -> None:
    async def lie(stream: Stream) -> None:
        await send_message(stream, Identify(observed_addr=Multiaddr("/ip4/10.1.2.3/tcp/4").to_bytes()))

    async with hosts(2) as (ann, bob):
        bob.serve(IDENTIFY, lie)
        await ann.connect(bob.own, bob.announced)
        await until(lambda: bool(ann.observed))
        assert ann.observed[bob.own].address == "/ip4/10.1.2.3/tcp/4"
        assert not ann.may_dial("/ip4/10.1.2.9/tcp/22", "10.1.2.9")
        assert ann.may_dial(bob.announced[0], "127.0.0.1")


LISTENS_AT_HOME = ("/ip4/192.168.1.2/tcp/4001",)


@asynccontextmanager
async def inner_service() -> AsyncIterator[tuple[int, list[object]]]:
    """What listens on this machine for its own programs: its port, and who knocked."""
    knocked: list[object] = []

    async def note(stream: trio.SocketStream) -> None:
        knocked.append(stream.socket.getpeername())
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.77")
        nursery.start_soon(trio.serve_listeners, note, listeners)
        yield listeners[0].socket.getsockname()[1], knocked
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("form", ["/ip4/127.0.0.77", "/ip6/::ffff:127.0.0.77", "/dns4/inner.example"])
async def test_nobody_has_a_node_dial_its_own_machine_or_another_network(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tells it: a heartbeat, the DHT, identify, a relay's address, a question to dial back; by whatever name."""
    async with inner_service() as (port, knocked), hosts(2) as (ann, bob):
        address = f"{form}/tcp/{port}"
        real = socket.getaddrinfo
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.77", port))]
        monkeypatch.setattr(dialer, "_LOOK_UPS", trio.CapacityLimiter(1))  # other tests' names may still be looked up
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: answer if "inner" in host else real(host, *rest))
        ann.local, ann.through = LISTENS_AT_HOME, RelayClient(ann).connect
        ann.basic.get_peerstore().add_addr(ID.from_string(bob.own), Multiaddr(address), 60)
        circuit = through(Identity.generate().peer_id, address)
        with trio.fail_after(ENOUGH):
            for call in (
                partial(ann.connect, bob.own, [address]),
                partial(ann.connect, bob.own, [circuit]),
                partial(ann.probe, bob.own, address),
                partial(ann._dial_for_libp2p, ID.from_string(bob.own)),
            ):
                with pytest.raises((PeerUnavailableError, SwarmException)):
                    await call()
            assert not await ann.dial_straight(bob.own, [address], ENOUGH)
        assert not knocked
        ann.vouch([f"{address}/p2p/{bob.own}"])
        with pytest.raises(PeerUnavailableError):
            await ann.connect(bob.own, [address])
        assert knocked, "its owner named it"


async def test_a_network_that_our_owner_named_is_dialled_and_one_that_peers_come_from_is_not() -> None:
    async with hosts(1) as (ann,):
        ann.local = LISTENS_AT_HOME
        assert ann.may_dial("/ip4/192.168.1.7/tcp/4001", "192.168.1.7")
        private = [f"/ip4/10.1.2.{number}/tcp/22" for number in range(9)]
        assert ann._sorted(PeerId("someone"), [*private, "/ip4/203.0.113.1/tcp/1"])[0] == ["/ip4/203.0.113.1/tcp/1"]
        ann.external = ("/ip4/10.1.0.1/tcp/4001",)
        ann.observed[PeerId("someone")] = Observation("/ip4/10.1.2.3/tcp/4", True, 0.0, "/ip4/10.1.9.9/tcp/9")
        for address, host in (("/ip4/10.1.2.9/tcp/22", "10.1.2.9"), ("/ip4/127.0.0.1/tcp/22", "127.0.0.1")):
            assert not ann.may_dial(address, host)
        ann.vouch(["/ip4/10.1.0.5/tcp/4001", through(ann.own, "/ip4/127.0.0.1/tcp/9")])
        for address, host in (("/ip4/10.1.2.9/tcp/22", "10.1.2.9"), ("/ip4/127.0.0.1/tcp/22", "127.0.0.1")):
            assert ann.may_dial(address, host)
        assert not ann.may_dial("/ip4/169.254.169.254/tcp/80", "169.254.169.254")


def counted(host: Host) -> int:
    """Connections by the books of libp2p's resource manager."""
    return int(host.basic.get_network()._resource_manager.get_stats()["connections"])


async def test_a_circuit_on_which_nobody_speaks_is_given_up_and_not_counted_for_ever() -> None:
    async with around_a_relay(HIDDEN) as (middle, ann, bob):
        before = counted(bob)
        await ann.connect(middle.own, middle.announced)

        async def silence(stream: Stream, _: PeerId) -> None:
            with suppress(RemoteError):
                await stream.read_exactly(1 << 10)

        ann.adopt_circuit = silence  # type: ignore[method-assign]
        await ann.through(middle.own, bob.own)  # type: ignore[misc]
        assert not bob.connected(ann.own)
        await until(lambda: bob.faults == 1)
        assert counted(bob) == before


async def test_whom_a_relay_brought_is_who_proved_it_not_whom_the_relay_named() -> None:
    async with around_a_relay(HIDDEN) as (_, ann, bob):
        met: list[PeerId] = []

        async def note(peer: PeerId) -> None:
            met.append(peer)

        bob.met_through_relay = note
        liar = bob.accept_circuit
        bob.accept_circuit = lambda stream, _: liar(stream, Identity.generate().peer_id)  # type: ignore[method-assign]
        await ann.connect(bob.own, bob.circuits)
        await until(lambda: bool(met))
        assert met == [ann.own]


async def test_identify_tells_what_a_peer_is() -> None:
    async with hosts(2) as (ann, bob):
        bob.serve(ECHO, echo)
        await ann.connect(bob.own, bob.announced)
        known = await ann.identify(bob.own)
        assert known.listen == bob.announced
        assert known.observed == ann.announced[0]
        assert {ECHO, IDENTIFY} <= known.protocols
        message = await receive_message(await ann.open_stream(bob.own, IDENTIFY), Identify, 1 << 16)
        assert message.agent_version == f"nolocod/{__version__}"


async def test_libp2p_as_it_is_shipped_understands_who_we_are_and_is_understood() -> None:
    stock = new_host(key_pair=create_new_key_pair(Identity.generate().secret))
    async with hosts(1) as (ann,), stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        ann.serve(ECHO, echo)
        await stock.connect(info_from_p2p_addr(Multiaddr(ann.addresses[0])))
        peer = PeerId(str(stock.get_id()))
        known = await ann.identify(peer)
        assert known.observed == ann.announced[0]
        assert IDENTIFY in known.protocols
        store = stock.get_peerstore()
        await until(lambda: ECHO in store.get_protocols(ann.basic.get_id()))


async def test_what_libp2p_dials_itself_is_dialled_our_way() -> None:
    async with hosts(2) as (ann, bob):
        addresses = ["/ip4/127.0.0.1/tcp/1", *bob.announced]
        with pytest.raises(SwarmException, match="refused"):
            await ann.basic.connect(PeerInfo(bob.basic.get_id(), [Multiaddr(addresses[0])]))
        await ann.basic.connect(PeerInfo(bob.basic.get_id(), [Multiaddr(address) for address in addresses]))
        await until(lambda: bool(ann.observed))
        assert ann.observed[bob.own].from_listen_port
        with pytest.raises(SwarmException):
            await ann.basic.get_network().dial_peer(ID.from_string(Identity.generate().peer_id))


async def test_nothing_is_kept_of_peers_that_have_gone() -> None:
    async with hosts(1) as (ann,):
        swarm = ann.basic.get_network()
        before = len(swarm.peerstore.peer_data_map)
        for _ in range(3):
            async with hosts(1) as (guest,):
                await guest.connect(ann.own, ann.announced)
                await until(lambda: bool(ann.observed))
                with pytest.raises(RefusedError):
                    await guest.open_stream(ann.own, "/ipfs/id/push/1.0.0")
            await until(lambda: not ann.observed)
        assert len(swarm.peerstore.peer_data_map) == before
        assert not swarm.auto_connector._recent_disconnects


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff\x7f", b"\x80\x80\x40", b"\x05\xff\xff\xff\xff\xff"])
async def test_a_peer_that_says_nonsense_about_itself_costs_a_stream(garbage: bytes) -> None:
    async def babble(stream: Stream) -> None:
        await stream.write(garbage)

    async with hosts(2) as (ann, bob):
        bob.serve(IDENTIFY, babble)
        bob.serve(ECHO, echo)
        await ann.connect(bob.own, bob.announced)
        with pytest.raises(ProtocolError):
            await ann.identify(bob.own)
        stream = await ann.open_stream(bob.own, ECHO)
        await stream.write(b"on we go")
        assert await stream.read_exactly(8) == b"on we go"


@pytest.mark.parametrize("raw", [b"*)\x7f\x02\x06\x02\x027", b"\x04\x01", b"\xa5\x03\x02\xff\xff", b"\xbe\x03\x00"])
async def test_an_address_that_no_library_understands_is_passed_over(raw: bytes) -> None:
    async def misled(stream: Stream) -> None:
        await send_message(stream, Identify(observed_addr=raw, listen_addrs=[raw, Multiaddr(HIDDEN[0]).to_bytes()]))

    async with hosts(2) as (ann, bob):
        bob.serve(IDENTIFY, misled)
        await ann.connect(bob.own, bob.announced)
        known = await ann.identify(bob.own)
        assert (known.observed, known.listen) == (None, HIDDEN)


async def test_a_probe_leaves_no_connection_and_tells_one_peer_from_another() -> None:
    async with hosts(2) as (ann, bob):
        await ann.probe(bob.own, bob.announced[0])
        assert not ann.connected(bob.own)
        await until(lambda: not bob.connected(ann.own))
        with pytest.raises(PeerUnavailableError, match="another peer"):
            await ann.probe(Identity.generate().peer_id, bob.announced[0])
        with pytest.raises(PeerUnavailableError, match="refused"):
            await ann.probe(bob.own, "/ip4/127.0.0.1/tcp/1")
        with pytest.raises(PeerUnavailableError, match="not a TCP address"):
            await ann.probe(bob.own, through(bob.own, bob.announced[0]))


async def test_a_circuit_is_dialled_where_nothing_else_answers() -> None:
    async with around_a_relay(HIDDEN) as (middle, ann, bob):
        assert bob.announced == (*HIDDEN, *bob.circuits)
        assert bob.addresses[-1] == f"{bob.circuits[0]}/p2p/{bob.own}"
        stream = await ann.open_stream(bob.own, ECHO, bob.announced)
        assert ann.peers() == {middle.own: "direct", bob.own: "relayed"}
        await stream.write(b"hello")
        assert await stream.read_exactly(5) == b"hello"
        assert ann.observed.keys() == {middle.own}, "nobody sees us through a relay"
        known = await ann.identify(bob.own)
        assert known.listen == (*HIDDEN, *bob.circuits)
        assert known.observed is None


async def test_a_circuit_is_not_dialled_where_a_straight_address_answers() -> None:
    async with around_a_relay() as (_, ann, bob):
        await ann.connect(bob.own, [*bob.circuits, *bob.announced])
        assert ann.peers() == {bob.own: "direct"}


@pytest.mark.parametrize("beside", [False, True])
async def test_who_may_have_to_be_punched_to_is_dialled_from_a_fresh_port(beside: bool) -> None:
    async with around_a_relay() as (_, ann, bob):
        if beside:  # the puncher's own try, once the two have met
            await ann.connect(bob.own, bob.circuits)
            assert await ann.dial_straight(bob.own, bob.announced, ENOUGH)
        else:
            await ann.connect(bob.own, bob.announced)
        await until(lambda: bob.own in ann.observed)
        assert not ann.observed[bob.own].from_listen_port
        assert endpoint(ann.observed[bob.own].address) != endpoint(ann.announced[0])


async def test_who_answers_a_fresh_port_sees_the_listening_one_where_that_is_wanted() -> None:
    async with around_a_relay() as (_, ann, bob):
        ann.dialer.to_be_seen = lambda: True
        await ann.connect(bob.own, bob.circuits)
        assert await ann.dial_straight(bob.own, bob.announced, ENOUGH)
        await until(lambda: bob.own in ann.observed)
        assert ann.observed[bob.own].from_listen_port
        assert endpoint(ann.observed[bob.own].address) == endpoint(ann.announced[0])
        await until(lambda: not bob.dialer.connection_manager.half_open)  # the try has hung up


async def test_circuits_are_tried_beside_straight_addresses_that_do_not_answer() -> None:
    async with around_a_relay(HIDDEN) as (_, ann, bob):
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            silent = f"/ip4/127.0.0.1/tcp/{deaf.getsockname()[1]}"
            ann.patience = 2 * ENOUGH
            with trio.fail_after(ENOUGH):
                await ann.connect(bob.own, [silent, *bob.circuits])
        assert ann.peers()[bob.own] == "relayed"


async def test_the_cause_of_each_address_is_told_circuits_included() -> None:
    async with around_a_relay(HIDDEN) as (middle, ann, bob):
        stranger = Identity.generate().peer_id
        with pytest.raises(PeerUnavailableError, match=r"refused.*NO_RESERVATION"):
            await ann.connect(stranger, ["/ip4/127.0.0.1/tcp/1", through(middle.own, middle.announced[0])])
        with pytest.raises(PeerUnavailableError, match="one of the two ends"):
            await ann.connect(bob.own, [through(bob.own, "/ip4/127.0.0.1/tcp/1")])
        ann.through = None
        with pytest.raises(PeerUnavailableError, match="no address"):
            await ann.connect(bob.own, bob.circuits)


async def test_a_node_that_only_relays_reach_dials_nobody_else_straight() -> None:
    async with around_a_relay() as (middle, ann, bob):
        ann.straight_to = lambda peer: peer == middle.own
        assert ann.announced == ()
        await ann.connect(bob.own, bob.announced)
        assert ann.peers() == {middle.own: "direct", bob.own: "relayed"}
        assert not await ann.dial_straight(bob.own, bob.announced, 1.0)


async def test_what_others_confirmed_is_announced_first_unless_the_owner_says_otherwise() -> None:
    outside = "/ip4/203.0.113.7/tcp/4001"
    async with hosts(1) as (ann,), hosts(1, LOOPBACK, HIDDEN) as (bob,):
        (inside,) = ann.announced
        for host in (ann, bob):
            host.external = (outside,)
        assert ann.announced == (outside, inside)
        assert bob.announced == HIDDEN
        assert [str(address) for address in ann.basic.get_addrs()] == list(ann.addresses)


async def test_streams_move_to_the_straight_connection_and_the_relayed_one_is_given_up_when_it_is_idle() -> None:
    async with around_a_relay(HIDDEN) as (_, ann, bob):
        await ann.connect(bob.own, bob.circuits)
        old = await ann.open_stream(bob.own, ECHO)
        assert old.origin.reach == "relayed"
        assert await bob.dial_straight(ann.own, [f"/ip4/127.0.0.1/tcp/{ann.dialer.port('127.0.0.1')}"], ENOUGH)
        assert (await ann.identify(bob.own)).observed is not None, "it is asked, and answers, on the straight one"
        new = await ann.open_stream(bob.own, ECHO)
        assert new.origin.reach == "inbound"
        await trio.sleep(1.5)  # longer than from one look at what is idle to the next
        await say(old, b"still here")
        await old.close()
        assert not await old.arrived(None)
        await until(lambda: len(ann.basic.get_network().get_connections(bob.basic.get_id())) == 1)
        await say(new, b"unharmed")
        assert ann.peers()[bob.own] == "inbound"


async def say(stream: Stream, content: bytes) -> None:
    await stream.write(content)
    assert await stream.read_exactly(len(content)) == content


async def test_a_peer_is_told_once_however_many_connections_it_has() -> None:
    told: list[Event] = []
    async with open_host(Identity.generate(), LOOPBACK, (), told.append, SHORT) as ann, hosts(1) as (bob,):
        await ann.connect(bob.own, bob.announced)
        assert await bob.dial_straight(ann.own, ann.announced, ENOUGH)
        await until(lambda: len(bob.basic.get_network().get_connections()) == 2)
        assert told == [PeerConnected(bob.own, "direct")]


def test_the_same_port_is_claimed_for_all_families_and_a_missing_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with claim((Address("0.0.0.0", 0), Address("::", 0))) as (four, six):
        assert four.port == six.port > 0
    monkeypatch.setattr(socket, "AF_INET6", 9999)  # a family that no kernel has
    with claim((Address("0.0.0.0", 0), Address("::", 0))) as bound:
        assert [address.host for address in bound] == ["0.0.0.0"]
    for wrong in [(Address("::", 0),), (Address("127.0.0.1", 0), Address("fd00:dead::77", 0))]:
        with pytest.raises(UsageError, match="--listen"), claim(wrong):
            pass


def test_a_port_that_was_asked_for_and_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortTakenError, match="in use"), claim((Address("127.0.0.1", taken.getsockname()[1]),)):
            pass


def test_a_port_that_chance_gave_is_nobody_elses_until_libp2p_has_bound_it() -> None:
    """Two hosts that began in one moment could get one port: libp2p's sockets would have shared it."""
    with claim((Address("127.0.0.1", 0),)) as (held,), socket.socket() as other, socket.socket() as libp2ps:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.port))
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            libp2ps.setsockopt(socket.SOL_SOCKET, option, 1)
        libp2ps.bind(("127.0.0.1", held.port))
        libp2ps.listen()


PEER = Identity.from_secret(bytes([7]) * 32).peer_id


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("/ip4/1.2.3.4/tcp/5", "straight"),
        (f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}", "straight"),
        ("/dns6/example.org/tcp/5", "straight"),
        (f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit", "circuit"),
        (f"/ip6/2001:db8::1/tcp/5/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "circuit"),
        ("/ip4/1.2.3.4/tcp/5/p2p-circuit", "none"),
        (f"/p2p/{PEER}/p2p-circuit", "none"),
        (f"/ip4/0.0.0.0/tcp/5/p2p/{PEER}/p2p-circuit", "none"),
        ("/ip4/1.2.3.4/tcp/5/p2p/nobody/p2p-circuit", "none"),
        (f"/ip4/1.2.3.4/tcp/5/p2p/{PEER}/p2p-circuit/p2p/{PEER}/p2p-circuit", "none"),
        (f"/ip4/1.2.3.4/udp/5/quic-v1/p2p/{PEER}/p2p-circuit", "none"),
        ("/ip4/1.2.3.4/tcp/0", "none"),
        ("/ip4/1.2.3.4/tcp/5" + "0" * 300, "none"),
        ("/ip6zone/\x7f\x02\x06\x02\x027", "none"),
        ("/tcp/5", "none"),
        ("", "none"),
    ],
)
def test_straight_addresses_and_circuits(text: str, kind: str) -> None:
    assert straight(text) == (kind == "straight")
    assert (via(text) is not None) == (kind == "circuit")
    assert dialable(text) == (kind != "none")


def test_a_circuits_relay() -> None:
    assert via(through(PEER, "/dns4/relay.example.org/tcp/4001")) == (PEER, "/dns4/relay.example.org/tcp/4001")


def test_families_take_turns() -> None:
    six, four = ["/ip6/::1/tcp/1", "/ip6/::2/tcp/1"], ["/ip4/1.1.1.1/tcp/1", "/dns4/a/tcp/1", "/ip4/1.1.1.2/tcp/1"]
    assert interleave([*four, *six, four[0]]) == [four[0], six[0], four[1], six[1], four[2]]
    assert interleave([*six, *four]) == [six[0], four[0], six[1], four[1], four[2]]
    assert interleave([]) == []


@pytest.mark.parametrize(
    ("host", "ours", "allowed"),
    [
        ("203.0.113.9", (), True),
        ("2001:db8::9", (), True),
        ("192.168.1.9", ("192.168.1.2",), True),
        ("192.168.1.9", ("192.168.2.2", "10.0.0.1"), False),
        ("10.1.0.9", ("10.1.0.2",), True),
        ("10.1.0.9", ("10.2.0.2",), False),
        ("100.64.3.3", ("100.99.1.1",), True),
        ("fd00:1::9", ("fd00:1::2",), True),
        ("fd00:1::9", ("fd00:2::2", "192.168.1.2"), False),
        ("127.0.0.1", ("192.168.1.2",), False),
        ("127.0.0.1", ("127.0.0.1",), True),
        ("169.254.169.254", ("169.254.1.1",), False),
        ("fe80::1", ("fe80::2",), False),
        ("224.0.0.1", ("224.0.0.1",), False),
        ("0.0.0.0", ("0.0.0.0",), False),
        ("240.0.0.1", (), False),
        ("255.255.255.255", (), False),
        ("::ffff:127.0.0.1", ("192.168.1.2",), False),
        ("::ffff:7f00:1", ("192.168.1.2",), False),
        ("::ffff:169.254.169.254", ("192.168.1.2",), False),
        ("::ffff:192.168.1.9", ("192.168.1.2",), True),
        ("64:ff9b::7f00:1", ("192.168.1.2",), False),
        ("", (), False),
    ],
)
def test_whom_a_stranger_may_have_us_dial(host: str, ours: tuple[str, ...], allowed: bool) -> None:
    assert near(host, ours) == allowed


def test_public_addresses_and_endpoints() -> None:
    assert public("198.51.100.1")
    assert not any(public(host) for host in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", ""))
    assert not any(public(host) for host in ("10.1.2.3", "172.20.0.1", "192.168.9.9", "100.64.0.1", "127.0.0.1", "fd00::1"))
    assert endpoint("/ip6/2001:DB8::1/tcp/9") == ("2001:db8::1", 9)
    assert endpoint("/dns4/example.org/tcp/9") is None
