"""Hostile peers as they are: hosts on loopback that speak evil to an honest pair, which goes on exchanging beside them.

The rule: an attack is a function of the attacker; after each, the pair exchanges, nothing of the attacker is left in
tasks and files, and whoever could only have meant it is banned and told so. Every attacker comes from an address of its own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psutil
import pytest
import trio

from nolocod.errors import BannedError, OtherRunError, RefusedError, RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, PeerBanned
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.limits.rate_limits import DialLimiter, Rate
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.settings import MeshSettings, Relaying
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.requests import Terms, answer, ask
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, SNAPSHOT
from nolocod.proto import envelope
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import Dialogue, standing_to_wire
from nolocod.proto.framing import envelope_head
from nolocod.proto.limits import Limits
from nolocod.proto.types import Accept, Description, Ended, Offer, Refuse, Standing, describe
from nolocod.run.manifest import Manifest, Sealed, seal, wire_name
from nolocod.units import Address
from tests.support.wires import ENOUGH, until, wait_members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.types import Answer

SIZE = 5000
STANDING = Standing(5, 100, 2.5)
QUICK = Timing(heartbeat=0.3, live=5.0, search=0.5, widen=5.0)
LIMITS = Limits(resume_seconds=0.5)


class Box:
    def __init__(self, content: bytes) -> None:
        self.content = memoryview(bytearray(content))
        self.size = len(content)

    def view(self, start: int, length: int) -> memoryview:
        return self.content[start : start + length]

    place = view

    def release(self, start: int, length: int) -> None: ...


class Reception:
    """A node that accepts whoever is near, as rounds do, with a local side that stands for its trainer."""

    phase, wary, credit = math.inf, False, 1.0

    def __init__(self, seed: int) -> None:
        self.outbox, self.inbox = Box(random.Random(seed).randbytes(SIZE)), Box(bytes(SIZE))
        self.over: list[Ended] = []

    @property
    def local_side(self) -> Reception:
        return self

    def decide(self, offer: Offer) -> Answer:
        apart = abs(offer.standing.round - STANDING.round)
        return Accept(STANDING) if apart <= 3 else Refuse(RefusedError.entry.code, f"{apart} rounds apart")

    async def ended(self, ended: Ended) -> None:
        await trio.lowlevel.checkpoint()
        self.over.append(ended)

    async def capture(self, subject: int) -> Description:
        await trio.lowlevel.checkpoint()
        return describe(self.outbox.content)

    async def inspect(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""


@dataclass
class Honest:
    mesh: Mesh
    identity: Identity
    exchange_service: ExchangeService
    reception: Reception
    events: list[Event]

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    def banned(self) -> set[PeerId]:
        return {event.peer_id for event in self.events if isinstance(event, PeerBanned)}


@dataclass
class Scene:
    """Alice and Bob are honest; `hosts` are those of the attackers."""

    run: Sealed
    alice: Honest
    bob: Honest
    evil: Host
    identity: Identity
    sessions: random.Random = field(default_factory=lambda: random.Random(1))

    async def stream(self, protocol: str = EXCHANGE) -> Stream:
        """One of the attacker's to Alice."""
        return await self.evil.open_stream(self.alice.peer_id, protocol, self.alice.mesh._host.announced)

    def offer(self, **changes: object) -> pb.Body:
        """An Offer to Alice that is good but for `changes` of its body."""
        codec = wire_name(self.run.manifest.codec)
        body = pb.Body(
            run_id=self.run.run_id,
            session=self.sessions.randbytes(16),
            sequence=1,
            receiver=self.alice.peer_id,
            offer=pb.Offer(standing=standing_to_wire(STANDING), codec=codec, size=SIZE),
        )
        for name, value in changes.items():
            setattr(body, name, value)
        return body

    def sealed(self, body: pb.Body) -> bytes:
        return envelope.seal(body, self.identity)

    async def say(self, raw: bytes) -> pb.Body | None:
        """Send an envelope on a stream of its own; the answer, or None if the stream was given up."""
        stream = await self.stream()
        channel = Channel(stream, LIMITS)
        try:
            await channel.send_envelope(raw)
            with trio.fail_after(ENOUGH):
                return envelope.open_envelope(await channel.receive_envelope(), run_id=None, receiver=self.identity.peer_id)
        except RemoteError:
            return None
        finally:
            await channel.reset()

    async def gossip(self, heartbeats: list[bytes]) -> None:
        """Swap views with Alice, and tell her of these."""
        terms = Terms(self.identity, self.run.run_id, ENOUGH)
        await ask(await self.stream(GOSSIP), pb.Body(gossip=pb.Gossip(heartbeats=heartbeats, answer=True)), terms, "gossip")


