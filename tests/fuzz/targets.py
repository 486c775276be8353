"""One target per parser of foreign bytes: takes any bytes, and ends in peace or in an error that the caller maps.

The rule: a target lets through only what the parser's docstring promises; everything else is a finding. What a
signature would keep out is signed here, so that the parser behind it is what is tried. `SEEDS` are whole messages to
begin from. A target is cheap and keeps nothing from one call to the next.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.host.autonat.pb.autonat_pb2 import Message as AutoNat
from libp2p.kad_dht.pb.kademlia_pb2 import Message as Kademlia
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from nolocod import identity
from nolocod.errors import (
    BackupError,
    DataDirError,
    IdentityError,
    InvitationError,
    ManifestError,
    NoSuchRunError,
    NotRunningError,
    RemoteError,
    RunFileError,
    SignatureError,
    UsageError,
    VersionError,
)
from nolocod.identity import Identity
from nolocod.node import data_directory
from nolocod.node.identity_backup import read as read_backup
from nolocod.observe.status import client
from nolocod.p2p.discovery.address_book import AddressBook
from nolocod.p2p.exchange import receipt_audit
from nolocod.p2p.limits.bandwidth import Ledger
from nolocod.p2p.membership.gossip import Gossip
from nolocod.p2p.membership.heartbeat import OwnHeartbeat
from nolocod.p2p.membership.peer_scoring import Records, Reputation
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.nat.circuit_relay import read_peer
from nolocod.p2p.registry import records
from nolocod.p2p.transport import identify, multiaddrs, noise_records, yamux_frames
from nolocod.p2p.transport.delimited import receive_message
from nolocod.paths import DataDir
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto import receipt
from nolocod.proto.content import describe_from_wire, describe_to_wire
from nolocod.proto.envelope import Dialogue, open_envelope, peek, seal
from nolocod.proto.exchange import Exchange, Setting
from nolocod.proto.framing import HEAD_SIZE, chunk_head, parse_head
from nolocod.proto.limits import Limits
from nolocod.proto.types import Standing, describe
from nolocod.run import announcements, credentials, manifest
from nolocod.run import invitations as tokens
from nolocod.run.run_file import read_run_file

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=Message)

ALICE, BOB, OWNER = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2, 3))
RUN = "ab" * 32
WALL = 1_700_000_000.0
LIMITS = Limits(chunk_bytes=100)
TENSOR = bytes(250)
SEALED = manifest.seal(manifest.Manifest(name="one", model={"model_type": "llama"}), OWNER)


@dataclass(frozen=True)
class Target:
    """`run` takes bytes; `seeds` are whole inputs of at most `most` bytes."""

    name: str
    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    most: int = 4096


TARGETS: dict[str, Target] = {}
TENSORS = ("tensor", "tensor_file", "weights_sample", "checkpoint_state")
"""Those that `tests.fuzz.tensors` adds."""


def target(*seeds: bytes, most: int = 4096) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    def add(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[run.__name__] = Target(run.__name__, run, seeds, most)
        return run

    return add


class Folder:
    """A directory that lives as long as this process; files in it are written anew for every input."""

    def __init__(self) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def write(self, name: str, content: bytes) -> Path:
        if self._made is None:
            memory = Path("/dev/shm")
            self._made = tempfile.TemporaryDirectory(prefix="nolocod-fuzz-", dir=memory if memory.is_dir() else None)
        path = Path(self._made.name) / name
        path.write_bytes(content)
        path.chmod(0o600)
        return path


FOLDER = Folder()


class Bytes:
    """A stream on which `content` comes and nothing else (streams.Stream, as far as parsers use it)."""

    remote = BOB.peer_id

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    async def read_exactly(self, count: int) -> bytes:
        if len(self._content) - self._at < count:
            raise RemoteError("the stream ended.")
        self._at += count
        return self._content[self._at - count : self._at]


def received(content: bytes, kind: type[M], most: int) -> M | None:
    """One of libp2p's messages, as it comes over a stream; None where that costs its sender the stream."""
    with suppress(RemoteError):
        return at_once(lambda: receive_message(Bytes(content), kind, most))  # type: ignore[arg-type]  # only reads
    return None


