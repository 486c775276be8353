"""What py-libp2p 0.8.1 gets wrong and we work round: one test each, which fails when upstream has put it right.

A failure here after an upgrade is good news: take the workaround out, and its test with it.
"""

from __future__ import annotations

import inspect
import logging
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import libp2p.peer.id
import pytest
import trio
from libp2p import new_host
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.identify import _prefer_circuit_addr
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.io.exceptions import IncompleteReadError
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID, Yamux
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils import read_delim
from multiaddr import Multiaddr

from nolocod.identity import Identity
from nolocod.p2p import libp2p_patches
from nolocod.p2p.connections import best
from nolocod.p2p.host import HostLimits, open_host
from nolocod.p2p.transport.connection import Origin
from nolocod.p2p.transport.listen_addresses import announced
from nolocod.units import Address
from tests.support.wires import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from libp2p.abc import IHost
    from libp2p.network.stream.net_stream import NetStream

ANYWHERE = Multiaddr("/ip4/127.0.0.1/tcp/0")
ECHO = TProtocol("/test/echo")


@asynccontextmanager
async def stock(address: Multiaddr = ANYWHERE, config: ConnectionConfig | None = None) -> AsyncIterator[IHost]:
    """A host as libp2p ships it."""
    host = new_host(key_pair=create_new_key_pair(Identity.generate().secret), connection_config=config)
    async with host.run([address]):
        yield host


def info(host: IHost, address: str | None = None) -> PeerInfo:
    addresses = [Multiaddr(address)] if address else host.get_transport_addrs()
    return PeerInfo(host.get_id(), list(addresses))


def swarm(host: IHost) -> Any:  # noqa: ANN401  # its insides are what is tested
    return host.get_network()


async def test_a_failed_dial_is_remembered_for_a_minute() -> None:
    async with stock() as ann, stock() as bob:
        swarm(ann).retry_config.max_retries = 0
        with pytest.raises(SwarmException):
            await ann.connect(info(bob, "/ip4/127.0.0.1/tcp/1"))
        with pytest.raises(SwarmException, match="negative cache"):
            await ann.connect(info(bob))
        swarm(ann).unblock_peer(bob.get_id())
        ann.get_peerstore().clear_addrs(bob.get_id())
        await ann.connect(info(bob))


async def test_only_one_tcp_address_of_a_peer_is_dialled() -> None:
    async with stock() as ann, stock() as bob:
        swarm(ann).retry_config.max_retries = 0
        good = info(bob)
        with pytest.raises(SwarmException):
            await ann.connect(PeerInfo(bob.get_id(), [Multiaddr("/ip4/127.0.0.1/tcp/1"), *good.addrs]))


async def test_a_wildcard_is_advertised_as_it_is() -> None:
    async with stock(Multiaddr("/ip4/0.0.0.0/tcp/0")) as host:
        assert any("/ip4/0.0.0.0/" in str(address) for address in host.get_addrs())
    assert not any("0.0.0.0" in address for address in announced([Address("0.0.0.0", 1)]))


async def test_a_port_in_use_is_bound_a_second_time() -> None:
    async with stock() as ann:
        taken = info(ann).addrs[0]
        async with stock(taken) as bob:
            assert info(bob).addrs == [taken]


async def test_an_inbound_connection_keeps_its_slot_when_it_is_gone() -> None:
    async with stock() as ann:
        slots = swarm(ann)._inbound_limiter
        async with stock() as bob:
            await bob.connect(info(ann))
            assert slots.borrowed_tokens == 1
            await bob.disconnect(ann.get_id())
            await until(lambda: not swarm(ann).get_total_connections())
        assert slots.borrowed_tokens == 1, "the connection is gone, its slot is not"


async def test_with_ours_a_node_accepts_more_connections_than_its_limit_over_time() -> None:
    limits = HostLimits(connections=2)
    loopback = Address("127.0.0.1", 0)
    async with open_host(Identity.generate(), (loopback,), (), lambda event: None, limits) as ann:
        for _ in range(5):
            async with open_host(Identity.generate(), (loopback,), (), lambda event: None) as guest:
                await guest.connect(ann.own, ann.announced)
            await until(lambda: not ann.peers())


