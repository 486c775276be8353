"""`python -m tests.fuzz hosts --times N`: strangers that dial a real node, and that it dials, say what the grammar draws.

The node is a mesh with all its protocols, on loopback; every stranger has an address and an identity of its own, so that no
limit on sources ends the matter early. After each hundred an honest peer must be served. Prints how far they came and what
the seam met; exit status 1 if an exception left its connection, or the honest peer was not served. `--seed S` begins at
case S: what is said depends on the case's number alone.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio
import trio.lowlevel
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.peer.id import ID
from libp2p.security.noise.patterns import PatternXX

from nolocod.errors import RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.discovery.kademlia import look_up
from nolocod.p2p.discovery.run_info import fetch_info
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.mesh import open_mesh
from nolocod.p2p.nat import autonat
from nolocod.p2p.nat.circuit_relay import RelayClient
from nolocod.p2p.settings import MeshSettings
from nolocod.p2p.snapshots.client import open_donor_stream
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot
from nolocod.p2p.transport.exceptions import FOREIGN
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, PING, SNAPSHOT
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import seal as sealed
from nolocod.proto.framing import envelope_head
from nolocod.proto.limits import Limits
from nolocod.proto.types import Accept, Description, Ended, Offer, Standing, describe
from nolocod.run.manifest import Manifest, Sealed, seal
from nolocod.units import Address
from tests.fuzz.grammar import KADEMLIA, Case, drawn
from tests.fuzz.targets import BEAT
from tests.support.strangers import HELLO, YAMUX, Stranger, answering, calling, line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from libp2p.crypto.keys import KeyPair

    from nolocod.p2p.transport.stream import Stream
    from nolocod.p2p.transport.yamux_stream import YamuxStream
    from nolocod.proto.types import Answer

ROLES = ("dialler", "listener")
_AT_ONCE = 8
_PATIENCE = 0.5
"""Seconds that a stranger gives the node to answer what it said."""
_WHOLE = 30.0
"""Seconds for one case; far more than any needs."""
_ENOUGH = 120.0
_EVERY = 100
_SIZE = 5000
_STANDING = Standing(5, 100, 2.5)


class LocalSide:
    """Stands for a trainer, and accepts whoever offers."""

    phase, wary, credit = math.inf, False, 1.0

    def __init__(self) -> None:
        self.content = memoryview(bytearray(random.Random(1).randbytes(_SIZE)))
        self.outbox = self.inbox = self.local_side = self
        self.size = _SIZE

    def view(self, start: int, length: int) -> memoryview:
        return self.content[start : start + length]

    place = view

    def release(self, start: int, length: int) -> None: ...

    def decide(self, offer: Offer) -> Answer:
        return Accept(_STANDING)

    async def ended(self, ended: Ended) -> None:
        await trio.lowlevel.checkpoint()

    async def capture(self, subject: int) -> Description:
        await trio.lowlevel.checkpoint()
        return describe(self.content)

    async def inspect(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""


@dataclass
class Report:
    """What became of the cases."""

    cases: int = 0
    layers: Counter[str] = field(default_factory=Counter)
    """How far the strangers' connections came, and what the node's own calls ended with."""
    findings: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    """Exceptions of types that are unusual, which the seam turned into errors of ours."""
    longest: float = 0.0
    """Seconds of the processor between two turns of a task that sleeps for 10 ms, at most."""


@dataclass
class Target:
    """The node under fire."""

    host: Host
    identity: Identity
    run: Sealed
    context: Context
    folder: Path

    @property
    def port(self) -> int:
        return int(self.host.announced[0].rpartition("/")[2])

    @property
    def terms(self) -> Terms:
        return Terms(self.identity, self.run.run_id, 2.0)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Target]:
    """A node with all that answers peers, alone in its run."""
    identity = Identity.from_secret(b"t" * 32)
    run = seal(Manifest(name="fuzzed", model={"model_type": "llama"}), Identity.from_secret(b"o" * 32))
    config = MeshSettings(folder, listen=(Address("127.0.0.1", 0),), upnp=False)
    limits = Limits(accept_seconds=2.0, resume_seconds=0.2, redial_seconds=0.1, doubt_seconds=0.5, settle_seconds=0.5)
    context = replace(Context.of(identity, run), size=_SIZE, limits=limits, rng=random.Random(1))
    path = folder / "snapshot"
    path.write_bytes(LocalSide().content)
    served = ServedSnapshot(path, _STANDING, describe(LocalSide().content, 500))

    async def snapshot() -> ServedSnapshot:
        await trio.lowlevel.checkpoint()
        return served

    async with open_mesh(config, identity, lambda _: None, rng=random.Random(1)) as mesh:
        mesh._parts.connectivity._announced = True  # so that it serves the DHT
        await mesh.enter(run, lambda: (_STANDING, "training"))
        service = ExchangeService(context, mesh.dial, LocalSide(), ReceiptStore(folder / "receipts"), mesh.judge)
        mesh.serve(EXCHANGE, service.handle)
        mesh.serve(SNAPSHOT, Donor(context, snapshot, 2, lambda _: None).handle)
        yield Target(mesh._host, identity, run, context, folder)


async def meet(target: Target, role: str, cases: Iterable[tuple[int, Case | None]]) -> Report:
    """Have strangers of `role` say `cases`, a few at once; of a number without a case what the grammar draws for it."""
    report, under_way, free = Report(), deque[int](maxlen=2 * _AT_ONCE), trio.CapacityLimiter(_AT_ONCE)
    seam = logging.getLogger("nolocod.p2p.transport.exceptions")
    handler = _Met(report)
    seam.addHandler(handler)

    async def one(number: int, case: Case | None) -> None:
        identity = Identity.from_secret(random.Random(f"{role} {number} identity").randbytes(32))
        case = case or drawn(role, number, identity, target.host.own, target.run.run_id)
        place = f"127.{number % 251 + 1}.{number // 251 % 251}.{number % 199 + 2}"
        try:
            with trio.move_on_after(_WHOLE) as scope:
                await (_dials if role == "dialler" else _is_dialled)(target, identity, case, place, number, report)
            report.layers["not over in time"] += scope.cancelled_caught
        except Exception as error:  # noqa: BLE001  # that is what is looked for
            report.findings.append(f"{role} {number}: {error!r}")
        finally:
            free.release_on_behalf_of(number)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_the_loop, report)
            async with trio.open_nursery() as cases_nursery:
                for number, case in cases:
                    await free.acquire_on_behalf_of(number)
                    under_way.append(number)
                    cases_nursery.start_soon(one, number, case)
                    report.cases += 1
                    if report.cases % _EVERY == 0:
                        await _honest(target, report, number)
            await _honest(target, report, report.cases)
            nursery.cancel_scope.cancel()
    except* Exception as group:  # noqa: BLE001  # that is what is looked for
        report.findings.append(f"{role}, one of {list(under_way)}: {group.exceptions!r}")
    finally:
        seam.removeHandler(handler)
    return report


async def _watch_the_loop(report: Report) -> None:
    while True:
        began = time.thread_time()
        await trio.sleep(0.01)
        report.longest = max(report.longest, time.thread_time() - began)


async def _honest(target: Target, report: Report, number: int) -> None:
    """An honest peer fetches the run's manifest and is answered a ping."""
    try:
        with trio.fail_after(_ENOUGH):
            identity = Identity.generate()
            place = Address(f"127.0.{number % 251}.{number % 199 + 2}", 0)
            async with open_host(identity, (place,), (), lambda _: None, HostLimits(connect=20.0)) as friend:
                await fetch_info(friend, target.host.own, target.host.announced, Terms(identity, target.run.run_id, 20.0))
                stream = await friend.open_stream(target.host.own, PING)
                await stream.write(bytes(range(32)))
                assert await stream.read_exactly(32) == bytes(range(32))
    except (RemoteError, trio.TooSlowError) as error:
        report.findings.append(f"after {number} an honest peer is not served: {error!r}")