def at_once(work: Callable[[], object]) -> object:
    """The result of an async function that never waits, without an event loop."""
    coroutine = work()
    try:
        coroutine.send(None)  # type: ignore[attr-defined]
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a parser waited for something")


def sent(message: Message) -> bytes:
    raw = message.SerializeToString()
    assert len(raw) < 128
    return bytes([len(raw)]) + raw


def parsed(kind: type[M], raw: bytes) -> M | None:
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        return None
    return message


# --- our own protocol ---------------------------------------------------------------------------------

STANDING = pb.Standing(round=3, tokens=30, loss=2.5)
BEAT = pb.Heartbeat(
    count=int(WALL * 1000), standing=STANDING, state="training", addresses=["/ip4/203.0.113.7/tcp/4001"], version="0.1"
)
BEAT.time_ms, BEAT.reach, BEAT.relays = int(WALL * 1000), "public", True
DESCRIBE = describe_to_wire(describe(memoryview(TENSOR), 100))
SIDES = [pb.Side(peer_id=one.peer_id, standing=STANDING, root=bytes(32)) for one in (ALICE, BOB)]
CONTENT = receipt.content_of(RUN, bytes(16), *SIDES)
RECEIPT = receipt.Receipt(CONTENT, receipt.sign(ALICE, CONTENT), receipt.sign(BOB, CONTENT))
MESSAGES = (
    pb.Body(offer=pb.Offer(standing=STANDING, codec="float32/1", size=250)),
    pb.Body(describe=DESCRIBE),
    pb.Body(confirm=pb.Confirm(receipt=CONTENT, signature=bytes(64))),
    pb.Body(resume=pb.Resume(next_chunk=1)),
    pb.Body(abort=pb.Abort(code="NLC-207", reason="not finite")),
    pb.Body(working=pb.Working()),
    pb.Body(heartbeat=BEAT),
    pb.Body(snapshot_offer=pb.SnapshotOffer(standing=STANDING, content=DESCRIBE, id=bytes(32))),
)


def _signed(body: pb.Body) -> bytes:
    body.run_id = RUN
    return seal(body, BOB)


@target(*(_signed(message) for message in MESSAGES))
def envelope(raw: bytes) -> None:
    for run_id, remote in ((RUN, BOB.peer_id), (None, None)):
        with suppress(RemoteError):
            open_envelope(raw, run_id=run_id, receiver=ALICE.peer_id, remote=remote)
    with suppress(RemoteError):
        peek(raw)


@target(chunk_head(3, 100), struct.pack(">BII", 0, 0, 50))
def framing(raw: bytes) -> None:
    for size in (len(raw), HEAD_SIZE):
        with suppress(RemoteError):
            parse_head(raw[:size], 4096, 100)


@target(DESCRIBE.SerializeToString())
def description(raw: bytes) -> None:
    wire = parsed(pb.Describe, raw)
    if wire is not None:
        with suppress(RemoteError):
            describe_from_wire(wire, LIMITS)


@target(*(message.SerializeToString() for message in MESSAGES))
def exchange(raw: bytes) -> None:
    """Anything that a partner can sign, in the middle of an exchange with it, from either side."""
    body = parsed(pb.Body, raw)
    if body is None:
        return
    for offerer in (True, False):
        ours = Exchange(Setting(ALICE, RUN, "float32/1", 250, LIMITS), BOB.peer_id, bytes(16), offerer=offerer)
        theirs = Exchange(Setting(BOB, RUN, "float32/1", 250, LIMITS), ALICE.peer_id, bytes(16), offerer=not offerer)
        one, other = (ours, theirs) if offerer else (theirs, ours)
        other.receive(one.offer(Standing(3, 30, 2.5), 0))
        one.receive(other.accept(Standing(3, 30, 2.0)))
        ours.describe(describe(memoryview(TENSOR), 100))
        with suppress(RemoteError):
            ours.receive(Dialogue(BOB, RUN, ALICE.peer_id, bytes(16), 1000).seal(body))
        assert ours.received == 0