async def test_the_auto_connector_dials_without_being_asked() -> None:
    config = ConnectionConfig(min_connections=0, low_watermark=0)
    async with stock(config=config) as ann, stock() as bob:
        ann.get_peerstore().add_addrs(bob.get_id(), info(bob).addrs, 60)
        await swarm(ann).auto_connector.maybe_connect()
        await until(lambda: swarm(ann).get_total_connections() == 1)
    async with open_host(Identity.generate(), (Address("127.0.0.1", 0),), (), lambda event: None) as ours, stock() as bob:
        ours.basic.get_peerstore().add_addrs(bob.get_id(), info(bob).addrs, 60)
        await swarm(ours.basic).auto_connector.maybe_connect()
        assert swarm(ours.basic).get_total_connections() == 0


async def test_a_cancelled_write_ends_the_whole_connection() -> None:
    async def echo(stream: NetStream) -> None:
        while True:
            await stream.write(await stream.read(5))

    async with stock() as ann, stock() as bob:
        bob.set_stream_handler(ECHO, echo)
        await ann.connect(info(bob))
        stream, other = [await ann.new_stream(bob.get_id(), [ECHO]) for _ in range(2)]
        await other.write(b"hello")
        assert await other.read(5) == b"hello"
        await cancel_in_the_middle(stream)
        with pytest.raises((BaseLibp2pError, trio.TooSlowError)):  # whichever comes first
            await say_again(other)


async def say_again(stream: NetStream) -> None:
    with trio.fail_after(2):
        await stream.write(b"again")
        assert await stream.read(5) == b"again"


async def cancel_in_the_middle(raw: NetStream) -> None:
    """Cancel a write when its record is encrypted and not sent yet, as a deadline does when the socket is full."""
    packets = raw.muxed_stream.conn.secured_conn.conn.read_writer
    send = packets.write_msg
    with trio.CancelScope() as scope:

        async def interrupted(message: bytes) -> None:
            scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
            await send(message)

        packets.write_msg = interrupted
        await raw.write(b"never")
    packets.write_msg = send
    assert scope.cancelled_caught


async def test_find_providers_stops_at_our_own_record() -> None:
    key = "ab" * 32
    async with stock() as ann, stock() as bob:
        await ann.connect(info(bob))
        ours, theirs = KadDHT(ann, DHTMode.SERVER), KadDHT(bob, DHTMode.SERVER)
        async with background_trio_service(ours), background_trio_service(theirs):
            theirs.provider_store.add_provider(bytes.fromhex(key), PeerInfo(bob.get_id(), info(bob).addrs))
            ours.provider_store.add_provider(bytes.fromhex(key), PeerInfo(ann.get_id(), info(ann).addrs))
            await ours.add_peer(bob.get_id(), skip_server_mode_check=True)
            found = await ours.find_providers(key)
            assert [provider.peer_id for provider in found] == [ann.get_id()]
            asked, _ = await ours.provider_store._get_providers_from_peer_with_closers(bob.get_id(), bytes.fromhex(key))
            assert bob.get_id() in {provider.peer_id for provider in asked}


async def test_a_closed_host_goes_on_listening() -> None:
    async with stock() as ann:
        port = port_of(info(ann).addrs[0])
    assert accepts(port)
    async with open_host(Identity.generate(), (Address("127.0.0.1", 0),), (), lambda event: None) as ours:
        port = port_of(Multiaddr(ours.announced[0]))
        assert accepts(port)
    assert not accepts(port)


async def test_a_dial_leaves_from_a_port_of_chance() -> None:
    async with stock() as ann, stock() as bob:
        await ann.connect(info(bob))
        await until(lambda: bool(swarm(bob).get_connections()))
        (connection,) = swarm(bob).get_connections()
        _, port = connection.muxed_conn.get_remote_address()
        assert port != port_of(info(ann).addrs[0]), "what peers see of it is of no use to others"
    # ours: tests/p2p/transport/test_connection.py


async def test_ipv6_peers_have_no_address() -> None:
    async with stock(Multiaddr("/ip6/::1/tcp/0")) as ann, stock(Multiaddr("/ip6/::1/tcp/0")) as bob:
        await ann.connect(info(bob))
        (connection,) = swarm(ann).get_connections()
        assert connection.muxed_conn.get_remote_address() is None
    # ours: tests/p2p/transport/test_connection.py


