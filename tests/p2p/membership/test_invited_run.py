"""Runs that one must be invited to, between whole meshes on loopback: who gets in, who is told why not, who is put out."""

from __future__ import annotations

import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.disk import write_whole
from nolocod.errors import (
    InvitationOverError,
    LocalError,
    NetworkKeyError,
    NoBootstrapError,
    NotAllowedError,
    NotInvitedError,
    PeerInvitationOverError,
    PeerNetworkKeyError,
    PeerNotInvitedError,
    PeerUnavailableError,
    RefusedError,
)
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, PeerLost, Troubled
from nolocod.p2p.discovery.bootstrap import verdict
from nolocod.p2p.host import open_host
from nolocod.p2p.membership import left_by_commands
from nolocod.p2p.membership.admission import InvitedAdmission
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.nat.circuit_relay import RelayClient
from nolocod.p2p.settings import Access, MeshSettings, Relaying
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport import requests
from nolocod.p2p.transport.multiaddrs import multiaddr_of
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, SNAPSHOT
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Standing
from nolocod.run import credentials
from nolocod.run.credentials import Grant
from nolocod.run.manifest import Manifest, Sealed, seal
from nolocod.units import Address
from tests.support.wires import ENOUGH, own_port, until, wait_members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.p2p.transport.stream import Stream

QUICK = Timing(heartbeat=0.2, live=10.0, request=8.0, bootstrap=2 * ENOUGH, search=0.5, widen=1.0, ping=15.0, pong=5.0)
ANYWHERE = Address("127.0.0.1", 0)


@dataclass
class Node:
    """A node of the run, or one that wants to be."""

    data_dir: Path
    identity: Identity = field(default_factory=Identity.generate)
    access: Access = field(default_factory=Access)
    bootstrap: tuple[str, ...] = ()
    listen: Address = ANYWHERE
    announce: tuple[str, ...] = ()
    relaying: Relaying = field(default_factory=Relaying)
    events: list[Event] = field(default_factory=list)

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def config(self) -> MeshSettings:
        return MeshSettings(
            self.data_dir,
            bootstrap=self.bootstrap,
            listen=(self.listen,),
            announce=self.announce,
            relaying=self.relaying,
            access=self.access,
            upnp=False,
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Mesh]:
        self.data_dir.mkdir(exist_ok=True)
        rng = random.Random(7)
        async with open_mesh(self.config, self.identity, self.events.append, rng=rng, timing=QUICK) as mesh:
            yield mesh

    @asynccontextmanager
    async def join(self) -> AsyncIterator[Mesh]:
        """As the daemon does it: ask for the run, then enter."""
        async with self.open() as mesh:
            await mesh.enter(await mesh.find_run(), lambda: (Standing(1, 0, 0.0), "training"))
            yield mesh

    def troubles(self) -> set[str]:
        return {event.code for event in self.events if isinstance(event, Troubled)}


@dataclass
class Run:
    """A run, its owner's node, and that node's mesh."""

    owner: Node
    sealed: Sealed
    mesh: Mesh

    def invite(self, lasts: float = 600.0, peer: str = "", addresses: tuple[str, ...] = ()) -> str:
        grant = Grant(time.time(), lasts, peer, addresses or self.mesh.addresses)
        return credentials.issue(self.owner.config.paths, self.sealed, self.owner.identity, grant)[1]

    def revoke(self, *names: str) -> None:
        credentials.revoke(self.owner.config.paths, self.sealed, self.owner.identity, names)


@asynccontextmanager
async def a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes | None = None, listen: Address = ANYWHERE
) -> AsyncIterator[Run]:
    monkeypatch.setattr(left_by_commands, "_REREAD", 0.1)
    owner = Node(tmp_path / "owner", listen=listen, announce=(multiaddr_of(listen),) if listen.port else ())
    owner.data_dir.mkdir()
    sealed = seal(Manifest(name="private", model={"model_type": "llama"}, access="invited"), owner.identity)
    write_whole(owner.config.paths.manifest, sealed.to_bytes())
    if key is not None:
        credentials.keep_network_key(owner.config.paths, key)
    async with owner.open() as mesh:
        await mesh.enter(sealed, lambda: (Standing(1, 0, 0.0), "training"))
        yield Run(owner, sealed, mesh)


def members(mesh: Mesh) -> set[PeerId]:
    return {member.peer_id for member in mesh.live()}