def forged(number: int, run_id: str) -> bytes:
    raw = bytearray(envelope.seal(pb.Body(run_id=run_id), Identity.from_secret(bytes([number]) * 32)))
    raw[-1] ^= 1
    return bytes(raw)


def well_signed(number: int, run_id: str, place: str) -> bytes:
    """The heartbeat of an identity that cost nothing, with a count far ahead of any clock, and addresses of a stranger."""
    heartbeat = pb.Heartbeat(
        count=(1 << 52) + number,
        standing=standing_to_wire(STANDING),
        state="training",
        addresses=[place, "/ip4/999.1.1.1/tcp/1", "/unix/tmp/x", "/ip4/127.0.0.77/tcp/0"],
        version="1",
    )
    return envelope.seal(pb.Body(run_id=run_id, heartbeat=heartbeat), Identity.from_secret(number.to_bytes(32, "big")))


@asynccontextmanager
async def honest(folder: Path, seed: int, run: Sealed, bootstrap: tuple[str, ...], per_address: int) -> AsyncIterator[Honest]:
    identity, events = Identity.from_secret(bytes([seed]) * 32), list[Event]()
    config = MeshSettings(
        folder,
        bootstrap=bootstrap,
        listen=(Address("127.0.0.1", 0),),
        relaying=Relaying(serve=False, use=False),
        upnp=False,
        connections_per_address=per_address,
    )
    async with open_mesh(config, identity, events.append, rng=random.Random(seed), timing=QUICK) as mesh:
        await mesh.enter(run, lambda: (STANDING, "training"))
        reception = Reception(seed)
        context = replace(Context.of(identity, run), size=SIZE, limits=LIMITS, rng=random.Random(seed))
        exchange_service = ExchangeService(context, mesh.dial, reception, ReceiptStore(folder / "receipts"), mesh.judge)
        mesh.serve(EXCHANGE, exchange_service.handle)
        yield Honest(mesh, identity, exchange_service, reception, events)


def attacker(number: int, limits: HostLimits | None = None) -> AsyncIterator[Host]:
    """A host at an address of its own."""
    place = Address(f"127.0.0.{20 + number}", 0)
    return open_host(Identity.from_secret(bytes([100 + number]) * 32), (place,), (), lambda _: None, limits)  # type: ignore[return-value]


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@asynccontextmanager
async def scene(folder: Path, per_address: int = 64) -> AsyncIterator[Scene]:
    failure: BaseException | None = None
    run = seal(Manifest(name="besieged", model={"model_type": "llama"}), Identity.from_secret(b"o" * 32))
    async with (
        honest(made(folder / "alice"), 1, run, (), per_address) as alice,
        honest(made(folder / "bob"), 2, run, alice.mesh.addresses[:1], per_address) as bob,
        attacker(0) as evil,  # type: ignore[attr-defined]
    ):
        await wait_members(bob.mesh)
        await wait_members(alice.mesh)
        try:
            yield Scene(run, alice, bob, evil, Identity.from_secret(bytes([100]) * 32))
        except Exception as error:  # noqa: BLE001
            failure = leaf(error)  # raised outside of all these nurseries, where it can be read
    if failure is not None:
        raise failure


async def exchanged(scene: Scene) -> None:
    """The honest pair exchanges, whoever offers."""
    for one, other in ((scene.alice, scene.bob), (scene.bob, scene.alice)):
        with trio.fail_after(ENOUGH):
            ended = await one.exchange_service.offer(other.peer_id, STANDING, 0, one.reception)
        assert ended.outcome == "committed", ended
        assert one.reception.inbox.content == other.reception.outbox.content