async def test_a_circuit_address_becomes_one_of_our_own_at_the_relay() -> None:
    relay, circuit = Identity.generate().peer_id, "/ip4/192.0.2.1/tcp/1/p2p/{}/p2p-circuit"
    async with open_host(Identity.generate(), (Address("127.0.0.1", 0),), (), lambda event: None) as ours:
        ours.circuits = (circuit.format(relay),)
        assert [str(address) for address in ours.basic.get_addrs()] == [f"{ours.announced[0]}/p2p/{ours.own}"]
        assert ours.addresses[-1] == f"{circuit.format(relay)}/p2p/{ours.own}"
        libp2p_patches.announce_with(ours.basic, lambda: [circuit.format(relay)])
        assert str(ours.basic.get_addrs()[0]) != f"{circuit.format(relay)}/p2p/{ours.own}"


async def test_identify_tells_a_peer_that_is_connected_straight_too_only_of_the_relay() -> None:
    circuit = Multiaddr(f"/p2p/{Identity.generate().peer_id}/p2p-circuit")
    async with stock() as ann, stock() as bob:
        await ann.connect(info(bob))
        await until(lambda: bool(swarm(bob).get_connections()))
        (straight,) = swarm(bob).get_connections()
        beside = SimpleNamespace(get_transport_addresses=lambda: [circuit])
        swarm(bob).connections[ann.get_id()] = [straight, beside]
        try:
            assert _prefer_circuit_addr(bob, ann.get_id(), info(ann).addrs[0]) == circuit
        finally:
            swarm(bob).connections[ann.get_id()] = [straight]
    # ours answers for the connection that it is asked on: tests/p2p/transport/test_connection.py


def port_of(address: Multiaddr) -> int:
    return int(address.value_for_protocol("tcp"))


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_full_peer_store_forgets_our_own_keys_first() -> None:
    keys = create_new_key_pair()
    own, store = ID.from_pubkey(keys.public_key), PeerStore(max_peers=3)
    store.add_key_pair(own, keys)
    for number in range(3):
        store.add_addrs(ID(b"\x00\x04" + number.to_bytes(4, "big")), [ANYWHERE], 7200)
    with pytest.raises(PeerStoreError):
        store.privkey(own)


class Asker:
    """A stream's other end, which asks for one protocol; `answered` is called when it gets its answer."""

    def __init__(self, answered: Callable[[], None]) -> None:
        self.answered = answered
        self.said = ["/multistream/1.0.0", "/taken/away"]

    async def read(self) -> str:
        await trio.lowlevel.checkpoint()
        return self.said.pop(0)

    async def write(self, message: str) -> None:
        await trio.lowlevel.checkpoint()
        if message == "/taken/away":
            self.answered()


async def test_a_handler_that_is_taken_away_in_a_negotiation_is_a_key_error() -> None:
    """The DHT's is, when a node finds out that it is behind a NAT; the error came out in the host's own nursery."""
    muxer = Multiselect({"/taken/away": None})
    with pytest.raises(KeyError):
        await muxer.negotiate(Asker(lambda: muxer.remove_handler("/taken/away")))
    # ours: tests/p2p/transport/test_exceptions.py


async def test_a_reader_of_lines_asks_for_as_many_bytes_as_it_is_told() -> None:
    asked = []

    class Reader:
        async def read(self, count: int) -> bytes:
            await trio.lowlevel.checkpoint()
            asked.append(count)
            return bytes([*b"\x80" * 5, 1][len(asked) - 1 :][:1]) if count == 1 else b""

    with pytest.raises(IncompleteReadError):
        await read_delim(Reader())
    assert max(asked) == 1 << 35
    # ours: tests/p2p/transport/test_exceptions.py


def test_libp2p_logs_a_peers_failure_with_the_root_logger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "filters", [])
    muxed = SimpleNamespace(peer_id="x")
    with caplog.at_level(logging.DEBUG):
        SwarmConn(muxed, cast("Any", SimpleNamespace()))
        assert [record for record in caplog.records if record.name == "root"]
        caplog.clear()
        libp2p_patches.quiet_libraries()
        SwarmConn(muxed, cast("Any", SimpleNamespace()))
        logging.getLogger("libp2p.network").error("a peer's fault")
    assert not [record for record in caplog.records if libp2p_patches._not_from_libp2p(record)]


async def test_the_muxer_that_is_asked_for_is_not_the_one_that_is_used() -> None:
    class Ours(Yamux):
        pass

    host = new_host(key_pair=create_new_key_pair(), muxer_opt={PROTOCOL_ID: Ours})
    async with host.run([ANYWHERE]), stock() as bob:
        await host.connect(info(bob))
        (connection,) = swarm(host).get_connections()
        assert type(connection.muxed_conn) is Yamux


