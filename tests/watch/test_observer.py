"""An observer beside real nodes: it knows them all, they know nothing of it, and it is small."""

from __future__ import annotations

import http.client
import json
import random
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import trio

from nolocod.disk import make_folder
from nolocod.errors import NotInvitedError, RemoteError
from nolocod.identity import Identity
from nolocod.observe.events import Contributed, Contribution, Event, PeerSeen
from nolocod.observe.status.http import Request
from nolocod.p2p import lean
from nolocod.p2p.exchange.receipt_gossip import OwnReceipts, ReceiptGossip, Swarm, fetch
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.recent_receipts import RecentReceipts
from nolocod.p2p.limits.connection_manager import STRANGER
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.settings import Access, MeshSettings
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.requests import Terms
from nolocod.p2p.transport.stream import RECEIPTS
from nolocod.paths import DataDir
from nolocod.proto.types import Standing
from nolocod.run import credentials
from nolocod.run.credentials import Grant
from nolocod.run.manifest import Manifest, Sealed, seal
from nolocod.studies.sim.member import WALL
from nolocod.units import Address
from nolocod.watch import observer as module
from nolocod.watch.observer import Observer
from nolocod.watch.service import WatchConfig, access_of, report_once, seeking
from tests.support.receipts import exchanged
from tests.support.wires import ENOUGH, until, wait_members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nolocod.p2p.transport.stream import Stream

MOST_RESIDENT = 80 * 10**6
QUICK = Timing(heartbeat=0.2, live=10.0, search=0.5, widen=1.0)
OWNER = Identity.generate()


def a_run(access: str = "open") -> Sealed:
    return seal(Manifest(name="seen", model={"model_type": "llama"}, access=access), OWNER)  # type: ignore[arg-type]  # as given


def settings(folder: Path, *bootstrap: str, invite: str = "") -> MeshSettings:
    return MeshSettings(folder, bootstrap, access=Access(invite=invite), upnp=False, listen=(Address("127.0.0.1", 0),))


class Members:
    """Nodes of `sealed` without trainers, of which each says that it trains; the owner's is the first."""

    def __init__(self, root: Path, sealed: Sealed, stack: AsyncExitStack) -> None:
        self.root, self.sealed, self.stack = root, sealed, stack
        self.meshes: list[Mesh] = []
        self.identities: list[Identity] = []
        self.peers: list[str] = []
        self.events: list[Event] = []

    def token(self) -> str:
        """An invitation by the owner."""
        grant = Grant(time.time(), 3600.0, "", self.meshes[0].addresses[:1])
        return credentials.issue(DataDir(self.root / "0"), self.sealed, OWNER, grant)[1]

    async def add(self, round_number: int = 7) -> Mesh:
        folder, number = self.root / str(len(self.meshes)), len(self.meshes)
        make_folder(folder)
        identity = Identity.generate() if number else OWNER
        invite = self.token() if number and self.sealed.manifest.access == "invited" else ""
        config = replace(settings(folder, *self.addresses, invite=invite), name=f"node {number}")
        mesh_of = open_mesh(config, identity, self.events.append, rng=random.Random(number), timing=QUICK)
        mesh = await self.stack.enter_async_context(mesh_of)
        await mesh.enter(self.sealed, lambda: (Standing(round_number, 700 + number, 2.5), "training"))
        self.meshes.append(mesh)
        self.identities.append(identity)
        self.peers.append(identity.peer_id)
        return mesh

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.meshes[0].addresses[:1] if self.meshes else ()


@asynccontextmanager
async def members(root: Path, count: int, access: str = "open") -> AsyncIterator[Members]:
    async with AsyncExitStack() as stack:
        found = Members(root, a_run(access), stack)
        for _ in range(count):
            await found.add()
        for mesh in found.meshes:
            await wait_members(mesh, count - 1)
        yield found


def nothing(_: Event) -> None: ...


async def test_it_knows_all_and_nobody_takes_it_for_a_member(tmp_path: Path) -> None:
    async with members(tmp_path / "nodes", 3) as nodes:
        config = settings(tmp_path / "watch", *nodes.addresses)
        async with seeking(config, nothing) as (seeker, run_id), trio.open_nursery() as nursery:
            sealed = await seeker.find(run_id)
            assert sealed == nodes.sealed
            observer = Observer(seeker, sealed, config, random.Random(1))
            nursery.start_soon(observer.run)
            await until(lambda: sum(bool(one.group) for one in observer.live()) == 3)  # all have answered
            assert {one.peer_id for one in observer.live()} == set(nodes.peers)
            own = seeker.identity.peer_id
            for mesh in nodes.meshes:
                assert own not in {member.peer_id for member in mesh.live()}
                assert own in mesh.connections()
                assert mesh._host.dialer.connection_manager.rank(own) == STRANGER
            assert own not in {event.peer_id for event in nodes.events if isinstance(event, PeerSeen)}
            nursery.cancel_scope.cancel()