class _Met(logging.Handler):
    def __init__(self, report: Report) -> None:
        super().__init__()
        self._met = report.met

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        trace = error.__traceback__ if error else None
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
        self._met[f"{error!r:.80} at {where}"] += 1


# --- who dials the node ---------------------------------------------------------------------------------------


async def _dials(target: Target, identity: Identity, case: Case, place: str, number: int, report: Report) -> None:
    with suppress(*FOREIGN):  # of the stranger
        async with calling(target.port, identity, place) as stranger:
            await _play(stranger, case, target, report)


async def _play(stranger: Stranger, case: Case, target: Target, report: Report) -> None:
    """Be honest up to the case's layer, say its pieces, and hear the node out."""
    if case.layer != "line":
        await stranger.agree()
    if case.layer in ("line", "noise"):
        await _pour(stranger.socket.send_all, case)
    elif case.layer == "payload":
        await _shake_hands(stranger, b"".join(case.pieces), target.host.own)
    else:
        channel = await stranger.secured(target.host.own, agreed=True)
        report.layers["noise"] += 1
        if case.layer == "record":
            await _pour(stranger.socket.send_all, case)
        elif case.layer == "muxer":
            await _pour(channel.write, case)
        elif case.layer == "yamux":
            await channel.write(HELLO + line(YAMUX))
            await _pour(channel.write, case)
        else:
            async with stranger.muxed_on(channel) as muxed:
                report.layers["yamux"] += 1
                if stranger.initiator:
                    if case.protocol in (EXCHANGE, SNAPSHOT):
                        await _join(await muxed.open_stream(), stranger.identity, target)
                    await _speak(await muxed.open_stream(), case, report)
                else:
                    while True:
                        await _answer(await muxed.accept_stream(), case, report)
            return
    with suppress(trio.BrokenResourceError):
        await stranger.socket.send_eof()
        with trio.move_on_after(_PATIENCE):
            while await stranger.socket.receive_some(1 << 16):
                pass