@target(BEAT.SerializeToString())
def heartbeat(raw: bytes) -> None:
    body = parsed(pb.Heartbeat, raw)
    if body is not None:
        table = Membership(ALICE.peer_id, RUN)
        with suppress(RemoteError):
            table.heard(_signed(pb.Body(heartbeat=body)), 0.0, WALL)
        table.live(1.0)


@target(pb.Gossip(heartbeats=[_signed(pb.Body(heartbeat=BEAT))], ages=[1000], answer=True).SerializeToString())
def gossip(raw: bytes) -> None:
    message = parsed(pb.Gossip, raw)
    if message is not None:
        own_heartbeat = OwnHeartbeat(ALICE, RUN, lambda: (Standing(3, 30, 2.5), "training"), lambda: (), lambda: WALL)
        with suppress(RemoteError):
            Gossip(Membership(ALICE.peer_id, RUN), own_heartbeat, random.Random(0)).reply(BOB.peer_id, message, 0.0)


@target(receipt.to_line(RECEIPT).rstrip())
def receipt_line(raw: bytes) -> None:
    with suppress(RemoteError):
        receipt.from_line(raw)
    for _ in receipt_audit.read(FOLDER.write("receipts", raw)):
        pass


@target(CONTENT)
def receipt_content(raw: bytes) -> None:
    """Anything that two peers can sign together."""
    with suppress(RemoteError):
        made = receipt.Receipt(raw, receipt.sign(ALICE, raw), receipt.sign(BOB, raw))
        made.check()
        receipt_audit.as_fields(made)
        receipt_audit.summary(made)


@target(SEALED.to_bytes(), most=16384)
def sealed_manifest(raw: bytes) -> None:
    with suppress(ManifestError, VersionError):
        manifest.unseal(raw)


@target(SEALED.body, most=16384)
def manifest_body(raw: bytes) -> None:
    """Anything that an owner can sign."""
    with suppress(ManifestError, VersionError):
        manifest.unseal(OWNER.sign(b"nolocod manifest 1\0" + raw) + raw)


@target(b'name = "one"\n[model]\nmodel_type = "llama"\n[outer]\nrounds = 200\n')
def run_file(raw: bytes) -> None:
    with suppress(RunFileError):
        read_run_file(FOLDER.write("run.toml", raw))


INVITATION = tokens.Invitation(RUN, bytes(16), WALL + 100, BOB.public)
TOKEN = tokens.Token(tokens.seal_invitation(INVITATION, OWNER), BOB.secret, ("/ip4/203.0.113.7/tcp/4001",))


@target(tokens.print_token(TOKEN).encode())
def token(raw: bytes) -> None:
    with suppress(InvitationError):
        tokens.read_token(raw.decode("utf-8", "replace"))


@target(tokens.sign_admission(TOKEN, ALICE.peer_id))
def admission(raw: bytes) -> None:
    with suppress(RemoteError):
        tokens.open_admission(raw, ALICE.peer_id, OWNER.peer_id, RUN)


@target(tokens.seal_revocations(tokens.Revocations(1, frozenset([bytes(16)]), frozenset([BOB.peer_id])), RUN, OWNER))
def revocations(raw: bytes) -> None:
    with suppress(RemoteError):
        tokens.open_revocations(raw, OWNER.peer_id, RUN)


