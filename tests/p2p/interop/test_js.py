"""js-libp2p on the other side: 64 MB each way at once, dialled by us and by it, checked by hash; and as a stranger that
knows libp2p's protocols and none of ours: it identifies us, finds our run, relays for us and we for it, and what it says
on our own protocols costs it a stream and us nothing.

Needs npm, which fetches js-libp2p and a Node that is new enough for it into a cache folder, once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from nolocod.disk import write_whole
from nolocod.identity import Identity, PeerId
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.host import Host, open_host
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.snapshots.server import Donor
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.multiaddrs import split
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, INFO, SNAPSHOT
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, Sealed, seal
from nolocod.units import Address
from tests.support.wires import public

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nolocod.errors import RemoteError
    from nolocod.p2p.snapshots.server import ServedSnapshot
    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.types import Answer, Ended, Offer

HERE = Path(__file__).parent / "js"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nolocod-tests" / "js"
SWAP = "/test/swap"
SIZE = 64 << 20
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PIECE = 100_000
"""Below the 128 KiB that js-libp2p carries on a circuit as it is shipped."""
QUICK = Timing(heartbeat=0.2, live=10.0, request=8.0, bootstrap=8.0, search=0.5, widen=1.0)

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="js-libp2p is fetched by npm, which is not installed")


@pytest.fixture(scope="module")
def node() -> Path:
    """The Node of the cache folder; beside it lie the packages and our script."""
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = (HERE / "package.json").read_text()
    known = CACHE / "package.json"
    found = CACHE / "node_modules" / ".bin" / "node"
    with CACHE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the suite's other processes share the folder
        if not found.exists() or not known.exists() or known.read_text() != wanted:
            known.write_text(wanted)
            command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
            done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                known.unlink()
                pytest.skip(f"npm could not fetch js-libp2p: {done.stderr[-300:]}")
        for script in HERE.glob("*.mjs"):
            write_whole(CACHE / script.name, script.read_bytes())  # a Node of theirs may be reading it
    return found


class Lines:
    """What the process prints, line by line."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdout is not None
        self._stdout = process.stdout
        self._rest = b""

    async def next(self) -> str:
        while b"\n" not in self._rest:
            more = await self._stdout.receive_some()
            assert more, f"the peer ended: {self._rest!r}"
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()