async def test_a_token_is_all_that_a_newcomer_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(tmp_path, monkeypatch, key=bytes(range(32))) as run, AsyncExitStack() as stack:
        ann, bob = (Node(tmp_path / name, access=Access(invite=run.invite())) for name in ("ann", "bob"))
        first = await stack.enter_async_context(ann.join())
        second = await stack.enter_async_context(bob.join())
        await until(lambda: members(first) == {run.owner.peer_id, bob.peer_id})
        await until(lambda: members(second) == {run.owner.peer_id, ann.peer_id})
        await until(lambda: members(run.mesh) == {ann.peer_id, bob.peer_id})


async def test_a_member_comes_back_without_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(tmp_path, monkeypatch, key=bytes(32)) as run:
        ann = Node(tmp_path / "ann", access=Access(invite=run.invite()))
        async with ann.join() as mesh:
            await wait_members(mesh, 1)
            await mesh.leave()
        ann.access = Access()
        async with ann.join() as mesh:
            assert members(mesh) == {run.owner.peer_id}


@pytest.mark.parametrize(
    ("key", "expected"), [(bytes(32), NetworkKeyError), (None, NetworkKeyError)], ids=["another key", "no key"]
)
async def test_another_network_key_is_told_to_the_joiner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes | None, expected: type[LocalError]
) -> None:
    async with a_run(tmp_path, monkeypatch, key=bytes(range(32))) as run:
        ann = Node(tmp_path / "ann", bootstrap=run.mesh.addresses)
        if key is not None:
            file = tmp_path / "key"
            file.write_text(key.hex())
            ann.access = Access(network_key=file)
        with trio.fail_after(ENOUGH), pytest.raises(expected, match="network key"):
            async with ann.join():
                pytest.fail("joined")


async def test_an_allow_list_keeps_out_at_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "allow"
    file.write_text(f"{Identity.generate().peer_id}\n")
    boss = Node(tmp_path / "boss", access=Access(allow=file))
    sealed = seal(Manifest(name="open", model={"model_type": "llama"}), boss.identity)
    async with boss.open() as mesh:
        await mesh.enter(sealed, lambda: (Standing(1, 0, 0.0), "training"))
        with trio.fail_after(ENOUGH), pytest.raises(NotAllowedError):
            async with Node(tmp_path / "ann", bootstrap=mesh.addresses).join():
                pytest.fail("joined")


async def test_who_was_not_invited_gets_the_manifest_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(tmp_path, monkeypatch) as run:
        ann = Node(tmp_path / "ann", bootstrap=run.mesh.addresses)
        async with ann.open() as mesh:
            assert await mesh.find_run() == run.sealed
            with pytest.raises(NotInvitedError, match="accepts only nodes"):
                await mesh.enter(run.sealed, lambda: (Standing(1, 0, 0.0), "training"))
        monkeypatch.setattr(InvitedAdmission, "_check_ourselves", lambda self: None)  # a node that tries all the same
        async with ann.open() as mesh:
            with pytest.raises(NotInvitedError, match="shows no invitation"):
                await mesh.enter(run.sealed, lambda: (Standing(1, 0, 0.0), "training"))
        assert ann.peer_id not in members(run.mesh)


