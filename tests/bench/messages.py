"""What the worst message of each kind costs the event loop of whoever gets it: `python -m tests.bench messages`.

The rule: the product's own readers get the bytes, and what counts is the longest stretch between two turns of the loop, in
seconds of processor time, the least of some rounds: a busy machine makes nothing worse. What is done in a thread counts
for nothing but the handing over; signatures and hashes let the loop run meanwhile.
"""

from __future__ import annotations

import os
import random
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any, cast

import trio
from libp2p.host.autonat.pb.autonat_pb2 import Message as AutoNat
from libp2p.kad_dht.pb.kademlia_pb2 import Message as Kademlia
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_varint_prefixed

from nolocod.errors import RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.observe.status import http
from nolocod.p2p import libp2p_patches
from nolocod.p2p.discovery.kademlia import look_up
from nolocod.p2p.discovery.run_info import serve_info
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.membership.admission import InvitedAdmission
from nolocod.p2p.membership.gossip_service import GossipService
from nolocod.p2p.membership.heartbeat import MAX_HEARTBEAT, OwnHeartbeat
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.nat.autonat import AutoNatServer
from nolocod.p2p.snapshots.client import DonorStream
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport import identify, requests
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.yamux_frames import Flag, Kind, pack
from nolocod.paths import DataDir
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import check_chunk, describe_to_wire
from nolocod.proto.envelope import Dialogue, seal, standing_to_wire
from nolocod.proto.exchange import Exchange, Setting
from nolocod.proto.framing import envelope_head
from nolocod.proto.limits import FIRST, Limits, most_bytes
from nolocod.proto.types import CHUNK_SIZE, Description, Standing, describe
from nolocod.run import invitations, manifest
from tests.support.wires import OURS, against_frames

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

OWN, PEER = (Identity.from_secret(bytes([number]) * 32) for number in (1, 2))
"""The run's owner, whose loop it is, and who sends."""
STANDING = Standing(5, 100, 2.5)
WALL = 1_700_000_000.0
LARGE_RUN = 8 << 30
"""Bytes of the largest message of a run with as many parameters, for what grows with it."""
MOST_SECONDS = 0.005


@dataclass(frozen=True)
class Cost:
    """`bytes_` that came; seconds of the processor in the loop, in all and in the longest stretch."""

    message: str
    bytes_: int
    seconds: float
    longest: float


Case = tuple[str, int, "Callable[[], Awaitable[object]]"]


class Steps(trio.abc.Instrument):
    """Measures the steps of all tasks."""

    def __init__(self) -> None:
        self.seconds = self.longest = self._began = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        step = thread_time() - self._began
        self.seconds += step
        self.longest = max(self.longest, step)


