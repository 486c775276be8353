"""Private networks on real sockets: who has another network key, or is not on the list, and what each side is told."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.errors import PeerNetworkKeyError, PeerNotAllowedError, PeerUnavailableError, RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, Troubled
from nolocod.p2p.host import Host, open_host
from nolocod.p2p.limits import connection_gater
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.run.credentials import prologue, read_allow_list
from nolocod.units import Address
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.p2p.transport.stream import Stream

ECHO = "/test/echo"
KEY, OTHER = bytes(32), bytes(range(32))


@asynccontextmanager
async def a_host(gater: ConnectionGater | None = None, identity: Identity | None = None) -> AsyncIterator[Host]:
    own = identity or Identity.generate()
    async with open_host(own, (Address("127.0.0.1", 0),), (), lambda event: None, gater=gater) as host:

        async def echo(stream: Stream) -> None:
            await stream.write(await stream.read_exactly(5))

        host.serve(ECHO, echo)
        yield host


async def talk(asker: Host, other: Host) -> None:
    """RemoteError unless a stream works."""
    with trio.fail_after(ENOUGH):
        stream = await asker.open_stream(other.own, ECHO, other.announced)
        await stream.write(b"hello")
        assert await stream.read_exactly(5) == b"hello"
        await stream.close()


def keyed(key: bytes | None) -> ConnectionGater:
    return ConnectionGater(prologue(key))


# --- the network key ----------------------------------------------------------------------------------


async def test_the_same_key_on_both_sides_connects() -> None:
    async with a_host(keyed(KEY)) as ann, a_host(keyed(KEY)) as bob:
        await talk(ann, bob)


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, OTHER), (None, KEY), (KEY, None)], ids=["another", "none", "needless"])
async def test_another_key_or_none_is_told_at_once(ours: bytes | None, theirs: bytes | None) -> None:
    async with a_host(keyed(ours)) as ann, a_host(keyed(theirs)) as bob:
        with trio.fail_after(ENOUGH), pytest.raises(PeerNetworkKeyError, match="network key"):
            await talk(ann, bob)
        assert not ann.peers()
        assert not bob.peers()


async def test_what_is_no_answer_at_all_is_not_taken_for_another_key() -> None:
    async def babble(stream: trio.SocketStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\x00\x20" + bytes(32))
        await trio.sleep_forever()

    async with a_host(keyed(KEY)) as ann, trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, babble, listeners)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(PeerUnavailableError, match="not a libp2p node"):
            await ann.connect(Identity.generate().peer_id, (f"/ip4/127.0.0.1/tcp/{port}",))
        nursery.cancel_scope.cancel()


# --- the allow list -----------------------------------------------------------------------------------


async def test_who_is_not_on_the_list_is_told_so_before_any_stream() -> None:
    stranger, friend = Identity.generate(), Identity.generate()
    async with a_host(ConnectionGater(allowed=frozenset({friend.peer_id}))) as bob:
        async with a_host(identity=friend) as ann:
            await talk(ann, bob)
        async with a_host(identity=stranger) as eve:
            with trio.fail_after(ENOUGH), pytest.raises(PeerNotAllowedError, match="not on the allow list of"):
                await talk(eve, bob)
            assert not bob.peers().keys() & {stranger.peer_id}


async def test_we_dial_nobody_who_is_not_on_our_list() -> None:
    async with a_host(ConnectionGater(allowed=frozenset())) as ann, a_host() as bob:
        with pytest.raises(PeerNotAllowedError, match="not on this node's allow list"):
            await talk(ann, bob)
        assert not bob.peers()


async def test_the_list_is_read_again_when_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_gater, "_REREAD", 0.02)
    ann, bob = Identity.generate().peer_id, Identity.generate().peer_id
    file = tmp_path / "allow"
    file.write_text(f"{ann}\n")
    gater, events = ConnectionGater.reading(None, file, read_allow_list), list[Event]()
    dropped = trio.Event()

    async def drop(peer: PeerId) -> None:
        assert peer == ann
        dropped.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(gater.follow, lambda: [ann], drop, events.append)
        assert gater.allows(ann)
        await trio.testing.wait_all_tasks_blocked()
        file.write_text("nonsense and more than one line has room for, so that the size differs\n")
        await until(lambda: events)
        assert isinstance(events[0], Troubled)
        assert "line 1" in events[0].message
        assert gater.allows(ann), "a list that is none changes nothing"
        file.write_text(f"{bob}\n")
        with trio.fail_after(ENOUGH):
            await dropped.wait()
        assert not gater.allows(ann)
        assert gater.allows(bob)
        nursery.cancel_scope.cancel()


async def not_called(_: PeerId) -> None:
    pytest.fail("nobody is connected")


async def test_a_change_between_the_first_reading_and_the_first_look_is_seen(tmp_path: Path) -> None:
    ann, bob = Identity.generate().peer_id, Identity.generate().peer_id
    file = tmp_path / "allow"
    file.write_text(f"{ann}\n")
    gater = ConnectionGater.reading(None, file, read_allow_list)
    file.write_text(f"{bob}\n{bob}\n")

    def looked() -> tuple[PeerId, ...]:
        assert gater.allows(bob)
        nursery.cancel_scope.cancel()
        return ()

    with trio.fail_after(ENOUGH):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gater.follow, looked, not_called, lambda _: None)
    assert gater.allows(bob)
    assert not gater.allows(ann)


async def test_who_was_half_way_in_when_the_list_changed_is_dropped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_gater, "_REREAD", 0.02)
    eve = Identity.generate()
    file = tmp_path / "allow"
    file.write_text(f"{eve.peer_id}\n")
    gater = ConnectionGater.reading(None, file, read_allow_list)
    async with a_host(gater) as bob, a_host(identity=eve) as host, trio.open_nursery() as nursery:
        applied, put_out = trio.Event(), trio.Event()

        def looked() -> list[PeerId]:
            if not gater.allows(eve.peer_id):
                applied.set()
            return list(bob.peers())

        async def drop(peer: PeerId) -> None:
            await bob.disconnect(peer)
            put_out.set()

        upgrade = bob.basic.get_network().upgrader.upgrade_connection

        async def slow(*arguments: object) -> object:
            """The handshake is done, the connection is not yet in the books: now the list changes, and is applied."""
            file.write_text("# nobody\n")
            await applied.wait()
            return await upgrade(*arguments)

        bob.basic.get_network().upgrader.upgrade_connection = slow
        nursery.start_soon(gater.follow, looked, drop, lambda _: None)
        with trio.fail_after(ENOUGH):
            with suppress(RemoteError):
                await host.connect(bob.own, bob.announced)
            await put_out.wait()
        nursery.cancel_scope.cancel()


# --- through a relay ----------------------------------------------------------------------------------


async def test_a_circuit_is_let_through_by_the_same_key_and_list() -> None:
    ids = {name: Identity.generate() for name in ("relay", "ann", "bob", "eve")}
    friends = frozenset(ids[name].peer_id for name in ("relay", "ann"))
    async with AsyncExitStack() as stack:

        async def member(name: str, gater: ConnectionGater) -> Host:
            return await stack.enter_async_context(a_host(gater, ids[name]))

        relay = await member("relay", keyed(KEY))
        bob = await member("bob", ConnectionGater(prologue(KEY), friends))
        ann, eve = await member("ann", keyed(KEY)), await member("eve", keyed(KEY))
        Relay(relay).serve()
        clients = {host.own: RelayClient(host) for host in (ann, bob, eve)}
        for host in (ann, bob, eve):
            clients[host.own].serve()
            await host.connect(relay.own, relay.announced)
        await clients[bob.own].reserve(relay.own)
        await clients[ann.own].connect(relay.own, bob.own)
        assert ann.peers()[bob.own] == "relayed"
        with trio.fail_after(ENOUGH), pytest.raises(PeerNotAllowedError, match="not on the allow list of"):
            await clients[eve.own].connect(relay.own, bob.own)
        assert eve.own not in bob.peers()


async def test_the_ends_of_a_circuit_need_the_same_key_whatever_the_relay_has() -> None:
    """Both ends hold the relay's key, and one of them takes another for the circuit."""
    async with a_host(keyed(KEY)) as relay, a_host(keyed(KEY)) as ann:
        theirs = keyed(KEY)
        async with a_host(theirs) as bob:
            Relay(relay).serve()
            clients = {host.own: RelayClient(host) for host in (ann, bob)}
            for host in (ann, bob):
                clients[host.own].serve()
                await host.connect(relay.own, relay.announced)
            await clients[bob.own].reserve(relay.own)
            theirs.prologue = prologue(OTHER)
            with trio.fail_after(ENOUGH), pytest.raises(PeerNetworkKeyError):
                await clients[ann.own].connect(relay.own, bob.own)
