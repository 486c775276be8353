"""Whole meshes on loopback: several nodes in one process find, lose and refuse each other."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from nolocod.errors import (
    NoBootstrapError,
    OtherRunError,
    PeerUnavailableError,
    PeerVersionError,
    PortTakenError,
    RelayBudgetError,
    RemoteError,
    UsageError,
    VersionError,
    WrongRunError,
)
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, PeerLost, PeerSeen, RelayHeld, RelayLost, Troubled
from nolocod.p2p import host as host_module
from nolocod.p2p.discovery.kademlia import open_dht
from nolocod.p2p.host import open_host
from nolocod.p2p.limits.connection_manager import KEPT, MEMBER, PARTNER, STRANGER
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.settings import MeshSettings, Relaying
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport import requests
from nolocod.p2p.transport.listen_addresses import claim
from nolocod.p2p.transport.multiaddrs import multiaddr_of
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, PING
from nolocod.paths import DataDir
from nolocod.proto import envelope
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, Sealed, seal
from nolocod.units import Address
from tests.support.wires import ENOUGH, own_port, until, wait_members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.p2p.transport.stream import Stream

QUICK = Timing(heartbeat=0.2, live=3.0, request=8.0, bootstrap=2 * ENOUGH, search=0.5, widen=1.0, ping=15.0, pong=5.0)
STILL = replace(QUICK, heartbeat=60.0, live=600.0)


def a_run(name: str = "test") -> Sealed:
    return seal(Manifest(name=name, model={"model_type": "llama"}), Identity.generate())


@dataclass
class Node:
    """A node that is to be opened, and what it tells once it is."""

    data_dir: Path
    identity: Identity = field(default_factory=Identity.generate)
    bootstrap: tuple[str, ...] = ()
    timing: Timing = QUICK
    standing: Standing = field(default_factory=lambda: Standing(5, 100, 2.5))
    state: str = "training"
    relaying: Relaying = field(default_factory=Relaying)
    listen: Address = field(default_factory=lambda: Address("127.0.0.1", 0))
    announce: tuple[str, ...] = ()
    events: list[Event] = field(default_factory=list)

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    def own(self) -> tuple[Standing, str]:
        return self.standing, self.state

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Mesh]:
        self.data_dir.mkdir(exist_ok=True)
        config = MeshSettings(
            data_dir=self.data_dir,
            bootstrap=self.bootstrap,
            listen=(self.listen,),
            announce=self.announce,
            relaying=self.relaying,
        )
        async with open_mesh(config, self.identity, self.events.append, rng=random.Random(7), timing=self.timing) as mesh:
            yield mesh

    @asynccontextmanager
    async def member(self, sealed: Sealed) -> AsyncIterator[Mesh]:
        async with self.open() as mesh:
            await mesh.enter(sealed, self.own)
            yield mesh

    def troubles(self) -> set[str]:
        return {event.code for event in self.events if isinstance(event, Troubled)}


async def test_what_a_connection_is_worth(tmp_path: Path) -> None:
    """Bootstraps before partners, partners before members, members before strangers and the banned."""
    sealed, ann = a_run(), Node(tmp_path / "ann")
    async with ann.member(sealed) as first:
        bob = Node(tmp_path / "bob", bootstrap=first.addresses[:1])
        async with bob.member(sealed) as second:
            await wait_members(first)
            rank = first._host.dialer.connection_manager.rank
            assert second._host.dialer.connection_manager.rank(ann.peer_id) == KEPT
            assert (rank(bob.peer_id), rank(Identity.generate().peer_id)) == (MEMBER, STRANGER)
            first.judge(bob.peer_id, Conduct.COMMITTED)
            assert rank(bob.peer_id) == PARTNER
            for _ in range(3):
                first.judge(bob.peer_id, Conduct.FALSE_SIGNATURE)
            assert rank(bob.peer_id) == STRANGER


async def test_six_nodes_find_each_other_through_one_bootstrap(tmp_path: Path) -> None:
    sealed, count = a_run(), 6
    async with AsyncExitStack() as stack:
        meshes: list[Mesh] = []
        nodes: list[Node] = []
        for number in range(count):
            bootstrap = meshes[0].addresses[:1] if meshes else ()
            nodes.append(Node(tmp_path / str(number), bootstrap=bootstrap, standing=Standing(number, 0, 1.0)))
            mesh = await stack.enter_async_context(nodes[-1].open())
            found = await mesh.find_run() if meshes else sealed
            assert found == sealed
            await mesh.enter(found, nodes[-1].own)
            meshes.append(mesh)
        for mesh, node in zip(meshes, nodes, strict=True):
            live = await wait_members(mesh, count - 1)
            assert {member.peer_id for member in live} == {other.peer_id for other in nodes} - {node.peer_id}
        rounds = {member.peer_id: member.standing.round for member in meshes[0].live()}
        assert rounds == {node.peer_id: number for number, node in enumerate(nodes) if number}
        assert {event.peer_id for event in nodes[0].events if isinstance(event, PeerSeen)} == set(rounds)


async def test_a_newcomer_contacts_everybody_at_once(tmp_path: Path) -> None:
    sealed = a_run()
    first, second, third = (Node(tmp_path / name, timing=STILL) for name in "abc")
    async with first.member(sealed) as ann:
        second.bootstrap = third.bootstrap = ann.addresses
        async with second.member(sealed) as bob, third.member(sealed):
            await wait_members(ann, 2)
            assert len(await wait_members(bob, 2)) == 2, "told by the newcomer itself: nobody beats for a minute"


async def test_a_node_that_vanishes_is_dropped_and_one_that_leaves_is_so_at_once(tmp_path: Path) -> None:
    sealed = a_run()
    first, second, third = (Node(tmp_path / name) for name in "abc")
    async with first.member(sealed) as ann:
        second.bootstrap = third.bootstrap = ann.addresses
        async with AsyncExitStack() as short_lived:
            await short_lived.enter_async_context(second.member(sealed))
            async with third.member(sealed) as cyd:
                await wait_members(ann, 2)
                assert cyd._gossip is not None
                cyd._gossip._under_way.add(first.peer_id)  # as if a message had just been sent
                await cyd.leave()
                await until(lambda: PeerLost(third.peer_id, "it left") in first.events)
                assert [member.peer_id for member in ann.live()] == [second.peer_id]
        await until(lambda: any(event.peer_id == second.peer_id for event in first.events if isinstance(event, PeerLost)))
        assert ann.live() == []


async def test_a_restart_without_bootstrap_goes_by_the_peer_book(tmp_path: Path) -> None:
    sealed = a_run()
    boot, stays, restarts = (Node(tmp_path / name) for name in "abc")
    async with stays.member(sealed) as stayed:
        boot.bootstrap = stayed.addresses
        async with boot.member(sealed) as at_boot:
            restarts.bootstrap = at_boot.addresses
            async with restarts.member(sealed) as mesh:
                await wait_members(mesh, 2)
                await mesh.leave()
        async with restarts.open() as again:
            assert (await again.find_run()).run_id == sealed.run_id
            await again.enter(sealed, restarts.own)
            await until(lambda: stays.peer_id in {member.peer_id for member in again.live()})
            await until(lambda: restarts.peer_id in {member.peer_id for member in stayed.live()})


async def test_who_is_killed_right_after_joining_finds_back_without_a_bootstrap(tmp_path: Path) -> None:
    sealed = a_run()
    stays, killed = Node(tmp_path / "a", timing=STILL), Node(tmp_path / "b", timing=STILL)
    async with stays.member(sealed) as stayed:
        killed.bootstrap = stayed.addresses
        async with killed.member(sealed):
            pass  # ends without a word: nothing is saved after this
        killed.bootstrap = ()
        async with killed.member(sealed) as again:
            assert [member.peer_id for member in again.live()] == [stays.peer_id]


async def test_a_founder_notes_its_first_member_long_before_it_saves_the_next_time(tmp_path: Path) -> None:
    sealed = a_run()
    founder, first = Node(tmp_path / "a", timing=STILL), Node(tmp_path / "b", timing=STILL)
    async with founder.member(sealed) as mesh:
        first.bootstrap = mesh.addresses
        async with first.member(sealed):
            book = DataDir(founder.data_dir).peers
            with trio.fail_after(25.0):
                await until(lambda: book.exists() and first.peer_id in book.read_text())


async def test_a_node_alone_goes_on_looking(tmp_path: Path) -> None:
    sealed = a_run()
    first, late = Node(tmp_path / "a"), Node(tmp_path / "b")
    async with late.member(sealed) as mesh:
        address = mesh.addresses
        async with AsyncExitStack() as stack:
            first.bootstrap = (address[0].replace(f"/p2p/{late.peer_id}", f"/p2p/{Identity.generate().peer_id}"),)
            alone = await stack.enter_async_context(first.member(sealed))
            assert first.troubles() == {NoBootstrapError.entry.code}
            late_too = Node(tmp_path / "c", bootstrap=alone.addresses)
            await stack.enter_async_context(late_too.member(sealed))
            assert len(await wait_members(alone, 1)) == 1


async def test_the_manifest_is_checked_and_comes_from_whoever_answers_first(tmp_path: Path) -> None:
    sealed = a_run()
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    first = Node(tmp_path / "a")
    async with first.member(sealed) as mesh, Node(tmp_path / "b", bootstrap=(dead, *mesh.addresses)).open() as newcomer:
        with trio.fail_after(ENOUGH):
            assert await newcomer.find_run() == sealed


async def test_no_bootstrap_names_each_address_and_cause(tmp_path: Path) -> None:
    peer = Identity.generate().peer_id
    other = Node(tmp_path / "other")
    async with other.open() as runless:
        wrong_id = runless.addresses[0].replace(other.peer_id, peer)
        asked = (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}", wrong_id, runless.addresses[0])
        async with Node(tmp_path / "a", bootstrap=asked, timing=replace(QUICK, bootstrap=2.0)).open() as mesh:
            with pytest.raises(NoBootstrapError) as caught:
                await mesh.find_run()
    assert "tcp/1: " in caught.value.cause
    for cause in ("connection refused", "another peer", "does not know the protocol"):
        assert cause in caught.value.cause


async def test_no_bootstrap_at_all(tmp_path: Path) -> None:
    async with Node(tmp_path / "a").open() as mesh:
        with pytest.raises(NoBootstrapError, match="no bootstrap address was given"):
            await mesh.find_run()
    with pytest.raises(UsageError, match="--bootstrap"):
        async with Node(tmp_path / "a", bootstrap=("nonsense",)).open():
            pytest.fail("opened")


async def test_another_run_is_named_on_both_sides(tmp_path: Path) -> None:
    ours, theirs = a_run("ours"), a_run("theirs")
    first = Node(tmp_path / "a")
    async with first.member(ours) as mesh, Node(tmp_path / "b", bootstrap=mesh.addresses).open() as stray:
        with pytest.raises(WrongRunError) as caught:
            await stray.enter(theirs, first.own)
        assert ours.run_id in caught.value.cause
        assert theirs.run_id in caught.value.cause
        await until(lambda: OtherRunError.entry.code in first.troubles())
        assert mesh.live() == []


async def test_another_major_version_is_named_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = a_run()
    first, second = Node(tmp_path / "a"), Node(tmp_path / "b")
    ours = envelope.seal

    def seal_as_newer(body: envelope.pb.Body, identity: Identity) -> bytes:
        sealed_envelope = envelope.pb.Envelope.FromString(ours(body, identity))
        sealed_envelope.major = 2 if identity == second.identity else 1
        return sealed_envelope.SerializeToString()

    monkeypatch.setattr(requests, "seal", seal_as_newer)
    async with first.member(sealed) as mesh:
        second.bootstrap = mesh.addresses
        async with second.open() as newer:
            with pytest.raises(VersionError, match=r"2\.0.*1\.0"):
                await newer.enter(sealed, second.own)
        await until(lambda: PeerVersionError.entry.code in first.troubles())
        assert mesh.live() == []


async def test_a_manifest_for_another_major_version_is_refused(tmp_path: Path) -> None:
    sealed = a_run()
    newer = seal(msgspec.structs.replace(sealed.manifest, protocol=2), Identity.generate())
    async with Node(tmp_path / "a").open() as mesh:
        with pytest.raises(VersionError, match="protocol version 2"):
            await mesh.enter(newer, lambda: (Standing(0, 0, 0.0), "training"))


async def test_streams_by_peer_id_alone(tmp_path: Path) -> None:
    sealed = a_run()
    first, second = Node(tmp_path / "a"), Node(tmp_path / "b")
    async with first.member(sealed) as ann:
        second.bootstrap = ann.addresses
        async with AsyncExitStack() as stack:
            bob = await stack.enter_async_context(second.member(sealed))

            async def shout(stream: Stream) -> None:
                await stream.write((await stream.read_exactly(3)).upper())

            bob.serve("/test/shout", shout)
            await wait_members(ann, 1)
            stream = await ann.dial(second.peer_id, "/test/shout")
            await stream.write(b"hey")
            assert await stream.read_exactly(3) == b"HEY"
            assert ann.connections()[second.peer_id] == "inbound"
            assert ann.admits(second.peer_id, Standing(5, 0, 0.0), (), late=False)
            assert not ann.admits(Identity.generate().peer_id, Standing(5, 0, 0.0), (), late=True), "members only"
            assert ann.partner(Standing(5, 0, 0.0)) == second.peer_id
            first.standing = Standing(9, 0, 0.0)
            await until(lambda: ann.partner(first.standing) is None)  # too many rounds away, by its next heartbeat
            first.standing = Standing(5, 0, 0.0)
            await until(lambda: ann.partner(first.standing) == second.peer_id)
            assert ann.partner(Standing(5, 0, 0.0), {second.peer_id}) is None
        with pytest.raises(PeerUnavailableError):
            await ann.dial(second.peer_id, "/test/shout")
        assert ann.partner(Standing(5, 0, 0.0)) is None, "who cannot be reached is no partner"


async def test_a_connection_that_died_without_a_word_is_found_by_a_ping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = a_run()
    timing = replace(STILL, ping=0.6, pong=1.5)
    # its own pings would be signs of life
    first, second = Node(tmp_path / "a", timing=timing), Node(tmp_path / "b", timing=replace(STILL, ping=60.0))
    async with first.member(sealed) as ann:
        second.bootstrap = ann.addresses
        async with second.member(sealed) as bob:
            await wait_members(ann, 1)
            answered = 0

            async def pong(stream: Stream) -> None:
                nonlocal answered
                if answered < 2:
                    await stream.write(await stream.read_exactly(32))
                    answered += 1
                else:
                    await trio.sleep_forever()

            bob.serve(PING, pong)
            await until(lambda: answered == 2)
            assert len(ann.connections()) == 1, "a good connection passes its pings"
            assert ann.partner(Standing(5, 0, 0.0)) == second.peer_id
            await until(lambda: not ann.connections())
            assert ann.partner(Standing(5, 0, 0.0)) is None


async def test_a_peer_whose_pong_waits_behind_its_bulk_is_not_taken_for_dead(tmp_path: Path) -> None:
    sealed = a_run()
    first = Node(tmp_path / "a", timing=replace(STILL, ping=0.3, pong=1.0))
    second = Node(tmp_path / "b", timing=replace(STILL, ping=60.0))
    async with first.member(sealed) as ann:
        second.bootstrap = ann.addresses
        async with second.member(sealed) as bob:
            unanswered = 0

            async def silent(_: Stream) -> None:
                nonlocal unanswered
                unanswered += 1
                await trio.sleep_forever()

            async def drop(stream: Stream) -> None:
                while await stream.arrived(None):
                    pass

            await wait_members(ann, 1)
            bob.serve(PING, silent)
            ann.serve("/test/bulk", drop)
            stream = await bob.dial(first.peer_id, "/test/bulk")
            await until(lambda: unanswered)
            with trio.move_on_after(2.0):  # longer than it takes to give up
                while True:
                    await stream.write(b"a slow line's worth")
                    await trio.sleep(0.05)
            assert len(ann.connections()) == 1
            await until(lambda: not ann.connections())  # silence is death again


async def test_the_dht_names_members_that_one_was_never_told_of() -> None:
    run_id = a_run().run_id
    loopback = Address("127.0.0.1", 0)
    async with AsyncExitStack() as stack:
        hosts = [
            await stack.enter_async_context(open_host(Identity.generate(), (loopback,), (), lambda event: None))
            for _ in range(3)
        ]
        dhts = [await stack.enter_async_context(open_dht(host, run_id)) for host in hosts]
        ann, bob, cyd = hosts
        await ann.connect(bob.own, bob.announced)
        await cyd.connect(bob.own, bob.announced)
        for dht in (dhts[2], dhts[0]):
            await dht.refresh([(bob.own, bob.announced)])
        found = await dhts[0].providers()
        assert cyd.own in found
        assert ann.own not in found
        assert any(address.startswith(cyd.announced[0]) for address in found[cyd.own])


@asynccontextmanager
async def short_lived(node: Node, sealed: Sealed) -> AsyncIterator[trio.CancelScope]:
    """`node` as a member in a task of its own, until the scope is cancelled."""
    up, life = trio.Event(), trio.CancelScope()

    async def live() -> None:
        with life:
            async with node.member(sealed):
                up.set()
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        await up.wait()
        yield life
        life.cancel()


# --- through relays ---------------------------------------------------------------------------------------


def public_node(data_dir: Path, **more: Any) -> Node:  # noqa: ANN401 - Node's own fields
    """A node that says where it is reached, and so relays from the beginning."""
    listen = Address("127.0.0.1", own_port())
    return Node(data_dir, listen=listen, announce=(multiaddr_of(listen),), **more)


def hidden_node(data_dir: Path, *bootstrap: str) -> Node:
    """A node that connects straight to bootstraps and relays only, as if behind a NAT that cannot be punched."""
    return Node(data_dir, bootstrap=bootstrap, relaying=Relaying(only=True))


async def shout(stream: Stream) -> None:
    await stream.write((await stream.read_exactly(3)).upper())


async def shouted(mesh: Mesh, to: PeerId) -> bytes:
    stream = await mesh.dial(to, EXCHANGE)
    await stream.write(b"hey")
    try:
        return await stream.read_exactly(3)
    finally:
        await stream.reset()


def held(node: Node) -> int:
    gained = [event.relay for event in node.events if isinstance(event, RelayHeld)]
    lost = [event.relay for event in node.events if isinstance(event, RelayLost)]
    return len(set(gained)) - len(set(lost) - {relay for relay in lost if gained.count(relay) > lost.count(relay)})


def addresses_of(node: Node, mesh: Mesh) -> tuple[str, ...]:
    """As its heartbeats have told `mesh`."""
    return next((member.addresses for member in mesh.live() if member.peer_id == node.peer_id), ())


async def test_two_that_speak_only_through_a_third_exchange_a_stream(tmp_path: Path) -> None:
    sealed = a_run()
    middle = public_node(tmp_path / "m", relaying=Relaying(rate=1_000_000))
    async with middle.member(sealed) as relay:
        first, second = (hidden_node(tmp_path / name, *relay.addresses) for name in "ab")
        async with first.member(sealed) as ann, second.member(sealed) as bob:
            bob.serve(EXCHANGE, shout)
            await until(lambda: held(first) == held(second) == 1)
            assert all("/p2p-circuit" in address for address in bob.addresses)
            await until(lambda: len(addresses_of(second, ann)) == 1)
            assert {member.peer_id: member.nat for member in ann.live()}[second.peer_id] == "symmetric"
            assert {member.peer_id: member.relays for member in ann.live()} == {middle.peer_id: True, second.peer_id: False}
            assert await shouted(ann, second.peer_id) == b"HEY"
            assert ann.connections() == {middle.peer_id: "direct", second.peer_id: "relayed"}

            ann.expect(2 << 30)  # each way; the relay carries an hour at its rate
            with pytest.raises(RelayBudgetError, match="3600 MB"):
                await ann.dial(second.peer_id, EXCHANGE)
            assert await relay.dial(second.peer_id, GOSSIP), "to the relay itself it is straight"

            middle.state = "paused"  # its owner wants nothing done for others now
            await until(lambda: held(first) == held(second) == 0)
            assert not ann.addresses


async def test_when_the_relay_dies_another_one_carries(tmp_path: Path) -> None:
    sealed = a_run()
    stays, dies = (public_node(tmp_path / name) for name in "xy")
    async with stays.member(sealed) as staying:
        dies.bootstrap = staying.addresses
        dying = f"{dies.announce[0]}/p2p/{dies.peer_id}"
        first, second = (hidden_node(tmp_path / name, dying, *staying.addresses) for name in "ab")
        async with short_lived(dies, sealed) as life, first.member(sealed) as ann, second.member(sealed) as bob:
            bob.serve(EXCHANGE, shout)
            await until(lambda: held(first) == held(second) == 2)
            await until(lambda: len(addresses_of(second, ann)) == 2)
            assert await shouted(ann, second.peer_id) == b"HEY"
            life.cancel()
            await until(lambda: held(first) == held(second) == 1)

            with trio.fail_after(ENOUGH):
                answer = b""
                while not answer:
                    try:
                        answer = await shouted(ann, second.peer_id)
                    except RemoteError:
                        await trio.sleep(0.1)
            assert ann.connections()[second.peer_id] == "relayed"
            assert any(stays.peer_id in address for address in addresses_of(second, ann))


# --- a network that changes -------------------------------------------------------------------------------


def free(address: Address) -> bool:
    """Whether the sockets of one who listened there have gone their way."""
    try:
        with claim((address,)):
            return True
    except PortTakenError:
        return False


async def test_a_node_without_connections_comes_back_though_it_still_believes_its_members(tmp_path: Path) -> None:
    sealed = a_run()
    first = public_node(tmp_path / "a", timing=STILL)
    second = Node(tmp_path / "b", timing=replace(STILL, roam=0.2), bootstrap=(f"{first.announce[0]}/p2p/{first.peer_id}",))
    async with short_lived(first, sealed) as life, second.member(sealed) as bob:
        assert first.peer_id in bob.connections()
        life.cancel()
        await until(lambda: not bob.connections() and free(first.listen))
        async with short_lived(first, sealed):
            await until(lambda: first.peer_id in bob.connections())


async def test_other_interface_addresses_are_told_and_connections_that_died_with_the_old_ones_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = a_run()
    first, second = Node(tmp_path / "a", timing=replace(STILL, roam=0.2, pong=0.3)), Node(tmp_path / "b", timing=STILL)
    async with first.member(sealed) as ann:
        second.bootstrap = ann.addresses
        async with second.member(sealed) as bob:
            await wait_members(ann, 1)

            async def never(_: Stream) -> None:
                await trio.sleep_forever()

            bob.serve(PING, never)
            assert ann.connections()[second.peer_id] == "inbound"
            monkeypatch.setattr(host_module, "announced", lambda *_: ("/ip4/127.0.0.9/tcp/4001",))
            await until(lambda: ann.connections().get(second.peer_id) != "inbound")  # gone, or dialled anew from here
            assert ann.addresses == (f"/ip4/127.0.0.9/tcp/4001/p2p/{first.peer_id}",)