async def test_exchanges_of_all_and_what_each_gave_are_known_from_receipts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real hosts: each passes on what it holds, and whoever asks counts it."""
    monkeypatch.setattr(module, "_SLOWEST", 0.2)
    monkeypatch.setattr(module, "_RECEIPTS_EVERY", 0.1)
    async with members(tmp_path / "nodes", 2) as nodes, trio.open_nursery() as nursery:
        store = ReceiptStore(tmp_path / "receipts")
        mine, others = nodes.identities
        began = time.time() - WALL - 100
        gossip_receipts(nodes, store, nursery)
        config = settings(tmp_path / "watch", *nodes.addresses)
        async with seeking(config, nothing) as (seeker, run_id):
            observer = Observer(seeker, await seeker.find(run_id), config, random.Random(1))
            nursery.start_soon(observer.run)
            for number in range(4):
                store.add(exchanged(mine, others, began + 30 * number, run_id=nodes.sealed.run_id, every=10.0))
                expected = [("node 0", 3000 * number), ("node 1", 3000 * number)]
                await until(lambda expected=expected: [(one.name, one.tokens) for one in seen(observer)] == expected)  # type: ignore[misc]  # bound now
            ((offerer, answerer, age),) = observer.exchanges()
            assert (offerer, answerer) == (mine.peer_id, others.peer_id)
            assert 5 < age < 60
            told = [event for event in nodes.events if isinstance(event, Contributed) and event.own]
            assert {event.own.peer_id for event in told if event.own} == set(nodes.peers), "both know it, one by gossip alone"
            nursery.cancel_scope.cancel()


def gossip_receipts(nodes: Members, store: ReceiptStore, nursery: trio.Nursery) -> None:
    """The first of `nodes` brings what is in `store`, and all pass on what they hold."""
    for mesh, identity in zip(nodes.meshes, nodes.identities, strict=True):
        folder = store._path.parent
        own = OwnReceipts(store if mesh is nodes.meshes[0] else ReceiptStore(folder / "none"), ReceiptStore(folder / "kept"))
        terms = Terms(identity, nodes.sealed.run_id, QUICK.request)
        swarm = Swarm(terms, mesh.live, lambda live: [one.peer_id for one in live], mesh.dial, mesh.judge)
        gossip = ReceiptGossip(swarm, own, random.Random(0), nodes.events.append)
        gossip._pause = lambda: 0.3  # type: ignore[method-assign]
        mesh.serve(RECEIPTS, gossip.handle)
        nursery.start_soon(gossip.run)


def seen(observer: Observer) -> list[Contribution]:
    return sorted(observer.contributions(), key=lambda one: one.name)


async def test_the_last_exchange_of_each_pair_is_shown_though_nodes_hold_the_newest_of_each_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOWEST", 0.2)
    monkeypatch.setattr(module, "_RECEIPTS_EVERY", 0.1)
    async with members(tmp_path / "nodes", 3) as nodes, trio.open_nursery() as nursery:
        store = ReceiptStore(tmp_path / "receipts")
        gossip_receipts(nodes, store, nursery)
        config = settings(tmp_path / "watch", *nodes.addresses)
        async with seeking(config, nothing) as (seeker, run_id):
            observer = Observer(seeker, await seeker.find(run_id), config, random.Random(1))
            nursery.start_soon(observer.run)
            one, two, three = nodes.identities
            now = time.time() - WALL
            for number, pair in enumerate([(one, two), (two, three), (three, one), (two, one)]):  # one with two again
                store.add(exchanged(*pair, now - 90 + 20 * number, run_id=nodes.sealed.run_id))
                newest = (pair[0].peer_id, pair[1].peer_id)
                await until(lambda newest=newest: [shown[:2] for shown in observer.exchanges()][:1] == [newest])  # type: ignore[misc]  # bound now
            names = {each.peer_id: name for each, name in zip(nodes.identities, "abc", strict=True)}
            assert [names[a] + names[b] for a, b, _ in observer.exchanges()] == ["ba", "ca", "bc"], "one of each pair"
            assert len(observer._receipts._held) < 3, "and that of which more is shown than is held"
            monkeypatch.setattr(module, "PAIRS", 2)
            store.add(exchanged(two, three, now, run_id=nodes.sealed.run_id))
            await until(lambda: [names[a] + names[b] for a, b, _ in observer.exchanges()] == ["bc", "ba"])
            monkeypatch.setattr(module, "AWAY", 20.0)
            assert [names[a] + names[b] for a, b, _ in observer.exchanges()] == ["bc"], "late ones are dropped"
            nursery.cancel_scope.cancel()


async def test_each_member_is_asked_again_only_after_a_while_and_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOWEST", 0.2)
    monkeypatch.setattr(module, "_QUICKEST", 0.01)
    monkeypatch.setattr(module, "_ROUND", 0.0)
    asked: list[float] = []
    told: list[bytes] = []
    ask = module.ask

    async def noted(*arguments: Any) -> object:  # noqa: ANN401  # passed on as they are
        asked.append(max(observer._asked.values(), default=0.0))  # when it was to be: a busy machine may get to it later
        told.extend(arguments[1].gossip.heartbeats)
        return await ask(*arguments)

    monkeypatch.setattr(module, "ask", noted)
    async with members(tmp_path / "nodes", 1) as nodes:
        config = settings(tmp_path / "watch", *nodes.addresses)
        async with seeking(config, nothing) as (seeker, run_id), trio.open_nursery() as nursery:
            observer = Observer(seeker, await seeker.find(run_id), config, random.Random(1))
            nursery.start_soon(observer.run)
            await until(lambda: len(asked) > 6)
            nursery.cancel_scope.cancel()
    gaps = [later - sooner for sooner, later in pairwise(asked[1:])]
    assert told == [], "it says nothing of itself"
    assert min(gaps) >= 0.19, "the first question is the bootstrap's"


async def test_a_run_by_invitation_is_shown_to_whom_its_owner_invited(tmp_path: Path) -> None:
    async with members(tmp_path / "nodes", 2, "invited") as nodes:
        asked: list[str] = []

        async def note(stream: Stream) -> None:
            asked.append(stream.remote)

        for mesh in nodes.meshes:
            mesh.serve(RECEIPTS, note)
        token = nodes.token()
        report = await report_once(settings(tmp_path / "watch", *nodes.addresses, invite=token), nothing)
        assert (report.known, report.round, report.loss, report.access) == (2, 7, 2.5, "invited")
        assert all(len(mesh.live()) == 1 for mesh in nodes.meshes), "and it is no member there either"
        with pytest.raises(BaseExceptionGroup) as caught:
            await report_once(settings(tmp_path / "stranger", *nodes.addresses), nothing)
        assert caught.group_contains(NotInvitedError, depth=None)
        assert len(set(asked)) == 1, "whom the owner invited asks for receipts too"
        async with seeking(settings(tmp_path / "stranger", *nodes.addresses), nothing) as (seeker, _):
            stream = await seeker.host.open_stream(nodes.identities[0].peer_id, RECEIPTS, nodes.addresses)
            with pytest.raises(RemoteError):
                await fetch(stream, RecentReceipts(nodes.sealed.run_id), Terms(seeker.identity, nodes.sealed.run_id, 8.0))
            assert seeker.identity.peer_id not in asked


@contextmanager
def command(address: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`nolocod watch` as a process, and where its page is."""
    arguments = [sys.executable, "-m", "nolocod", "watch", "--bootstrap", address, "--data-dir", str(folder)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split("http://")[1].strip()
    finally:
        process.kill()
        process.wait()


def get(where: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(where, timeout=10)
    connection.request("GET", path)
    return connection.getresponse().read()


async def test_the_command_serves_the_page_in_80_megabytes_and_without_torch(tmp_path: Path) -> None:
    def look(address: str) -> None:
        with command(address, tmp_path / "watch") as (process, where):
            inspect(process, where)

    def inspect(process: subprocess.Popen[str], where: str) -> None:
        deadline = time.monotonic() + ENOUGH
        while json.loads(get(where, "/run.json"))["counted"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for path in ("/", "/run.js", "/metrics", "/run.json") * 20:
            assert get(where, path)
        resident = psutil.Process(process.pid).memory_info().rss
        assert resident <= MOST_RESIDENT, f"{resident / 1e6:.1f} MB"
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENOUGH) == 0
        (history,) = (tmp_path / "watch").glob("history-*.json")
        assert json.loads(history.read_bytes())["curve"] == [[7, 2.5]]

    async with members(tmp_path / "nodes", 3) as nodes:
        await trio.to_thread.run_sync(look, nodes.addresses[0])


@pytest.mark.parametrize("lean_first", [False, True])
def test_libp2p_brings_what_is_left_out(lean_first: bool) -> None:
    """Fails for a part that libp2p does not import any more, and for one that comes in spite of us."""
    first = "lean.leave_out(); " if lean_first else ""
    probe = f"import sys; from nolocod.p2p import lean; {first}import libp2p, libp2p.kad_dht.kad_dht; " + (
        "print(*[part for part in lean.PARTS if getattr(sys.modules.get(part), '__file__', None)])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ([] if lean_first else list(lean.PARTS))


def test_only_this_machine_reads_the_page_without_a_token(tmp_path: Path) -> None:
    config = WatchConfig(settings(tmp_path), Address("0.0.0.0", 80))
    request = Request("GET", "/run.json", "", "run.example")
    refused = access_of(config).judge(request, only_local=False, port=80)
    assert refused is not None
    assert refused.status == 401
    token = DataDir(tmp_path).http_token.read_text().strip()
    shown = replace(request, headers={"authorization": f"Bearer {token}"})
    assert access_of(config).judge(shown, only_local=False, port=80) is None
    local = WatchConfig(settings(tmp_path), Address("127.0.0.1", 80), hosts=("Run.Example",))
    assert access_of(local).judge(request, only_local=True, port=80) is None
