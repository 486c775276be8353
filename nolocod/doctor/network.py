"""The checks that need peers: each bootstrap address, the clock and the DHT.

The rule: the doctor does not become a member; it announces, provides and keeps nothing.
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from nolocod.doctor.findings import CHECKS, Finding, fail, failed, ok, skipped, warn
from nolocod.errors import (
    ClockError,
    ManifestError,
    OtherRunError,
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
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import MAJOR

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nolocod.identity import Identity, PeerId
    from nolocod.observe.events import NatClass
    from nolocod.p2p.host import Host
    from nolocod.run.manifest import Sealed

BOOTSTRAP = ("D21", "D22", "D23")
"""The checks of each bootstrap address."""
_CONNECT = 4.0
"""Seconds for a TCP connection."""
_ANSWER = 6.0
"""Seconds for a question and its answer."""
_CLOCK_WARN, _CLOCK_FAIL = 30.0, 600.0
"""Seconds; from 600 s on a node warns too (NLC-124)."""
_BEAT = 15.0
"""Seconds: the largest age of a peer's own heartbeat when it reaches us."""
_UNREACHABLE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


@dataclass(frozen=True)
class Member:
    """One member, as its own heartbeat has it. `offset`: the time of the day at which it was made minus ours, in seconds."""

    peer: PeerId
    addresses: tuple[str, ...]
    reach: NatClass | None
    offset: float


# --- bootstraps ---------------------------------------------------------------------------------------


@dataclass
class Visit:
    """D21, D22 and D23 for one bootstrap address. `peer` and `sealed` are set if it is a node of the run."""

    address: str
    findings: list[Finding] = field(default_factory=list)
    peer: PeerId | None = None
    sealed: Sealed | None = None

    @property
    def good(self) -> bool:
        return self.sealed is not None

    def put(self, finding: Finding) -> bool:
        """Keep `finding`; whether it is ok."""
        self.findings.append(replace(finding, about=self.address))
        return finding.status == "ok"

    async def go(self, host: Host, identity: Identity, run_id: str | None, own: Collection[str]) -> None:
        """Make the three checks; `own` are this node's peer ids. The first that is not ok skips the rest."""
        why = "the check before it failed."
        try:
            with trio.fail_after(sum(CHECKS[code].seconds for code in BOOTSTRAP)):
                why = await self._go(host, identity, run_id, own)
        except trio.TooSlowError:
            self.put(fail(BOOTSTRAP[len(self.findings)], "no result in time."))
        except Exception as error:  # noqa: BLE001  # the doctor's promise: it never crashes
            self.put(failed(BOOTSTRAP[len(self.findings)], error))
        for code in BOOTSTRAP[len(self.findings) :]:
            self.put(skipped(code, why))

    async def _go(self, host: Host, identity: Identity, run_id: str | None, own: Collection[str]) -> str:
        """Why the checks ended before the last one."""
        try:
            peer, address = split(self.address)
        except UsageError as error:
            self.put(failed("D21", error))
            return "the address cannot be read."
        if peer in own:
            return "the address is this node's own."
        if not self.put(await tcp(address)):
            return "no TCP connection (D21)."
        if not self.put(await handshake(host, peer, address)):
            return "no such peer there (D22)."
        finding, self.sealed = await run(host, peer, address, Terms(identity, run_id, _ANSWER))
        self.put(finding)
        self.peer = peer if self.sealed is not None else None
        return ""


async def tcp(address: str) -> Finding:
    """D21: to the relay, where `address` leads through one."""
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
        return fail("D21", f"{where} does not answer in {_CONNECT:.0f} s: it is off, or a firewall drops our packets.")
    except socket.gaierror as error:
        return fail("D21", f"the name {name} cannot be resolved ({error.strerror}).", "Check the name, and this machine's DNS.")
    except ConnectionRefusedError:
        return fail("D21", f"{where} refuses: the machine is up, but nothing listens there.")
    except OSError as error:
        if error.errno in _UNREACHABLE:
            protocol = "IPv6" if family == socket.AF_INET6 else "IPv4"
            remedy = f"Check this machine's network: {protocol} does not reach that address."
            return fail("D21", f"there is no route to {where} ({error.strerror}).", remedy)
        return fail("D21", f"{where}: {error.strerror or error}.")
    return ok("D21", f"{where} answers in {(trio.current_time() - began) * 1000:.0f} ms.")


async def _connect_any(targets: Sequence[tuple[int, int, int, str, tuple[str | bytes | int, ...]]]) -> None:
    """Connect to the first of the targets that accepts; the last one's OSError if none does."""
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