HERE = f"/ip4/203.0.113.7/tcp/4001/p2p/{BOB.peer_id}"
SAID = announcements.Announcement(
    run_id=RUN, owner=OWNER.peer_id, version=WALL, expires=WALL + 100, addresses=(HERE,), name="one", parameters=10**6
)
ANNOUNCED = announcements.sign(SAID, OWNER)
SIGNED = pb.Sealed.FromString(ANNOUNCED.raw).body


@target(ANNOUNCED.raw)
def announcement(raw: bytes) -> None:
    registry = records.Registry(RUN, OWNER.peer_id)
    with suppress(RemoteError):
        registry.learn([raw], BOB.peer_id, 0.0, WALL)


@target(SIGNED)
def announced(raw: bytes) -> None:
    """Anything that an owner can sign."""
    signature = OWNER.sign(b"nolocod announcement 1\0" + raw)
    with suppress(RemoteError):
        said = records.read(pb.Sealed(body=raw, signature=signature).SerializeToString())
        announcements.link(said.run_id, said.addresses[0])


@target(announcements.link(RUN, HERE).encode())
def run_link(raw: bytes) -> None:
    with suppress(NoSuchRunError):
        announcements.read_link(raw.decode("utf-8", "replace"))


# --- libp2p's protocols -------------------------------------------------------------------------------

ADDRESS = Multiaddr("/ip4/203.0.113.7/tcp/4001").to_bytes()
PEER = ID.from_string(BOB.peer_id).to_bytes()


@target(
    sent(HopMessage(type=HopMessage.CONNECT, peer={"id": PEER, "addrs": [ADDRESS]})),
    sent(HopMessage(type=HopMessage.RESERVE)),
)
def relay_hop(raw: bytes) -> None:
    message = received(raw, HopMessage, 4096)
    if message is not None:
        with suppress(RemoteError):
            read_peer(message.peer)
        _ = [identify.readable(one) for one in message.reservation.addrs]


@target(sent(StopMessage(type=StopMessage.CONNECT, peer={"id": PEER})))
def relay_stop(raw: bytes) -> None:
    message = received(raw, StopMessage, 4096)
    if message is not None:
        with suppress(RemoteError):
            read_peer(message.peer)


@target(sent(identify.Identify(agent_version="x", listen_addrs=[ADDRESS], observed_addr=ADDRESS, protocols=["/a/1"])))
def identified(raw: bytes) -> None:
    async def ask() -> None:
        await identify.ask(Bytes(raw))  # type: ignore[arg-type]  # only reads

    with suppress(RemoteError):
        trio.run(ask)


@target(sent(AutoNat(type=AutoNat.DIAL, dial={"peer": {"id": PEER[:20], "addrs": [ADDRESS]}})))
def autonat(raw: bytes) -> None:
    message = received(raw, AutoNat, 8 << 10)
    if message is not None:
        for one in message.dial.peer.addrs:
            multiaddrs.endpoint(identify.readable(one) or "")


@target(sent(HolePunch(type=HolePunch.CONNECT, ObsAddrs=[ADDRESS])))
def punch(raw: bytes) -> None:
    message = received(raw, HolePunch, 4096)
    if message is not None:
        for one in message.ObsAddrs:
            multiaddrs.endpoint(identify.readable(one) or "")


@target(sent(Kademlia(type=Kademlia.GET_PROVIDERS, providerPeers=[{"id": PEER, "addrs": [ADDRESS]}])))
def dht_answer(raw: bytes) -> None:
    message = received(raw, Kademlia, 256 << 10)
    if message is not None:
        for told in message.providerPeers:
            _ = [text for one in told.addrs if (text := identify.readable(one)) and multiaddrs.dialable(text)]


@target(b"/ip4/203.0.113.7/tcp/4001/p2p/" + BOB.peer_id.encode(), b"/dns4/a.example/tcp/1", b"/ip6/::1/tcp/9")
def address_text(raw: bytes) -> None:
    text = raw.decode("utf-8", "replace")
    with suppress(UsageError):
        multiaddrs.split(text)
    for read in (multiaddrs.dialable, multiaddrs.straight, multiaddrs.via, multiaddrs.endpoint):
        read(text)
    with suppress(SignatureError):
        identity.public_key(text)