class Sent:
    """A stream on which `content` came from PEER; what is answered is dropped."""

    remote = PEER.peer_id
    remote_address = "/ip4/203.0.113.7/tcp/4001"

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    async def read_exactly(self, count: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self._at += count
        return self._content[self._at - count : self._at]

    async def receive_some(self, most: int) -> bytes:
        return await self.read_exactly(most)

    async def write(self, data: bytes) -> None: ...
    async def close(self) -> None: ...
    async def reset(self) -> None: ...


class Nobody:
    """A host without connections; the stream that is opened on it is `stream`."""

    own = OWN.peer_id
    faults = 0

    def __init__(self, content: bytes = b"") -> None:
        self._content = content

    def peers(self) -> dict[PeerId, str]:
        return {}

    def serve(self, protocol: str, handler: object, rate: object = None) -> None:
        pass

    def way(self, peer: PeerId) -> tuple[str, str]:
        return "inbound", "203.0.113.7"

    def may_dial(self, *_: object) -> bool:
        return True

    async def open_stream(self, *_: object) -> Sent:
        return Sent(self._content)


def framed(body: pb.Body, receiver: str = OWN.peer_id, sender: Identity = PEER) -> bytes:
    body.receiver = receiver
    raw = seal(body, sender)
    return envelope_head(len(raw)) + raw


def delimited(message: Any) -> bytes:  # noqa: ANN401 - any protobuf
    return encode_varint_prefixed(message.SerializeToString())


# --- gossip -------------------------------------------------------------------------------------------


SEALED = manifest.seal(manifest.Manifest(name="worst", model={"model_type": "llama"}, access="invited"), OWN)
ADDRESS = f"/dns4/{'a' * 63}.{'b' * 63}.{'c' * 60}/tcp/65535"
"""Of those that may be told, the slowest to read."""


def heartbeat(number: int) -> bytes:
    """As long as any may be, with new addresses and an admission with two more signatures."""
    sender = Identity.from_secret((1000 + number).to_bytes(32, "big"))
    invitation = invitations.Invitation(SEALED.run_id, bytes(16), WALL + 1e6, sender.public)
    token = invitations.Token(invitations.seal_invitation(invitation, OWN), sender.secret)
    told = pb.Heartbeat(
        count=int(WALL * 1000) + number,
        standing=standing_to_wire(STANDING),
        state="training",
        addresses=[ADDRESS.replace("65535", str(1024 + 8 * number + port)) for port in range(8)],
        version="v" * 32,
        time_ms=int(WALL * 1000),
        admission=invitations.sign_admission(token, sender.peer_id),
    )
    raw = seal(pb.Body(run_id=SEALED.run_id, heartbeat=told), sender)
    told.reach = "x" * (MAX_HEARTBEAT - len(raw) - 8)
    return seal(pb.Body(run_id=SEALED.run_id, heartbeat=told), sender)


def gossip(name: str, message: pb.Gossip, folder: Path) -> Case:
    own_heartbeat = OwnHeartbeat(OWN, SEALED.run_id, lambda: (STANDING, "training"), tuple, lambda: WALL)
    content = framed(pb.Body(run_id=SEALED.run_id, gossip=message))

    async def run() -> None:
        admission = InvitedAdmission(SEALED, OWN.peer_id, DataDir(folder), lambda: WALL)
        table = Membership(OWN.peer_id, SEALED.run_id, admission=admission)
        service = GossipService(cast("Host", Nobody()), table, own_heartbeat, random.Random(0), Timing(), lambda _: None)
        with suppress(RemoteError):
            await service.handle(cast("Stream", Sent(content)))

    return name, len(content), run


def gossips(folder: Path) -> Iterator[Case]:
    most, beats = most_bytes(["gossip"]), [heartbeat(number) for number in range(16)]
    yield gossip("gossip: 16 heartbeats of 4 KiB", pb.Gossip(heartbeats=beats, ages=[1] * 16, answer=True), folder)
    revoked = invitations.Revocations(2, frozenset(os.urandom(16) for _ in range(3600)))
    raw = invitations.seal_revocations(revoked, SEALED.run_id, OWN)
    assert len(raw) <= invitations.MAX_REVOCATIONS
    yield gossip("gossip: all revocations", pb.Gossip(heartbeats=beats[:3], revocations=raw, answer=True), folder)
    yield gossip(
        "gossip, refused: 40 000 empty heartbeats", pb.Gossip(heartbeats=[b""] * (most // 2 - 200), answer=True), folder
    )
    yield gossip("gossip, refused: 80 000 ages", pb.Gossip(ages=[1] * (most - 400), answer=True), folder)


# --- exchanges and snapshots ------------------------------------------------------------------------------


def description(size: int) -> Description:
    return Description(size, CHUNK_SIZE, tuple(os.urandom(32) for _ in range(size // CHUNK_SIZE)))


def exchanged(name: str, body: pb.Body, *, accepted: bool = True) -> Case:
    """A partner's message, in an exchange that is new, or where its Describe is due."""
    raw = Dialogue(PEER, SEALED.run_id, OWN.peer_id, bytes(16), 1000).seal(body)

    async def run() -> None:
        ours, theirs = (
            Exchange(Setting(one, SEALED.run_id, "modulo8/1", LARGE_RUN), other.peer_id, bytes(16), offerer=one is OWN)
            for one, other in ((OWN, PEER), (PEER, OWN))
        )
        if accepted:
            theirs.receive(ours.offer(STANDING, 0))
            ours.receive(theirs.accept(STANDING))
        else:
            ours = Exchange(Setting(OWN, SEALED.run_id, "modulo8/1", LARGE_RUN), PEER.peer_id, bytes(16), offerer=False)
        assert len(raw) <= ours.most()
        await trio.lowlevel.checkpoint()
        with suppress(RemoteError):
            ours.receive(raw)

    return name, len(raw), run


def exchanges() -> Iterator[Case]:
    offer = pb.Offer(standing=standing_to_wire(STANDING), codec="x" * (FIRST - 300), size=LARGE_RUN)
    yield exchanged("offer", pb.Body(offer=offer), accepted=False)
    yield exchanged("abort", pb.Body(abort=pb.Abort(code="NLC-207", reason="x" * (most_bytes(["abort"]) - 400))))
    yield exchanged("describe, of 8 GiB", pb.Body(describe=describe_to_wire(description(LARGE_RUN))))
    signed = pb.Commit(receipt=bytes(300), signature=bytes(64), skipped=bytes(Limits.skipped_bytes))
    raw = Dialogue(PEER, SEALED.run_id, OWN.peer_id, bytes(16)).seal(pb.Body(commit=signed))

    async def confirmed() -> None:
        Dialogue(OWN, SEALED.run_id, PEER.peer_id, bytes(16)).open(raw)

    yield "confirm, commit", len(raw), confirmed
    content = memoryview(os.urandom(CHUNK_SIZE))
    signed_for = describe(content)

    async def chunk() -> None:
        check_chunk(signed_for, 0, content)

    yield "chunk", len(content), chunk


def snapshot() -> Case:
    most = most_bytes(["snapshot_offer"])
    described = description((most - 400) // 34 * CHUNK_SIZE)
    offer = pb.SnapshotOffer(standing=standing_to_wire(STANDING), content=describe_to_wire(described), id=described.root)
    raw = Dialogue(PEER, SEALED.run_id, OWN.peer_id, random.Random(0).randbytes(16)).seal(pb.Body(snapshot_offer=offer))
    content = envelope_head(len(raw)) + raw

    async def run() -> None:
        context = Context(OWN, SEALED.run_id, rng=random.Random(0))
        await DonorStream(context, Channel(cast("Stream", Sent(content)), Limits())).describe(described.size)

    return "snapshot offer, of 250 GB", len(content), run


# --- questions and answers --------------------------------------------------------------------------------


def infos() -> Iterator[Case]:
    terms = requests.Terms(OWN, None, 60.0)
    large = manifest.Sealed(SEALED.manifest, bytes(manifest.MAX_MANIFEST_BYTES - 64), bytes(64))
    content = framed(pb.Body(info=pb.Info(manifest=large.to_bytes())))

    async def ask() -> None:
        await requests.ask(cast("Stream", Sent(content)), pb.Body(info_request=pb.InfoRequest()), terms, "info")

    yield "info, a manifest of 16 MiB", len(content), ask
    question = framed(pb.Body(info_request=pb.InfoRequest()))

    async def answer() -> None:
        await serve_info(cast("Stream", Sent(question)), terms, large)

    yield "info request, about 16 MiB", len(question), answer


EVIL_ADDRESS = b"\x06\x00\x01" * 85
"""255 bytes of multiaddr with as many parts as go into it."""


def of_libp2p() -> Iterator[Case]:
    libp2p_patches.bound_lengths()  # as every host does
    told = delimited(identify.Identify(listen_addrs=[EVIL_ADDRESS] * 200, protocols=["/x"] * 3000, observed_addr=EVIL_ADDRESS))
    yield "identify", len(told), lambda: identify.ask(cast("Stream", Sent(told)))
    dial = AutoNat(
        type=AutoNat.DIAL, dial={"peer": {"id": ID.from_string(PEER.peer_id).to_bytes(), "addrs": [EVIL_ADDRESS] * 30}}
    )
    question = delimited(dial)
    yield "AutoNAT", len(question), lambda: AutoNatServer(cast("Host", Nobody())).handle(cast("Stream", Sent(question)))
    servers = [{"id": os.urandom(64), "addrs": [EVIL_ADDRESS] * 15} for _ in range(15)]
    answer = delimited(Kademlia(providerPeers=servers))
    yield "DHT answer", len(answer), lambda: look_up(cast("Host", Nobody(answer)), PEER.peer_id, SEALED.run_id)
    long = delimited(Kademlia(providerPeers=[{"id": os.urandom(60_000)}]))
    yield "DHT answer, a long id", len(long), lambda: look_up(cast("Host", Nobody(long)), PEER.peer_id, SEALED.run_id)


# --- below the messages -----------------------------------------------------------------------------------

_RECORD = 65_519


def records() -> Iterator[Case]:
    """One record of the secure channel, full of the muxer's headers."""
    windows = pack(Kind.WINDOW, Flag.NONE, 1, 0) * (_RECORD // 12)
    opened = b"".join(pack(Kind.WINDOW, Flag.SYN, 3 + 2 * number, 0) for number in range(_RECORD // 12))
    single = (pack(Kind.DATA, Flag.NONE, 1, 1) + b"x") * (_RECORD // 13)
    for name, content in (("windows", windows), ("streams opened", opened), ("data byte by byte", single)):

        async def run(content: bytes = content) -> None:
            async with against_frames(OURS) as (ours, other):
                await other.write(pack(Kind.DATA, Flag.SYN, 1, 0))
                await ours.accept_stream()
                await other.write(content)
                with trio.move_on_after(0.2):
                    await ours.event_closed.wait()

        yield f"a record of {name}", len(content), run


def pages() -> Iterator[Case]:
    for name, lines in (("HTTP request", 2250), ("HTTP request, refused", 15_000)):
        content = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * lines + b"\r\n"

        async def run(content: bytes = content) -> None:
            with suppress(http.h11.RemoteProtocolError):
                await http._Connection(cast("trio.SocketStream", Sent(content)))._request()

        yield name, len(content), run


def cases(folder: Path) -> list[Case]:
    found = [*gossips(folder), *exchanges(), snapshot(), *infos(), *of_libp2p(), *records(), *pages()]
    return found


def cost(case: Case, rounds: int) -> Cost:
    name, size, run = case
    measured = []
    for _ in range(rounds):
        steps = Steps()
        trio.run(run, instruments=[steps])
        measured.append(steps)
    return Cost(name, size, min(one.seconds for one in measured), min(one.longest for one in measured))


@dataclass(frozen=True)
class MessagesResult:
    costs: tuple[Cost, ...]

    def to_text(self) -> str:
        lines = [f"{'message':42} {'bytes':>10} {'in all':>9} {'longest turn':>13}"]
        for one in self.costs:
            lines.append(f"{one.message:42} {one.bytes_:10} {one.seconds * 1e3:6.1f} ms {one.longest * 1e3:10.2f} ms")
        return "\n".join(lines)

    def to_figures(self) -> dict[str, Any]:
        return {"costs": [asdict(one) for one in self.costs]}


def measure(rounds: int, say: Callable[[str], None]) -> MessagesResult:
    with tempfile.TemporaryDirectory() as folder:
        result = MessagesResult(tuple(cost(case, rounds) for case in cases(Path(folder))))
    say(result.to_text())
    return result