# --- messages -----------------------------------------------------------------------------------------------


async def false_signature(scene: Scene) -> None:
    raw = bytearray(scene.sealed(scene.offer()))
    raw[-1] ^= 1
    assert await scene.say(bytes(raw)) is None


async def anothers_identity(scene: Scene) -> None:
    body = scene.offer()
    raw = envelope.seal(body, Identity.from_secret(bytes([2]) * 32))  # Bob's, as if it had been recorded
    assert await scene.say(raw) is None


async def forged_identity(scene: Scene) -> None:
    told = pb.Envelope.FromString(scene.sealed(scene.offer()))
    body = pb.Body.FromString(told.body)
    body.sender = scene.bob.peer_id
    told.body = body.SerializeToString()
    assert await scene.say(told.SerializeToString()) is None


async def for_another(scene: Scene) -> None:
    assert await scene.say(scene.sealed(scene.offer(receiver=scene.bob.peer_id))) is None


async def oversized(scene: Scene) -> None:
    stream = await scene.stream()
    await stream.write(envelope_head(1 << 30))
    with suppress(RemoteError), trio.fail_after(ENOUGH):
        await stream.read_exactly(1)


async def nonsense(scene: Scene) -> None:
    stream = await scene.stream()
    await stream.write(bytes(range(256)) * 16)
    with suppress(RemoteError), trio.fail_after(ENOUGH):
        await stream.read_exactly(1)


async def wrong_place(scene: Scene) -> None:
    body = scene.offer()
    body.ClearField("offer")
    body.acknowledge.SetInParent()
    assert await scene.say(scene.sealed(body)) is None


Attack = Callable[[Scene], Awaitable[None]]


@pytest.mark.parametrize(
    ("attack", "times"),
    [
        (false_signature, 2),
        (forged_identity, 2),
        (anothers_identity, 4),
        (for_another, 4),
        (oversized, 4),
        (nonsense, 4),
        (wrong_place, 4),
    ],
)
async def test_what_nobody_says_by_mistake_bans_its_sender(tmp_path: Path, attack: Attack, times: int) -> None:
    async with scene(tmp_path) as besieged:
        alice, evil = besieged.alice, besieged.identity.peer_id
        for _ in range(times):
            assert evil not in alice.banned()
            await attack(besieged)
            await trio.sleep(0.05)
        await until(lambda: evil in alice.banned())
        answer = await besieged.say(besieged.sealed(besieged.offer()))
        assert answer is not None
        assert answer.refuse.code == BannedError.entry.code
        with pytest.raises(BannedError):
            await alice.mesh.dial(evil, SNAPSHOT)
        with pytest.raises(BannedError):
            await besieged.gossip([])
        assert alice.banned() == {evil}
        assert not besieged.bob.banned(), "who is told nothing judges nobody"
        await exchanged(besieged)


async def test_replays_wrong_runs_and_lies_are_refused_by_name_and_harm_nobody(tmp_path: Path) -> None:
    async with scene(tmp_path) as besieged:
        raw = besieged.sealed(besieged.offer())
        first = await besieged.say(raw)
        assert first is not None
        assert first.HasField("accept")
        await until(lambda: len(besieged.alice.reception.over) == 1)
        told = {}
        cases = {
            "replayed": raw,
            "run": besieged.sealed(besieged.offer(run_id="ef" * 32)),
        }
        for change in ("round", "size", "codec"):
            body = besieged.offer()
            body.offer.standing.round = 10**6 if change == "round" else STANDING.round
            body.offer.size = SIZE + 1 if change == "size" else SIZE
            if change == "codec":
                body.offer.codec = "pickle/1"
            cases[change] = besieged.sealed(body)
        for name, message in cases.items():
            answer = await besieged.say(message)
            told[name] = answer.refuse.code if answer is not None else None
        codes = {"replayed": "NLC-203", "round": "NLC-206", "size": "NLC-203", "codec": "NLC-203"}
        assert told == {**codes, "run": OtherRunError.entry.code}
        assert not besieged.alice.banned()
        await exchanged(besieged)