@asynccontextmanager
async def js_process(node: Path, *arguments: str) -> AsyncIterator[trio.Process]:
    async with trio.open_nursery() as nursery:
        command = [str(node), *arguments]
        run = partial(trio.run_process, command, cwd=CACHE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
        yield await nursery.start(run)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def js_peer(node: Path, *arguments: str) -> AsyncIterator[Lines]:
    async with js_process(node, "peer.mjs", *arguments) as process:
        yield Lines(process)


class Stranger:
    """A js-libp2p node that does what it is told."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        self._stdin = process.stdin
        self._lines = Lines(process)
        self.peer = PeerId("")
        self.addresses: list[str] = []

    async def begun(self) -> None:
        told = json.loads(await self._lines.next())
        self.peer, self.addresses = PeerId(told["peer"]), told["addresses"]

    async def ask(self, do: str, **facts: object) -> dict[str, Any]:
        """Its answer."""
        await self._stdin.send_all(json.dumps({"do": do, **facts}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self._lines.next())
        assert "error" not in answer, answer["error"]
        return answer


@asynccontextmanager
async def stranger(node: Path, *listen: str, relay: bool = False) -> AsyncIterator[Stranger]:
    async with js_process(node, "stranger.mjs", json.dumps({"listen": listen, "relay": relay})) as process:
        found = Stranger(process)
        await found.begun()
        yield found


@asynccontextmanager
async def our_host() -> AsyncIterator[Host]:
    async with open_host(Identity.generate(), (Address("127.0.0.1", 0),), (), lambda event: None) as host:
        yield host


class Swapped:
    """Our half of a swap."""

    def __init__(self) -> None:
        self.sent = self.received = ""
        self.done = trio.Event()

    async def __call__(self, stream: Stream) -> None:
        content = random.Random(1).randbytes(SIZE)
        received = memoryview(bytearray(SIZE))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream, content)
            nursery.start_soon(stream.read_into, received)
        self.sent, self.received = (hashlib.sha256(part).hexdigest() for part in (content, received))
        self.done.set()

    async def _send(self, stream: Stream, content: bytes) -> None:
        for start in range(0, SIZE, 1 << 20):  # all at once would be more than a host holds for a stranger
            await stream.write(content[start : start + (1 << 20)])
        await stream.close()

    def agrees(self, line: str) -> bool:
        theirs = json.loads(line)
        return (theirs["sent"], theirs["received"]) == (self.received, self.sent)


async def test_we_dial_js(node: Path) -> None:
    with trio.fail_after(240):
        async with our_host() as host, js_peer(node, "listen") as lines:
            peer, address = split(await lines.next())
            ours = Swapped()
            await ours(await host.open_stream(peer, SWAP, [address]))
            assert ours.agrees(await lines.next())


async def test_js_dials_us(node: Path) -> None:
    with trio.fail_after(240):
        async with our_host() as host:
            ours = Swapped()
            host.serve(SWAP, ours)
            async with js_peer(node, "dial", host.addresses[0]) as lines:
                await ours.done.wait()
                assert ours.agrees(await lines.next())


# --- a stranger -----------------------------------------------------------------------------------------------------


def settings(folder: Path, *bootstrap: str) -> MeshSettings:
    folder.mkdir(exist_ok=True)
    return MeshSettings(data_dir=folder, bootstrap=bootstrap, listen=(Address("127.0.0.1", 0),))


@asynccontextmanager
async def member(folder: Path, sealed: Sealed, *bootstrap: str) -> AsyncIterator[Mesh]:
    config = public(settings(folder, *bootstrap))
    async with open_mesh(config, Identity.generate(), lambda _: None, rng=random.Random(7), timing=QUICK) as mesh:
        await mesh.enter(sealed, lambda: (Standing(5, 100, 2.5), "training"))
        yield mesh


def a_run() -> Sealed:
    return seal(Manifest(name="strangers", model={"model_type": "llama"}), Identity.generate())


async def test_a_stranger_identifies_and_pings_us(node: Path, tmp_path: Path) -> None:
    with trio.fail_after(240):
        async with member(tmp_path / "ann", a_run()) as ann, stranger(node) as eve:
            found = await eve.ask("identify", address=ann.addresses[0])
            assert {INFO, GOSSIP, "/ipfs/ping/1.0.0", "/nolocod/kad/1.0.0"} <= set(found["protocols"])
            assert [split(address)[1].partition("/p2p")[0] for address in ann.addresses] == found["listen"]
            assert found["observed"].startswith("/ip4/127.0.0.1/tcp/"), "we tell it how we see it"
            assert (await eve.ask("ping", address=ann.addresses[0]))["milliseconds"] >= 0


async def test_a_stranger_finds_the_providers_of_our_run(node: Path, tmp_path: Path) -> None:
    sealed = a_run()
    with trio.fail_after(240):
        async with member(tmp_path / "ann", sealed) as ann, member(tmp_path / "bob", sealed, ann.addresses[0]) as bob:
            peers = {split(mesh.addresses[0])[0] for mesh in (ann, bob)}
            async with stranger(node) as eve:
                found: set[str] = set()
                while found != peers:  # each provides after its first look around
                    answer = await eve.ask("providers", address=ann.addresses[0], run=sealed.run_id)
                    found = set(answer["found"])
                    assert found <= peers


async def test_a_stranger_relays_for_us(node: Path) -> None:
    with trio.fail_after(240):
        async with stranger(node, LOOPBACK, relay=True) as eve, our_host() as alice, our_host() as bob:
            for host in (alice, bob):
                await host.connect(eve.peer, eve.addresses)
            taker, asker = RelayClient(bob), RelayClient(alice)
            taker.serve()
            bob.serve(SWAP, digest)
            assert await taker.reserve(eve.peer) > 60
            await asker.connect(eve.peer, bob.own)
            assert alice.peers()[bob.own] == bob.peers()[alice.own] == "relayed"
            content = random.Random(2).randbytes(PIECE)
            stream = await alice.open_stream(bob.own, SWAP)
            await stream.write(content)
            await stream.close()
            assert await stream.read_exactly(64) == hashlib.sha256(content).hexdigest().encode()


async def digest(stream: Stream) -> None:
    """Answer what came with its hash, as the stranger does."""
    found = hashlib.sha256()
    while data := await stream.arrived(None):
        found.update(data)
    await stream.write(found.hexdigest().encode())


async def test_strangers_are_relayed_by_us(node: Path) -> None:
    with trio.fail_after(240):
        async with our_host() as middle, our_host() as alice:
            relay = Relay(middle)
            relay.serve()
            way = f"{middle.addresses[0]}/p2p-circuit"
            async with stranger(node, way) as bob, stranger(node) as eve:
                circuit = f"{way}/p2p/{bob.peer}"
                assert bob.addresses == [circuit], "it holds a reservation with us, and announces it"
                swapped = await eve.ask("swap", address=circuit, size=PIECE)
                assert swapped["received"] == hashlib.sha256(swapped["sent"].encode()).hexdigest(), "its answer is the hash"
                # and one of ours to it
                await alice.connect(middle.own, middle.addresses)
                await RelayClient(alice).connect(middle.own, bob.peer)
                stream = await alice.open_stream(bob.peer, SWAP)
                await stream.write(b"from ours")
                await stream.close()
                assert await stream.read_exactly(64) == hashlib.sha256(b"from ours").hexdigest().encode()
                assert relay.circuits_carried == 2
                assert relay.bytes_carried > PIECE


class Nobody:
    """Stands for a trainer that is never asked."""

    def decide(self, offer: Offer) -> Answer:
        raise AssertionError(f"nonsense was taken for an offer: {offer}")

    async def ended(self, ended: Ended) -> None:
        raise AssertionError(f"nonsense was taken for an exchange: {ended}")

    async def snapshot(self) -> ServedSnapshot:
        raise AssertionError("nonsense was taken for a newcomer's question")


NONSENSE = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a frame that is too large": b"\0" + bytes(4) + b"\xff\xff\xff\xff",
    "an envelope that is none": b"\0" + bytes(4) + (40).to_bytes(4, "big") + bytes(range(40)),
    "a chunk nobody asked for": b"\1" + bytes(4) + (8).to_bytes(4, "big") + bytes(8),
    "half a head": b"\0\0\0",
}


async def test_what_a_stranger_says_on_our_protocols_costs_it_the_stream_alone(node: Path, tmp_path: Path) -> None:
    sealed, identity = a_run(), Identity.generate()
    with trio.fail_after(240):
        opened = open_mesh(settings(tmp_path), identity, lambda _: None, rng=random.Random(7), timing=QUICK)
        async with our_host() as host, stranger(node) as eve, opened as mesh:
            await mesh.enter(sealed, lambda: (Standing(5, 100, 2.5), "training"))
            context = Context(identity, sealed.run_id, "float32", PIECE)
            mesh.serve(EXCHANGE, ExchangeService(context, mesh.dial, Nobody(), ReceiptStore(tmp_path / "receipts")).handle)
            mesh.serve(SNAPSHOT, Donor(context, Nobody().snapshot, 2, lambda _: None).handle)
            ours = mesh._host
            address = mesh.addresses[0]
            blamed: list[RemoteError] = []
            judge = ours.judge

            def noted(peer: PeerId, error: RemoteError | None) -> None:
                if error is not None:  # a stream of js-libp2p's own (ping, identify) may be one too many beside ours
                    blamed.append(error)
                judge(peer, error)

            ours.judge = noted
            ours.refuses = lambda _: False  # a ban costs the connection soon: tests/p2p/limits/test_floods.py
            for protocol in (INFO, GOSSIP, EXCHANGE, SNAPSHOT):
                for name, content in NONSENSE.items():
                    before = len(blamed)
                    ended = await eve.ask("send", address=address, protocol=protocol, bytes=content.hex())
                    assert "ended" in ended, f"{name} on {protocol}: {ended}"
                    assert ended.get("answered", 0) == 0, f"{name} on {protocol}: {ended}"
                    while len(blamed) == before:  # noqa: ASYNC110 - it is told just after the stream is reset
                        await trio.sleep(0.01)
                    assert len(blamed) == before + 1, f"{name} on {protocol}"
                    assert eve.peer in ours.peers(), f"{name} on {protocol} cost more than its stream"
            assert (await eve.ask("ping", address=address))["milliseconds"] >= 0
            await host.connect(identity.peer_id, mesh.addresses)
            assert not mesh.live(), "a stranger is nobody's member"