async def _pour(send: Callable[[bytes], Awaitable[None]], case: Case) -> None:
    for piece in case.pieces:
        await send(piece)
        await trio.lowlevel.checkpoint()


async def _shake_hands(stranger: Stranger, payload: bytes, other: PeerId) -> None:
    """Noise with true keys, and `payload` in place of the proof of who we are."""
    keys: KeyPair = create_new_key_pair(stranger.identity.secret)
    pattern = PatternXX(ID.from_pubkey(keys.public_key), keys.private_key, create_new_x25519_key_pair().private_key)
    pattern.make_handshake_payload = lambda: type("Payload", (), {"serialize": lambda _: payload})()
    connection = stranger.connection()
    if stranger.initiator:
        await pattern.handshake_outbound(connection, ID.from_string(other))
    else:
        await pattern.handshake_inbound(connection)


async def _join(stream: YamuxStream, identity: Identity, target: Target) -> None:
    """Have the node take the stranger for a member, honestly."""
    beat = pb.Heartbeat()
    beat.CopyFrom(BEAT)
    beat.count = beat.time_ms = int(time.time() * 1000)
    gossip = pb.Gossip(heartbeats=[sealed(pb.Body(heartbeat=beat, run_id=target.run.run_id), identity)], ages=[0], answer=True)
    body = pb.Body(gossip=gossip, run_id=target.run.run_id, receiver=target.host.own, sequence=1, session=bytes(16))
    raw = sealed(body, identity)
    await stream.write(HELLO + line(GOSSIP.encode()) + envelope_head(len(raw)) + raw)
    await stream.close()
    with trio.move_on_after(_PATIENCE):
        while await stream.take():
            pass


async def _speak(stream: YamuxStream, case: Case, report: Report) -> None:
    agreed = HELLO + line(case.protocol.encode())
    if case.layer == "speak":
        await stream.write(agreed)
    await _pour(stream.write, case)
    heard = 0
    try:
        with trio.move_on_after(_PATIENCE):
            while piece := await stream.take():
                heard += len(piece)
    finally:
        if case.layer == "speak":
            report.layers[f"{case.protocol} agreed"] += heard >= len(agreed)
            report.layers[f"{case.protocol} answered"] += heard > len(agreed)


async def _answer(stream: YamuxStream, case: Case, report: Report) -> None:
    """Agree on whatever the node asks for, and say the case where it asks for the case's protocol."""
    if case.layer == "select":
        await _pour(stream.write, case)
        return
    asked = b""
    await stream.write(HELLO)
    while asked.count(b"\n") < 2:
        asked += await stream.take()
    wanted = asked.split(b"\n")[1][1:]
    await stream.write(line(wanted))
    if wanted == case.protocol.encode():
        report.layers[f"{case.protocol} asked"] += 1
        await _pour(stream.write, case)
    await stream.close()


# --- whom the node dials --------------------------------------------------------------------------------------


async def _is_dialled(target: Target, identity: Identity, case: Case, place: str, number: int, report: Report) -> None:
    async def answer(stranger: Stranger) -> None:
        with suppress(*FOREIGN):
            await _play(stranger, case, target, report)

    peer = PeerId(identity.peer_id)
    async with answering(identity, answer, place) as address:
        try:
            with trio.move_on_after(4.0):
                await _CALLS.get(case.protocol, _opens)(target, peer, address, case.protocol)
            report.layers["call ended"] += 1
        except RemoteError as error:
            report.layers[f"call: {error.code}"] += 1
        with trio.move_on_after(1.0):
            await target.host.disconnect(peer)