async def test_of_two_connections_the_one_with_more_streams_is_used_though_the_other_was_heard() -> None:
    def connection(streams: int, heard_at: float) -> Any:  # noqa: ANN401  # as little of one as is looked at
        channel = SimpleNamespace(origin=Origin("direct"))
        muxed = SimpleNamespace(heard_at=heard_at, secured_conn=channel)
        direct = SimpleNamespace(get_connection_type=lambda: ConnectionType.DIRECT, get_streams=lambda: [None] * streams)
        direct.muxed_conn = muxed
        return direct

    dead, alive = connection(3, 1.0), connection(0, 9.0)
    async with stock() as ann:
        assert swarm(ann)._select_connection([dead, alive], ann.get_id()) is dead
        libp2p_patches.prefer(swarm(ann), best)
        assert swarm(ann)._select_connection([dead, alive], ann.get_id()) is alive


async def test_the_auto_connector_notes_who_was_lost_until_the_host_stops() -> None:
    async with stock() as ann, stock() as bob:
        await swarm(ann).auto_connector.stop()
        await ann.connect(info(bob))
        await ann.disconnect(bob.get_id())
        await until(lambda: swarm(ann).auto_connector._recent_disconnects)
        libp2p_patches.forget_disconnected(swarm(ann), bob.get_id())
        assert not swarm(ann).auto_connector._recent_disconnects


async def test_what_a_peer_says_of_itself_is_kept_when_it_has_gone() -> None:
    async with stock() as ann, stock() as bob:
        await ann.connect(info(bob))
        await until(lambda: "/ipfs/ping/1.0.0" in ann.get_peerstore().get_protocols(bob.get_id()))
        assert ID_PUSH in ann.get_mux().get_protocols()
        await ann.disconnect(bob.get_id())
        await until(lambda: not swarm(ann).get_connections())
        assert ann.get_peerstore().get_protocols(bob.get_id())
    # ours: tests/p2p/transport/test_connection.py, test_nothing_is_kept_of_peers_that_have_gone


def test_the_dht_keeps_any_number_of_keys_and_no_late_provider() -> None:
    def kept(providers: dict[bytes, Any] | None) -> tuple[int, bool]:
        store = ProviderStore(cast("IHost", SimpleNamespace(get_id=lambda: ID(b"own"))))
        if providers is not None:
            store.providers = providers
        peers = [PeerInfo(ID.from_pubkey(create_new_key_pair().public_key), [ANYWHERE]) for _ in range(625)]
        for number in range(600):
            store.add_provider(number.to_bytes(34, "big"), peers[number])
        for peer in peers[600:]:
            store.add_provider(b"key", peer)
        return len(store.providers), peers[-1].peer_id in {found.peer_id for found in store.get_providers(b"key")}

    assert kept(None) == (601, False)
    assert kept(libp2p_patches.Providers(b"key")) == (512, True)


async def test_the_dht_answers_under_the_public_networks_id_whatever_its_prefix() -> None:
    async with stock() as host:
        KadDHT(host, DHTMode.SERVER, protocol_prefix=TProtocol("/test"))
        assert TProtocol("/test/kad/1.0.0") not in host.get_mux().get_protocols()


def test_the_dht_reads_messages_of_megabytes() -> None:
    code = "from libp2p.kad_dht import common, kad_dht; print(kad_dht.MAX_DHT_MESSAGE_SIZE, common.PROTOCOL_ID)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(4 << 20), "/ipfs/kad/1.0.0"], "before own_dht"


def test_ids_of_any_length_are_written_in_base58() -> None:
    """Which takes time by the square of the length; what logs them is not even heard."""
    assert "b58encode(self._bytes)" in inspect.getsource(libp2p.peer.id)
    libp2p_patches.bound_lengths()
    assert len(str(ID(bytes(1000)))) == 64


def test_each_line_of_our_log_is_there_once_where_libp2p_has_logged_before_it_began() -> None:
    """`nolocod join NAME` looks for the run first."""
    code = (
        "import logging; from nolocod.p2p.libp2p_patches import quiet_libraries; from nolocod.observe import logs\n"
        "quiet_libraries(); logging.info('as libp2p does'); logs.set_up('info'); logging.getLogger('nolocod').info('once')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("once") == 1, done.stderr
