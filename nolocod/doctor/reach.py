"""The checks of how others reach this node: dial-backs, the router's port, a reservation at a relay, hole punching.

The rule: where a node runs here, its status is shown, because it had more time to find out; else helpers are asked
once. The doctor gives back the router's mapping and the reservation when it ends.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from nolocod.doctor.findings import Finding, ok, skipped, warn
from nolocod.errors import RemoteError
from nolocod.identity import short
from nolocod.observe.events import Punched
from nolocod.p2p.nat.circuit_relay import RelayClient
from nolocod.p2p.nat.classify import DialBack, Evidence, classify
from nolocod.p2p.nat.hole_punching import HolePuncher
from nolocod.p2p.nat.port_mapping import PortMapper
from nolocod.p2p.nat.reachability import ask, observed, own_hosts, own_port
from nolocod.p2p.transport.multiaddrs import multiaddr_of, public, via

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Sequence

    from nolocod.doctor.network import Member
    from nolocod.identity import PeerId
    from nolocod.observe.events import Event, NatClass
    from nolocod.observe.status.report import ReachReport
    from nolocod.p2p.host import Host
    from nolocod.p2p.settings import MeshSettings

_HELPERS = 4
_ROUTER = 8.0
"""Seconds that a router has to give a port."""
_PUNCH = 11.0
"""Seconds for a connection through a relay and the punch that follows."""
_KINDS = {
    "cone": "behind a NAT or firewall that lets hole punching through",
    "symmetric": "behind a NAT that does not let hole punching through, so relays carry",
    "client": "not reachable, this node only dials out",
    None: "not sure",
}


@dataclass(frozen=True)
class Router:
    """The router's answer to UPnP: the multiaddr that it maps to us, or why there is none (empty: not asked)."""

    finding: Finding
    mapped: str | None = None
    why: str = ""


# --- what the node that runs here knows --------------------------------------------------------------


def reported(report: ReachReport) -> list[Finding]:
    """D26 to D29 as the running node's status has them."""
    if report.kind is None:
        reachable = skipped("D26", f"the node that runs here does not know yet: {report.why or 'nobody was asked'}")
    else:
        reachable = _judged(report.kind, report.why)
    if report.relays:
        relays = ", ".join(short(row.peer_id) for row in report.relays)
        reservation = ok("D28", f"{len(report.relays)} relays keep a reservation: {relays}.")
    elif report.kind in (None, "public"):
        reservation = skipped("D28", "the node that runs here has no reservation at a relay, and needs none now.")
    else:
        reservation = warn("D28", "the node that runs here has no reservation at a relay.")
    if report.punches:
        punched = (ok if report.punched else warn)("D29", f"{report.punched} of {report.punches} attempts succeeded.")
    else:
        punched = skipped("D29", "the node that runs here had no reason to try.")
    return [reachable, skipped("D27", "the node that runs here asks the router itself."), reservation, punched]


def _judged(kind: NatClass | None, why: str) -> Finding:
    return ok("D26", f"public: {why}") if kind == "public" else warn("D26", f"{_KINDS[kind]}: {why}")


# --- by asking ----------------------------------------------------------------------------------------


@asynccontextmanager
async def router(host: Host, config: MeshSettings, rng: random.Random) -> AsyncIterator[Router]:
    """D27; a mapping lasts for as long as the block."""
    hosts = own_hosts(host)
    port = host.dialer.port("0.0.0.0")
    if not config.upnp or config.announce:
        yield Router(skipped("D27", "turned off by --no-upnp or --announce."))
    elif port is None or any(public(one) for one in hosts) or all(one.startswith("127.") or ":" in one for one in hosts):
        yield Router(skipped("D27", "by its addresses, this machine is not behind a router of its own."))
    else:
        mapper = PortMapper(port, rng)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mapper.run)
            with trio.move_on_after(_ROUTER):
                await mapper.asked.wait()
            if mapper.mapping is not None:
                text = f"the router maps {mapper.mapping} to port {port}."
                yield Router(ok("D27", text), multiaddr_of(mapper.mapping))
            else:
                yield Router(warn("D27", f"{mapper.why.rstrip('.')}."), None, mapper.why)
            nursery.cancel_scope.cancel()


async def reachability(
    host: Host, helpers: Sequence[PeerId], announce: Sequence[str], asked: Router
) -> tuple[Finding, NatClass | None]:
    """D26, and the kind. Each of `helpers`, which are connected, is asked to dial us back at the address where it sees us."""
    dial_backs: list[DialBack] = []

    async def one(helper: PeerId) -> None:
        with suppress(RemoteError):  # helping is voluntary
            await host.identify(helper)
            if (found := await ask(host, helper, announce, asked.mapped)) is not None:
                dial_backs.append(found)

    async with trio.open_nursery() as nursery:
        for helper in helpers[:_HELPERS]:
            nursery.start_soon(one, helper)
    if not dial_backs and not announce:
        return skipped("D26", "no peer could be asked to dial back (AutoNAT)."), None
    near = [one.dialled for one in dial_backs if one.dialled]
    if near and not announce and not any(public(one.host) for one in dial_backs):
        return ok("D26", f"peers in this network reach it at {near[0]}; no peer outside of it was asked."), "public"
    evidence = Evidence(own_port(host), own_hosts(host), observed(host), dial_backs)
    concluded = classify(replace(evidence, announce=announce, mapped=asked.mapped, router=asked.why))
    return _judged(concluded.kind, concluded.why), concluded.kind


async def relay(host: Host, client: RelayClient, known: Sequence[PeerId], kind: NatClass | None) -> Finding:
    """D28: a reservation at the first of `known`, which are connected, that gives one."""
    if kind == "public":
        return skipped("D28", "not needed: this node is public.")
    causes = []
    for peer in known:
        try:
            seconds = await client.reserve(peer)
        except RemoteError as error:
            causes.append(error.cause)
        else:
            return ok("D28", f"{short(peer)} keeps a reservation for {seconds:.0f} s at a time.")
    return warn("D28", " ".join(causes) or "no peer could be asked.")


async def punch(host: Host, helpers: Sequence[Member], events: Sequence[Event], kind: NatClass | None) -> Finding:
    """D29: to the first of `helpers` that a relay connects us to; `events` are those of `host`'s hole puncher."""
    if kind == "public":
        return skipped("D29", "not needed: this node is public.")
    for helper in helpers:
        circuits = [address for address in helper.addresses if via(address)]
        if not circuits or helper.reach not in ("cone", "symmetric") or host.connected(helper.peer):
            continue
        began = trio.current_time()
        try:
            await host.connect(helper.peer, circuits)
        except RemoteError:
            continue
        with trio.move_on_after(_PUNCH):
            await host.straightened(helper.peer)
            return ok("D29", f"a direct connection to {short(helper.peer)} in {trio.current_time() - began:.1f} s.")
        why = [event.reason for event in events if isinstance(event, Punched) and event.reason]
        reason = why[-1] if why else "it did not try."
        return warn("D29", f"no direct connection to {short(helper.peer)} ({helper.reach}): {reason}")
    return skipped("D29", "no known member is behind a NAT and at a relay, to try with.")


def prepare(host: Host, events: list[Event]) -> RelayClient:
    """Let `host` dial through relays and answer hole punching; `events` gets the results."""
    client = RelayClient(host)
    client.serve()
    host.through = client.connect
    HolePuncher(host, events.append).serve()
    return client