async def test_a_partner_that_lies_about_its_round_is_not_followed(tmp_path: Path) -> None:
    async with scene(tmp_path) as besieged:
        alice, evil = besieged.alice, besieged.identity

        async def lie(stream: Stream) -> None:
            channel = Channel(stream, LIMITS)
            body = envelope.open_envelope(await channel.receive_envelope(), run_id=None, receiver=evil.peer_id)
            dialogue = Dialogue(evil, besieged.run.run_id, alice.peer_id, body.session)
            accept = pb.Accept(standing=standing_to_wire(replace(STANDING, round=10**6)))
            await channel.send_envelope(dialogue.seal(pb.Body(accept=accept)))
            with suppress(RemoteError):
                await channel.receive()

        terms = Terms(evil, besieged.run.run_id, ENOUGH)

        async def empty(_: pb.Body) -> pb.Body:
            return pb.Body(gossip=pb.Gossip())

        async def gossip(stream: Stream) -> None:
            await answer(stream, terms, "gossip", empty)

        besieged.evil.serve(GOSSIP, gossip)
        besieged.evil.serve(EXCHANGE, lie)
        await besieged.evil.connect(alice.peer_id, alice.mesh._host.announced)
        for _ in range(4):
            ended = await alice.exchange_service.offer(evil.peer_id, STANDING, 0, alice.reception)
            assert (ended.outcome, ended.error) == ("aborted", "NLC-203")
        assert alice.banned() == {evil.peer_id}
        await exchanged(besieged)


# --- floods and slowness ------------------------------------------------------------------------------------


def files() -> int:
    return psutil.Process().num_fds()


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def test_streams_that_say_nothing_are_so_many_and_no_more(tmp_path: Path) -> None:
    async with scene(tmp_path) as besieged:
        await exchanged(besieged)
        before = tasks()
        for _ in range(50):
            with suppress(RemoteError):
                await besieged.stream()
        assert besieged.alice.mesh._host._inbound[besieged.identity.peer_id] <= HostLimits.streams_per_peer
        await exchanged(besieged)
        await besieged.evil.disconnect(besieged.alice.peer_id)
        await until(lambda: tasks() <= before + 8)


async def test_a_flood_of_streams_is_cut_off_and_bans(tmp_path: Path) -> None:
    async with scene(tmp_path) as besieged:
        evil = besieged.identity.peer_id

        async def flood() -> None:
            while evil not in besieged.alice.banned():
                with suppress(RemoteError):
                    await (await besieged.stream(GOSSIP)).reset()

        with trio.fail_after(ENOUGH):
            await flood()
        await exchanged(besieged)


async def test_silent_connections_of_one_address_leave_the_door_open_for_others(tmp_path: Path) -> None:
    async with scene(tmp_path) as besieged, AsyncExitStack() as stack:
        await exchanged(besieged)
        port = int(besieged.alice.mesh._host.announced[0].rpartition("/")[2])
        door, open_before = besieged.alice.mesh._host.dialer.connection_manager, files()
        for _ in range(60):
            silent = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.9")
            await stack.enter_async_context(silent)
        await until(lambda: door.turned_away >= 40)
        assert sum(one.source == "127.0.0.9" for one in door.half_open) <= 16
        await until(lambda: files() <= open_before + 60 + 16 + 8)  # those that were turned away are closed on our side
        async with attacker(1) as other:  # type: ignore[attr-defined]
            await other.connect(besieged.alice.peer_id, besieged.alice.mesh._host.announced)
        await exchanged(besieged)