@target(ADDRESS, PEER)
def address_bytes(raw: bytes) -> None:
    text = identify.readable(raw)
    if text is not None:
        multiaddrs.dialable(text)


@target(b"".join(yamux_frames.pack(kind, 1, int(kind < 2), 3) + b"abc" * (kind == 0) for kind in yamux_frames.Kind))
def yamux(raw: bytes) -> None:
    deframer = yamux_frames.Deframer()
    step = raw[0] % 40 + 1 if raw else 1
    with suppress(yamux_frames.FrameError):
        for at in range(0, len(raw), step):
            for _ in deframer.feed(memoryview(raw)[at : at + step]):
                pass


@target(b"\0\x20" + bytes(32))
def noise_record(raw: bytes) -> None:
    with suppress(noise_records.RecordError):
        size = noise_records.pending(memoryview(raw))
        if size is not None:
            sealed = memoryview(raw)[noise_records.HEAD : noise_records.HEAD + size + noise_records.TAG]
            noise_records.Opener(bytes(32)).open_into(sealed, memoryview(bytearray(size)))


# --- files and pages ----------------------------------------------------------------------------------


@target(json.dumps([{"peer_id": BOB.peer_id, "addresses": ["/ip4/203.0.113.7/tcp/4001"], "seen": WALL}]).encode())
def peer_book(raw: bytes) -> None:
    book = AddressBook(FOLDER.write("peers.json", raw), lambda _event: None)
    for peer, _ in book.recent():
        book.addresses(peer)


@target(Reputation(lambda _event: None).dump())
def reputation(raw: bytes) -> None:
    Records(FOLDER.write("reputation.json", raw), Reputation(lambda _event: None), WALL)


@target(b'{"2025-06": {"up": 1, "down": 2}}')
def usage(raw: bytes) -> None:
    with suppress(DataDirError):
        _ = Ledger(FOLDER.write("usage.json", raw), lambda: WALL).total


@target(BOB.secret)
def identity_file(raw: bytes) -> None:
    with suppress(IdentityError):
        identity.load(FOLDER.write("identity.key", raw))


@target(b"ab" * 32 + b"\n")
def network_key(raw: bytes) -> None:
    with suppress(UsageError, DataDirError):
        credentials.read_network_key(FOLDER.write("network.key", raw))


@target(BOB.peer_id.encode() + b"\n# a friend\n")
def allow_list(raw: bytes) -> None:
    with suppress(UsageError, DataDirError):
        credentials.read_allow_list(FOLDER.write("allow", raw))


@target(json.dumps([{"id": "00" * 16, "expires": WALL, "peer": ""}]).encode())
def invitations(raw: bytes) -> None:
    with suppress(DataDirError):
        credentials.issued(DataDir(FOLDER.write("invitations.json", raw).parent))


@target(json.dumps({"pid": 1, "http": "127.0.0.1:1", "peer_id": "x", "run_id": RUN, "addresses": ["/x"]}).encode())
def running_note(raw: bytes) -> None:
    with suppress(NotRunningError):
        data_directory.find_running(DataDir(FOLDER.write("daemon.json", raw).parent))


@target(
    json.dumps(
        {"format": "nolocod identity 1", "peer_id": BOB.peer_id, "secret": "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI="}
    ).encode()
)
def identity_backup(raw: bytes) -> None:
    with suppress(BackupError):
        stored = read_backup(FOLDER.write("backup", raw))
        if not stored.encrypted:
            assert stored.open(None).peer_id == stored.peer_id


@target(b'{"peer_id": "x", "state": "training"}')
def status_page(raw: bytes) -> None:
    with suppress(NotRunningError):
        client.decode(raw)