async def test_a_relay_of_an_invited_run_carries_for_its_members_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is invited comes in by the address of a member that only the relay reaches."""
    listen = Address("127.0.0.1", own_port())
    async with a_run(tmp_path, monkeypatch, listen=listen) as run, AsyncExitStack() as stack:
        hidden = Node(tmp_path / "ann", access=Access(invite=run.invite()), relaying=Relaying(only=True))
        mesh = await stack.enter_async_context(hidden.join())
        await until(lambda: mesh.addresses)
        assert all("/p2p-circuit/" in address for address in mesh.addresses)

        eve = Identity.generate()
        stranger = await stack.enter_async_context(open_host(eve, (ANYWHERE,), (), lambda _: None))
        await stranger.connect(run.owner.peer_id, run.mesh.addresses)
        client = RelayClient(stranger)
        for asked in (client.reserve(run.owner.peer_id), client.connect(run.owner.peer_id, hidden.peer_id)):
            with pytest.raises(RefusedError, match="PERMISSION_DENIED"):
                await asked

        bob = Node(tmp_path / "bob", access=Access(invite=run.invite(addresses=mesh.addresses)))
        other = await stack.enter_async_context(bob.join())
        await until(lambda: any(member.peer_id == hidden.peer_id and member.addresses for member in other.live()))
        assert await other.dial(hidden.peer_id, GOSSIP)


@pytest.mark.parametrize("protocol", [EXCHANGE, SNAPSHOT])
async def test_weights_are_for_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    async with a_run(tmp_path, monkeypatch) as run:
        served = 0

        async def serve(stream: Stream) -> None:
            nonlocal served
            served += 1

        run.mesh.serve(protocol, serve)
        stranger = Node(tmp_path / "eve", bootstrap=run.mesh.addresses)
        async with stranger.open() as mesh:
            stream = await mesh._host.open_stream(run.owner.peer_id, protocol, run.mesh.addresses)
            terms = requests.Terms(stranger.identity, run.sealed.run_id, 5.0)
            with pytest.raises(PeerNotInvitedError):
                await requests.ask(stream, pb.Body(snapshot_request=pb.SnapshotRequest()), terms, "snapshot_offer")
        assert not served


async def test_a_member_introduces_itself_before_it_asks_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(tmp_path, monkeypatch) as run, AsyncExitStack() as stack:
        ann, bob = (Node(tmp_path / name, access=Access(invite=run.invite())) for name in ("ann", "bob"))
        first = await stack.enter_async_context(ann.join())
        second = await stack.enter_async_context(bob.join())
        asked = trio.Event()

        async def serve(stream: Stream) -> None:
            asked.set()

        second.serve(SNAPSHOT, serve)
        await until(lambda: bob.peer_id in members(first))
        assert isinstance(second._admission, InvitedAdmission)
        second._admission._admitted.clear()  # as if it had never heard of her, this very heartbeat included
        second._table._entries.pop(ann.peer_id, None)
        second._table._memories.pop(ann.peer_id, None)
        assert first._gossip is not None
        first._gossip.heard_directly.pop(bob.peer_id, None)
        await first.dial(bob.peer_id, SNAPSHOT)
        with trio.fail_after(ENOUGH):
            await asked.wait()


async def test_an_expired_invitation_is_told_before_anything_is_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_run(tmp_path, monkeypatch) as run:
        ann = Node(tmp_path / "ann", access=Access(invite=run.invite(lasts=-1.0)))
        with pytest.raises(InvitationOverError, match="expired"):
            async with ann.join():
                pytest.fail("joined")


async def test_a_membership_ends_while_the_node_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(tmp_path, monkeypatch) as run:
        ann = Node(tmp_path / "ann", access=Access(invite=run.invite(lasts=600.0)))
        async with ann.join() as joined:
            await until(lambda: ann.peer_id in members(run.mesh))
            for mesh in (run.mesh, joined):
                assert isinstance(mesh._admission, InvitedAdmission)
                assert mesh._gossip is not None
                mesh._admission._clock = mesh._gossip._own_heartbeat.clock = lambda: time.time() + 601.0
            await until(lambda: ann.peer_id not in members(run.mesh))
            await until(lambda: InvitationOverError.entry.code in ann.troubles())


async def test_who_is_revoked_is_dropped_by_all_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_run(tmp_path, monkeypatch) as run, AsyncExitStack() as stack:
        ann, bob = (Node(tmp_path / name, access=Access(invite=run.invite())) for name in ("ann", "bob"))
        first = await stack.enter_async_context(ann.join())
        async with bob.join():
            await until(lambda: bob.peer_id in members(first) and bob.peer_id in members(run.mesh))
            run.revoke(bob.peer_id)
            await until(lambda: bob.peer_id not in members(run.mesh))
            await until(lambda: bob.peer_id not in members(first))
            await until(lambda: PeerInvitationOverError.entry.code in bob.troubles())
            assert any(isinstance(event, PeerLost) and event.peer_id == bob.peer_id for event in ann.events)
        await until(lambda: ann.config.paths.revocations.exists())
        paths = ann.config.paths
        revoked = credentials.opened_revocations(credentials.stored_revocations(paths), paths, run.sealed)
        assert revoked.peers == {bob.peer_id}
        bob.config.paths.revocations.write_bytes(b"")  # one that has heard nothing of it
        with pytest.raises(InvitationOverError, match="revoked"):
            async with bob.join():
                pytest.fail("joined")


def test_what_keeps_a_node_out_is_told_also_when_other_peers_are_away() -> None:
    contacts = [(Identity.generate().peer_id, (f"/ip4/192.0.2.{number}/tcp/1",)) for number in range(3)]
    (ann, _), (bob, _), (cyd, _) = contacts
    away, shut = PeerUnavailableError("connection refused."), PeerNetworkKeyError("it has another network key.")
    assert isinstance(verdict(contacts, {ann: away, bob: shut, cyd: away}), NetworkKeyError)
    assert isinstance(verdict(contacts, {bob: shut}), NetworkKeyError), "the others timed out"
    mixed = verdict(contacts, {ann: shut, bob: PeerNotInvitedError("no invitation.")})
    assert isinstance(mixed, NoBootstrapError)
    assert "another network key" in mixed.cause
    assert isinstance(verdict(contacts, {ann: away, bob: away, cyd: away}), NoBootstrapError)
