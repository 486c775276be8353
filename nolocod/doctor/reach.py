"""The checks of how others reach this node: dial-backs, the router's port, a relay's place, a punch.

The rule: where a node runs here, its own word counts, which it has had longer to find out; else helpers are asked
once. A mapping that the router gives, and a place at a relay, are given back when the doctor goes.
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

    from nolocod.doctor.network import Told
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
    "cone": "behind a NAT or firewall that can be punched",
    "symmetric": "behind a NAT that cannot be punched; relays carry",
    "client": "not reachable: this node only dials out",
}


@dataclass(frozen=True)
class Router:
    """What the router said to UPnP: the multiaddr that it maps to us, or why there is none (empty: not asked)."""

    finding: Finding
    mapped: str | None = None
    why: str = ""


# --- by the word of the node that runs here ---------------------------------------------------------


def told(report: ReachReport) -> list[Finding]:
    """D26 to D29 as the running node has found them out."""
    asks = "the node that runs here sees to it."
    if report.kind is None:
        seen = skipped("D26", f"the node that runs here does not know yet: {report.why or 'nobody was asked'}")
    else:
        seen = _judged(report.kind, report.why)
    found = [seen, skipped("D27", asks)]
    if report.relays:
        found.append(
            ok("D28", f"{len(report.relays)} relays keep a place: {', '.join(short(row.peer_id) for row in report.relays)}.")
        )
    elif report.kind in (None, "public"):
        found.append(skipped("D28", "the node that runs here holds no place at a relay, and has not missed one."))
    else:
        found.append(warn("D28", "the node that runs here holds no place at a relay."))
    if not report.punches:
        found.append(skipped("D29", "the node that runs here had nothing to punch."))
    else:
        text = f"{report.punched} of {report.punches} punches worked."
        found.append(ok("D29", text) if report.punched else warn("D29", text))
    return found


def _judged(kind: NatClass | None, why: str) -> Finding:
    if kind == "public":
        return ok("D26", f"public: {why}")
    if kind is None:
        return warn("D26", f"not sure: {why}")
    return warn("D26", f"{_KINDS[kind]}: {why}")


# --- by asking ----------------------------------------------------------------------------------------


@asynccontextmanager
async def router(host: Host, config: MeshSettings, rng: random.Random) -> AsyncIterator[Router]:
    """D27; a mapping lasts for as long as the block."""
    hosts = own_hosts(host)
    port = host.dialler.port("0.0.0.0")
    if not config.upnp or config.announce:
        yield Router(skipped("D27", "not wanted (--no-upnp, or --announce)."))
    elif port is None or any(public(one) for one in hosts) or all(one.startswith("127.") or ":" in one for one in hosts):
        yield Router(skipped("D27", "this machine is behind no router of its own, as far as its addresses tell."))
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
    host: Host, helpers: Sequence[PeerId], config: MeshSettings, asked: Router
) -> tuple[Finding, NatClass | None]:
    """D26: `helpers` are connected, and each is asked to dial us where it sees us."""
    dial_backs: list[DialBack] = []

    async def one(helper: PeerId) -> None:
        with suppress(RemoteError):  # nobody need help
            await host.identify(helper)
            if (found := await ask(host, helper, config.announce, asked.mapped)) is not None:
                dial_backs.append(found)

    async with trio.open_nursery() as nursery:
        for helper in helpers[:_HELPERS]:
            nursery.start_soon(one, helper)
    if not dial_backs and not config.announce:
        return skipped("D26", "nobody could be asked to dial back (AutoNAT)."), None
    near = [one.dialled for one in dial_backs if one.dialled]
    if near and not config.announce and not any(public(one.host) for one in dial_backs):
        return ok("D26", f"reached by peers in this network, at {near[0]}; nobody outside of it was asked."), "public"
    evidence = Evidence(own_port(host), own_hosts(host), observed(host), dial_backs)
    concluded = classify(replace(evidence, announce=config.announce, mapped=asked.mapped, router=asked.why))
    return _judged(concluded.kind, concluded.why), concluded.kind


async def relay(host: Host, client: RelayClient, known: Sequence[PeerId], kind: NatClass | None) -> Finding:
    """D28: at any of those that are `known` and connected."""
    if kind == "public":
        return skipped("D28", "not needed: peers connect to this node as it is.")
    causes = []
    for peer in known:
        try:
            seconds = await client.reserve(peer)
        except RemoteError as error:
            causes.append(error.cause)
        else:
            return ok("D28", f"{short(peer)} keeps a place for {seconds:.0f} s at a time.")
    return warn("D28", " ".join(causes) or "nobody could be asked.")


async def punch(host: Host, helpers: Sequence[Told], events: Sequence[Event], kind: NatClass | None) -> Finding:
    """D29: to the first of `helpers` that is met through a relay; `events` are what `host`'s puncher told."""
    if kind == "public":
        return skipped("D29", "not needed: peers connect to this node as it is.")
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
            return ok("D29", f"a straight connection to {short(helper.peer)} in {trio.current_time() - began:.1f} s.")
        why = [event.reason for event in events if isinstance(event, Punched) and event.reason]
        return warn(
            "D29", f"no straight connection to {short(helper.peer)} ({helper.reach}): {why[-1] if why else 'no punch came.'}"
        )
    return skipped("D29", "no member is known that is behind a NAT and at a relay, to try with.")


def prepare(host: Host, events: list[Event]) -> RelayClient:
    """Let `host` dial through relays and answer punches, of which it tells `events`."""
    client = RelayClient(host)
    client.serve()
    host.through = client.connect
    HolePuncher(host, events.append).serve()
    return client
