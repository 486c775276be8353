"""The checks that need peers: bootstraps one by one, then what they can tell us about ourselves.

The rule: whoever is asked sees a newcomer that looks around, and no member: nothing is announced, provided or
kept. Each check ends as a finding; a peer's failure is one in words that its user can act on.
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import trio

from nolocod.doctor.findings import Finding, fail, failed, ok, skipped, warn
from nolocod.errors import (
    ManifestError,
    OtherRunError,
    PeerBusyError,
    PeerNotAllowedError,
    PeerTooSlowError,
    PeerVersionError,
    RefusedError,
    RemoteError,
    UsageError,
    VersionError,
)
from nolocod.identity import short
from nolocod.p2p.discovery.kademlia import look_up
from nolocod.p2p.discovery.run_info import fetch_info
from nolocod.p2p.membership import heartbeat
from nolocod.p2p.transport.multiaddrs import split, tcp_parts, via
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.p2p.transport.stream import GOSSIP
from nolocod.p2p.transport.throughput import measure
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import MAJOR
from nolocod.units import SLOWEST_RATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nolocod.identity import Identity, PeerId
    from nolocod.observe.events import NatClass
    from nolocod.p2p.host import Host
    from nolocod.run.manifest import Sealed

_CONNECT = 4.0
"""Seconds for a TCP connection."""
_ANSWER = 6.0
"""Seconds for a question and its answer."""
_CLOCK_WARN, _CLOCK_FAIL = 30.0, 600.0
"""Seconds; a node whose clock is 600 s off ends with NLC-124."""
_BEAT = 15.0
"""Seconds that a peer's own heartbeat may be old when it tells us."""
_UNREACHABLE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


@dataclass
class Visit:
    """What came of one bootstrap address. `peer` and `sealed` once it turned out to be a node of the run."""

    address: str
    findings: list[Finding] = field(default_factory=list)
    peer: PeerId | None = None
    sealed: Sealed | None = None

    @property
    def good(self) -> bool:
        return self.sealed is not None


@dataclass(frozen=True)
class Told:
    """One member, as its own heartbeat has it. `offset`: the time of the day at which it was made minus ours, in seconds."""

    peer: PeerId
    addresses: tuple[str, ...]
    reach: NatClass | None
    offset: float


# --- bootstraps ---------------------------------------------------------------------------------------


async def visit(host: Host, text: str, identity: Identity, run_id: str | None, own: Iterable[str]) -> Visit:
    """D21, D22 and D23 for one bootstrap address; `own` are the peer ids that we go by."""
    found = Visit(text)
    try:
        peer, address = split(text)
    except UsageError as error:
        found.findings.append(failed("D21", error, text))
        return _leave(found, "D22", "D23", "the address cannot be read.")
    if peer in own:
        found.findings.append(skipped("D21", "the address is this node's own.", text))
        return _leave(found, "D22", "D23", "the address is this node's own.")
    found.findings.append(await tcp(address, text))
    if found.findings[-1].status != "ok":
        return _leave(found, "D22", "D23", "no TCP connection (D21).")
    found.findings.append(await handshake(host, peer, address, text))
    if found.findings[-1].status != "ok":
        return _leave(found, "D23", "D23", "no such peer there (D22).")
    terms = Terms(identity, run_id, _ANSWER)
    finding, found.sealed = await run(host, peer, address, terms, text)
    found.findings.append(finding)
    found.peer = peer if found.sealed is not None else None
    return found


def _leave(found: Visit, first: str, last: str, why: str) -> Visit:
    found.findings += [skipped(code, why, found.address) for code in dict.fromkeys((first, last))]
    return found


async def tcp(address: str, about: str = "") -> Finding:
    """D21: of the relay, where `address` leads through one."""
    circuit = via(address)
    kind, name, port = tcp_parts(circuit[1] if circuit else address)
    where = f"{'relay ' if circuit else ''}{name} port {port}"
    family = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}.get(kind, 0)
    began = trio.current_time()
    try:
        with trio.fail_after(_CONNECT):
            targets = await trio.socket.getaddrinfo(name, port, family, socket.SOCK_STREAM)
            await _connect_any(targets)
    except trio.TooSlowError:
        return fail(
            "D21", f"{where} gives no answer in {_CONNECT:.0f} s: it is off, or a firewall drops what we send.", "", about
        )
    except socket.gaierror as error:
        return fail(
            "D21", f"the name {name} cannot be resolved ({error.strerror}).", "Check the name, and this machine's DNS.", about
        )
    except ConnectionRefusedError:
        return fail("D21", f"{where} refuses: the machine is up, and nothing listens there.", "", about)
    except OSError as error:
        if error.errno in _UNREACHABLE:
            family_name = "IPv6" if family == socket.AF_INET6 else "IPv4"
            remedy = f"Check this machine's network; {family_name} does not get there."
            return fail("D21", f"there is no way to {where} ({error.strerror}).", remedy, about)
        return fail("D21", f"{where}: {error.strerror or error}.", "", about)
    return ok("D21", f"{where} answers in {(trio.current_time() - began) * 1000:.0f} ms.", about)


async def _connect_any(targets: Sequence[tuple[int, int, int, str, tuple[str | bytes | int, ...]]]) -> None:
    """Connect to the first of what `getaddrinfo` gave that lets us; OSError of the last."""
    failure: OSError | None = None
    for family, kind, protocol, _, target in targets:
        with trio.socket.socket(family, kind, protocol) as probe:
            try:
                await probe.connect(target)
            except OSError as error:
                failure = error
            else:
                return
    raise failure or OSError("the name has no address")