async def test_many_identities_of_one_address_have_its_share_of_connections(tmp_path: Path) -> None:
    async with scene(tmp_path, per_address=4) as besieged, AsyncExitStack() as stack:
        alice = besieged.alice.mesh._host
        for number in range(10):
            place = Address("127.0.0.30", 0)
            limits = HostLimits(connect=ENOUGH, negotiate=ENOUGH)
            one = open_host(Identity.from_secret(bytes([150 + number]) * 32), (place,), (), lambda _: None, limits)
            many = await stack.enter_async_context(one)
            with suppress(RemoteError):
                await many.connect(alice.own, alice.announced)
        assert sum(one.source == "127.0.0.30" for one in alice._held()) == 4
        # one that is turned away dials once more from a port and an address that the system chooses: 127.0.0.1
        assert len(alice._held()) <= 2 * 4 + 1, "and Bob"
        assert len(alice.peers()) <= 2 * 4
        assert alice.connected(besieged.bob.peer_id)
        await exchanged(besieged)


# --- membership ---------------------------------------------------------------------------------------------


async def test_members_that_point_at_a_stranger_have_us_knock_there_a_few_times(tmp_path: Path) -> None:
    """Forty heartbeats, each well signed and of another identity, all name the address of one who has nothing to do with it."""
    async with scene(tmp_path) as besieged, trio.open_nursery() as nursery:
        alice, knocked = besieged.alice, 0

        async def count(stream: trio.SocketStream) -> None:
            nonlocal knocked
            knocked += 1
            await stream.aclose()

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.77")
        nursery.start_soon(trio.serve_listeners, count, listeners)
        port = listeners[0].socket.getsockname()[1]
        for one in (alice, besieged.bob):
            one.mesh._host.dialer._dial_limiter = DialLimiter(Rate(0.0, 6), Rate(5.0, 200))
        place = f"/ip4/127.0.0.77/tcp/{port}"
        for start in range(1000, 1040, 10):
            run_id = besieged.run.run_id
            await besieged.gossip([well_signed(number, run_id, place) for number in range(start, start + 10)])
        await until(lambda: len(alice.mesh.live()) > 20)
        await until(lambda: knocked)
        await trio.sleep(3.0)
        assert knocked <= 2 * (6 + 2), "of both"
        assert len(alice.mesh.live()) <= QUICK.capacity
        await exchanged(besieged)
        nursery.cancel_scope.cancel()


async def test_invented_members_are_not_verified_and_turn_nothing(tmp_path: Path) -> None:
    """128 of them, at round 1001 and an hour ahead, told by one stranger; real peers are verified on both ends."""
    async with scene(tmp_path) as besieged:
        alice, bob = besieged.alice, besieged.bob
        ahead = int((time.time() + 3600.0) * 1000)
        for start in range(1, 129, 16):
            told = []
            for number in range(start, start + 16):
                standing = standing_to_wire(replace(STANDING, round=1001))
                heartbeat = pb.Heartbeat(count=ahead, standing=standing, state="training", time_ms=ahead)
                ghost = Identity.from_secret((5000 + number).to_bytes(32, "big"))
                told.append(envelope.seal(pb.Body(run_id=besieged.run.run_id, heartbeat=heartbeat), ghost))
            await besieged.gossip(told)
        assert len(alice.mesh.live()) > 32, "they would be a majority"
        await exchanged(besieged)
        for one, other in ((alice, bob), (bob, alice)):
            await until(lambda one=one: any(member.verified for member in one.mesh.live()))
            verified = [(member.peer_id, member.standing.round) for member in one.mesh.live() if member.verified]
            assert verified == [(other.peer_id, STANDING.round)]
            assert abs(one.mesh.clock_offset()) < 5.0
        await alice.mesh._save()
        assert alice.mesh._book.recent()[0][0] == bob.peer_id
        assert len(alice.mesh._book.recent()) == 1, "nor are they remembered"


async def test_false_heartbeats_that_are_passed_on_ban_who_passes_them_on(tmp_path: Path) -> None:
    async with scene(tmp_path) as besieged:
        for number in range(8):
            assert not besieged.alice.banned()
            await besieged.gossip([forged(number, besieged.run.run_id)])
        with pytest.raises(BannedError):
            await besieged.gossip([forged(8, besieged.run.run_id)])
        assert besieged.alice.banned() == {besieged.identity.peer_id}
        await exchanged(besieged)