async def _opens(target: Target, peer: PeerId, address: str, protocol: str) -> None:
    stream = await target.host.open_stream(peer, protocol, [address])
    try:
        await stream.write(bytes(32))
        await stream.read_exactly(32)
    finally:
        await stream.reset()


async def _identifies(target: Target, peer: PeerId, address: str, _: str) -> None:
    await target.host.connect(peer, [address])
    await target.host.identify(peer)


async def _looks_up(target: Target, peer: PeerId, address: str, _: str) -> None:
    await target.host.connect(peer, [address])
    await look_up(target.host, peer, target.run.run_id)


async def _reserves(target: Target, peer: PeerId, address: str, _: str) -> None:
    await target.host.connect(peer, [address])
    client = RelayClient(target.host)
    with suppress(RemoteError):
        await client.reserve(peer)
    await client.connect(peer, PeerId(Identity.generate().peer_id))


async def _asks_to_dial_back(target: Target, peer: PeerId, address: str, _: str) -> None:
    await target.host.connect(peer, [address])
    await autonat.ask(target.host, peer, target.host.announced)


async def _gossips(target: Target, peer: PeerId, address: str, protocol: str) -> None:
    stream = await target.host.open_stream(peer, protocol, [address])
    await ask(stream, pb.Body(gossip=pb.Gossip(answer=True)), target.terms, "gossip")


async def _offers(target: Target, peer: PeerId, address: str, _: str) -> None:
    side = LocalSide()
    store = ReceiptStore(target.folder / "offered")
    service = ExchangeService(target.context, partial(_dial, target, address), side, store, lambda _, __: None)
    await service.offer(peer, _STANDING, 0, side)


async def _fetches(target: Target, peer: PeerId, address: str, _: str) -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        async with open_donor_stream(target.context, partial(_dial, target, address), peer) as donor:
            _, description = await donor.describe(_SIZE)
            async for _ in donor.fetch(description, 0, 1, file):  # type: ignore[arg-type]
                pass


async def _dial(target: Target, address: str, peer: PeerId, protocol: str) -> Stream:
    return await target.host.open_stream(peer, protocol, [address])


_CALLS = {
    "/ipfs/id/1.0.0": _identifies,
    KADEMLIA: _looks_up,
    "/libp2p/circuit/relay/0.2.0/hop": _reserves,
    autonat.AUTONAT: _asks_to_dial_back,
    GOSSIP: _gossips,
    EXCHANGE: _offers,
    SNAPSHOT: _fetches,
}


# --- the command ------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz hosts", description=__doc__)
    parser.add_argument("--times", type=int, default=1000, help="cases of each role")
    parser.add_argument("--seed", type=int, default=0, help="the first case's number")
    parser.add_argument("--role", choices=ROLES, action="append")
    options = parser.parse_args(arguments)
    found = False
    for role in options.role or ROLES:
        began = time.monotonic()
        report = run(role, [(number, None) for number in range(options.seed, options.seed + options.times)])
        found = found or bool(report.findings)
        sys.stdout.write(told(role, report, time.monotonic() - began))
        sys.stdout.flush()
    return int(found)


def run(role: str, cases: list[tuple[int, Case | None]]) -> Report:
    """A node of its own for `cases`."""
    report = Report()

    async def whole() -> None:
        nonlocal report
        with tempfile.TemporaryDirectory(prefix="nolocod-fuzz-") as made:
            async with opened(Path(made)) as target:
                report = await meet(target, role, cases)

    try:
        trio.run(whole)
    except* Exception as group:  # noqa: BLE001  # that is what is looked for
        report.findings.append(f"{role}: the node ended: {group.exceptions!r}")
    return report


def told(role: str, report: Report, seconds: float) -> str:
    lines = [f"{role}: {report.cases} cases in {seconds:.0f} s, {len(report.findings)} findings"]
    lines += [f"  {count:6} {what}" for what, count in report.layers.most_common() if count]
    lines += [f"  {count:6} met at the seam: {what}" for what, count in report.met.most_common(20)]
    lines += [f"  the loop was busy for {report.longest:.2f} s of the processor at a stretch, at most"]
    lines += [f"  FOUND {finding}" for finding in report.findings[:20]]
    return "\n".join(lines) + "\n"