async def handshake(host: Host, peer: PeerId, address: str, about: str = "") -> Finding:
    """D22."""
    try:
        if via(address):
            await host.connect(peer, [address])
        else:
            await host.probe(peer, address)
    except PeerTooSlowError:
        return fail("D22", "something accepts the connection and then does not speak.", "", about, PeerTooSlowError.entry.code)
    except RemoteError as error:
        return failed("D22", error, about)
    return ok("D22", f"it is {peer}.", about)


async def run(host: Host, peer: PeerId, address: str, terms: Terms, about: str = "") -> tuple[Finding, Sealed | None]:
    """D23, and the run."""
    try:
        sealed = await fetch_info(host, peer, [address], terms)
    except (ManifestError, OtherRunError) as error:
        whose = f"it is in another run: {error.cause}" if isinstance(error, OtherRunError) or terms.run_id else error.cause
        return fail("D23", whose, "", about, error.code), None
    except (PeerVersionError, VersionError) as error:
        return fail("D23", error.cause, "Install the release whose major version is the other's.", about, error.code), None
    except RefusedError as error:
        unknown = "does not know the protocol" in error.cause
        text = "it is a libp2p node, but a nolocod node of no run (yet)." if unknown else error.cause
        return fail(
            "D23", text, "Wait until that node is in its run, or use another." if unknown else "", about, error.code
        ), None
    except RemoteError as error:
        return failed("D23", error, about), None
    if sealed.manifest.protocol != MAJOR:
        version = VersionError(f"the run needs protocol version {sealed.manifest.protocol}, this release speaks {MAJOR}.")
        return failed("D23", version, about), None
    return ok("D23", f"{sealed.manifest.name} ({sealed.run_id[:12]}).", about), sealed


def tempered(visits: Sequence[Visit], *, in_passing: bool = False) -> list[Finding]:
    """All findings; what fails at one address is a warning where another one is good.

    `in_passing`: we go by an identity of our own beside a running node. That an allow list does not know that one says
    nothing of the node.
    """
    enough = any(one.good for one in visits)

    def judged(finding: Finding) -> Finding:
        if in_passing and finding.error == PeerNotAllowedError.entry.code:
            return skipped(finding.code, "its allow list knows this node perhaps, and not the doctor beside it.", finding.about)
        if enough and finding.status == "fail":
            return warn(finding.code, finding.found, finding.remedy, finding.about)
        return finding

    return [judged(finding) for one in visits for finding in one.findings]


# --- what members tell --------------------------------------------------------------------------------


async def members(host: Host, peer: PeerId, sealed: Sealed, identity: Identity) -> list[Told]:
    """The heartbeats that `peer` knows, its own first. Raises RemoteError."""
    stream = await host.open_stream(peer, GOSSIP)
    terms = Terms(identity, sealed.run_id, _ANSWER)
    body = await ask(stream, pb.Body(gossip=pb.Gossip(answer=True)), terms)
    now = time.time()
    told: list[Told] = []
    for raw in body.gossip.heartbeats:
        try:
            one = heartbeat.read(raw, sealed.run_id)
        except RemoteError:
            continue
        if one.peer != identity.peer_id:
            told.append(Told(one.peer, one.addresses, one.nat, one.time - now))
    return sorted(told, key=lambda member: member.peer != peer)


def clock(offsets: Sequence[float]) -> Finding:
    """D24: `offsets` are peers' clocks minus ours, too low by their heartbeats' ages."""
    if not offsets:
        return skipped("D24", "no peer told its time.")
    offset = median(offsets)
    off = offset if offset > 0 else min(offset + _BEAT, 0.0)
    told = f"this clock is {abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} {_peers(len(offsets))}."
    if abs(off) > _CLOCK_FAIL:
        return fail("D24", told, error="NLC-124")
    if abs(off) > _CLOCK_WARN:
        return warn("D24", told)
    return ok("D24", f"within {max(abs(off), _BEAT):.0f} s of {_peers(len(offsets))}.")


def _peers(count: int) -> str:
    return "1 peer's" if count == 1 else f"the median of {count} peers'"


async def dht(host: Host, servers: Sequence[PeerId], sealed: Sealed) -> Finding:
    """D25."""
    causes: list[str] = []
    for server in servers:
        try:
            found = await look_up(host, server, sealed.run_id)
        except RemoteError as error:
            causes.append(error.cause)
        else:
            return ok("D25", f"{short(server)} answers and names {len(found.keys() - {server})} more of the run.")
    return warn("D25", " ".join(causes))


# --- the line -----------------------------------------------------------------------------------------


async def throughput(host: Host, peer: PeerId, exchange: int | None) -> Finding:
    """D30: the last check, so that no other one is in its way. `exchange`: bytes of one, each way, if known."""
    try:
        down, up = [await measure(host.open_stream, peer, way) for way in ("down", "up")]
    except PeerBusyError:
        return skipped("D30", f"{short(peer)} gives no sample now: it is asked by others, or was by us a moment ago.")
    except RefusedError:
        return skipped("D30", f"{short(peer)} is of a release that gives no samples.")
    except RemoteError as error:
        return warn("D30", error.cause)
    told = f"{_rate(down)} down, {_rate(up)} up, with {short(peer)}"
    if exchange:
        told += f"; an exchange of {exchange / 1e6:.1f} MB takes {exchange / min(down, up):.1f} s"
    return ok("D30", f"{told}.") if min(down, up) >= SLOWEST_RATE else warn("D30", f"{told}.")


def _rate(count: float) -> str:
    return f"{count * 8 / 1e6:.1f} Mbit/s"