async def handshake(host: Host, peer: PeerId, address: str) -> Finding:
    """D22."""
    try:
        if via(address):
            await host.connect(peer, [address])
        else:
            await host.probe(peer, address)
    except PeerTooSlowError as error:
        return fail("D22", "something accepts the connection and then sends nothing.", "", error.code)
    except RemoteError as error:
        return failed("D22", error)
    return ok("D22", f"it is {peer}.")


async def run(host: Host, peer: PeerId, address: str, terms: Terms) -> tuple[Finding, Sealed | None]:
    """D23, and the run."""
    try:
        sealed = await fetch_info(host, peer, [address], terms)
        if sealed.manifest.protocol != MAJOR:
            raise VersionError(f"the run needs protocol version {sealed.manifest.protocol}, this release speaks {MAJOR}.")
    except (ManifestError, PeerVersionError, RefusedError) as error:
        text, remedy = error.cause, ""
        if isinstance(error, OtherRunError):
            text = f"it is in another run: {text}"
        elif isinstance(error, PeerVersionError):
            remedy = "Install the release with the same major version."
        elif "does not know the protocol" in text:
            text = "it is a libp2p node, but not a nolocod node in a run (yet)."
            remedy = "Wait until that node is in its run, or use another one."
        return fail("D23", text, remedy, error.code), None
    except (RemoteError, VersionError) as error:
        return failed("D23", error), None
    return ok("D23", f"{sealed.manifest.name} ({sealed.run_id[:12]})."), sealed


def combined(visits: Sequence[Visit], *, beside_node: bool = False) -> list[Finding]:
    """All findings; where one address is good, failures at the others are warnings.

    `beside_node`: the doctor uses an identity of its own, because a node runs here. An allow list that refuses the
    doctor's identity may know the node's.
    """
    enough = any(one.good for one in visits)

    def weighed(finding: Finding) -> Finding:
        if beside_node and finding.error == PeerNotAllowedError.entry.code:
            why = "the peer's allow list does not have the doctor; it may have this node."
            return replace(skipped(finding.code, why), about=finding.about)
        if enough and finding.status == "fail":
            return replace(finding, status="warn", error="")
        return finding

    return [weighed(finding) for one in visits for finding in one.findings]


# --- what members know --------------------------------------------------------------------------------


async def members(host: Host, peer: PeerId, sealed: Sealed, identity: Identity) -> list[Member]:
    """The heartbeats that `peer` knows, its own first. Raises RemoteError."""
    stream = await host.open_stream(peer, GOSSIP)
    terms = Terms(identity, sealed.run_id, _ANSWER)
    body = await ask(stream, pb.Body(gossip=pb.Gossip(answer=True)), terms, "gossip")
    now = time.time()
    found: list[Member] = []
    for raw in body.gossip.heartbeats:
        try:
            one = heartbeat.read(raw, sealed.run_id)
        except RemoteError:
            continue
        if one.peer != identity.peer_id:
            found.append(Member(one.peer, one.addresses, one.nat, one.time - now))
    return sorted(found, key=lambda member: member.peer != peer)


def clock(offsets: Sequence[float]) -> Finding:
    """D24: `offsets` are peers' clocks minus ours, too low by the ages of their heartbeats."""
    if not offsets:
        return skipped("D24", "no peer told its time.")
    offset = median(offsets)
    off = offset if offset > 0 else min(offset + _BEAT, 0.0)
    text = f"this clock is {abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} {_peers(len(offsets))}."
    if abs(off) > _CLOCK_FAIL:
        return fail("D24", text, error=ClockError.entry.code)
    if abs(off) > _CLOCK_WARN:
        return warn("D24", text)
    return ok("D24", f"within {max(abs(off), _BEAT):.0f} s of {_peers(len(offsets))}.")


def _peers(count: int) -> str:
    return "1 peer's" if count == 1 else f"the median of {count} peers'"


async def dht(host: Host, servers: Sequence[PeerId], sealed: Sealed) -> Finding:
    """D25."""
    causes: list[str] = []
    for server in servers:
        try:
            found = await look_up(host, server, sealed.run_id)
        except RefusedError:
            continue
        except RemoteError as error:
            causes.append(error.cause)
        else:
            return ok("D25", f"{short(server)} answers and names {len(found.keys() - {server})} more members of the run.")
    if not causes:
        return skipped("D25", "None of these peers serves the DHT: only nodes do that everybody reaches.")
    return warn("D25", " ".join(causes))
