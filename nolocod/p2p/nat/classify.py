"""What kind of NAT we are behind, from what others saw: a pure function, with its reasons in words.

The rule: we are public if half of those who tried to dial us got through; and to tell a NAT that can be punched
from one that cannot takes two who see us from different addresses. Several peers on one address have one word, and one
word alone puts us at no other host than the others do. Those who see us in a private network of ours count only while
nobody sees us from further away. Terms: RFC 5780 (endpoint-independent mapping is "cone" here).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nolocod.p2p.transport.multiaddrs import endpoint, public

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import NatClass
    from nolocod.proto.types import Member

_ENOUGH = 2
"""Observers, on different addresses, that it takes to tell one NAT from another."""
_AGREE = 2 / 3
"""Of the observers, that see us at one address: some of their connections may be older than the NAT's last restart."""

RelayUse = Literal["off", "only", "sought", "missing", "held"]
"""Not wanted by the owner; nothing else wanted; none found yet; none found for long; there is one."""


@dataclass(frozen=True)
class Sighting:
    """`observer`, an IP address, sees our connection come from `host` and `port`."""

    observer: str
    host: str
    port: int
    from_listen_port: bool = True
    """The connection's own port here is the one that we listen on."""


@dataclass(frozen=True)
class Verdict:
    """`observer`, who sees us at `host`, dialled us back: at the multiaddr `dialled`, or in vain."""

    observer: str
    host: str
    dialled: str | None


@dataclass(frozen=True)
class Seen:
    """All that is known. `own` are our interfaces' IP addresses, `port` is what we listen on."""

    port: int
    own: frozenset[str]
    sightings: Sequence[Sighting] = ()
    verdicts: Sequence[Verdict] = ()
    asked: bool = True
    """Helpers had the time to dial us; before that nothing follows from their silence."""
    announce: Sequence[str] = ()
    """What the owner says that we are reached at."""
    mapped: str | None = None
    """The multiaddr that a router maps to us, by its own word."""
    router: str = ""
    """Why there is none, in words; empty if none is asked."""
    relays: RelayUse = "sought"


@dataclass(frozen=True)
class Finding:
    """`external` are the multiaddrs at which others got through, the surest first."""

    kind: NatClass | None
    why: str
    external: tuple[str, ...] = ()


def find(seen: Seen) -> Finding:
    """How others reach us, as far as that can be told."""
    if seen.relays == "only":
        return Finding("symmetric", "--relay-only lets nobody connect straight.")
    if seen.announce:
        return _announced(seen)
    four, six = (_of_family(seen, version) for version in (4, 6))
    found = six if four.kind is None and (six.kind is not None or not _counted(seen, 4)) else four
    external = tuple(dict.fromkeys((*four.external, *six.external)))
    why = found.why
    if found.kind != "public" and six.kind == "public":
        why = f"{why} Over IPv6 {six.why}"
    if found.kind in ("cone", "symmetric") and seen.relays in ("off", "missing"):
        how = "--no-relay forbids the relays that others would need" if seen.relays == "off" else "no relay takes us"
        return Finding("client", f"{how}, and {why}", external)
    return Finding(found.kind, why, external)


def _announced(seen: Seen) -> Finding:
    _, verdicts = outside(seen)
    told = f"--announce names {', '.join(seen.announce)}"
    failed = [one for one in verdicts if one.dialled is None]
    if failed and len(failed) == len(verdicts):
        return Finding("public", f"{told}; but {_of(len(failed), len(verdicts))} could not dial it: check that it leads here.")
    return Finding("public", f"{told}.")


def _counted(seen: Seen, version: int) -> bool:
    hosts = [*(one.host for one in seen.sightings), *(one.host for one in seen.verdicts)]
    return any(_version(host) == version for host in hosts)


def _of_family(seen: Seen, version: int) -> Finding:
    """The same for IPv4 or IPv6 alone."""
    sightings, verdicts = outside(seen)
    sightings = [one for one in sightings if _version(one.host) == version]
    verdicts = list({one.observer: one for one in verdicts if _version(one.host) == version}.values())
    through = [one.dialled for one in verdicts if one.dialled is not None]
    if through and 2 * len(through) >= len(verdicts):
        (best, _), *others = Counter(through).most_common()
        hosts = {_host(best), *seen.own}
        by = ", the port that the router gave us by UPnP" if best == seen.mapped else ""
        why = f"{_of(len(through), len(verdicts))} dialled us at {best}{by}."
        return Finding("public", why, (best, *(one for one, times in others if times > 1 or _host(one) in hosts)))
    return _behind(seen, sightings, verdicts)


def _behind(seen: Seen, sightings: Sequence[Sighting], verdicts: Sequence[Verdict]) -> Finding:
    """Nobody gets through, as far as we know: what kind of NAT or firewall it is."""
    hidden = any(one.host not in seen.own for one in sightings)
    tried = f"{_of(len(verdicts), len(verdicts))} could not dial us" if verdicts else ""
    # one word for each observer's address: several peers behind one NAT are one
    latest = {one.observer: (one.host, one.port) for one in sightings if one.from_listen_port}
    if not verdicts and not (hidden and seen.asked):
        return Finding(None, f"{_people(len(sightings))} so far, and nobody has tried to dial us.")
    if len(latest) < _ENOUGH:
        state = tried or "we are behind a NAT"
        return Finding(None, f"{state}, and it takes {_ENOUGH} on different addresses to tell the NAT's kind. {_remedy(seen)}")
    (host, port), most = Counter(latest.values()).most_common(1)[0]
    if most >= _AGREE * len(latest) and most >= _ENOUGH:
        what = "a NAT that can be punched" if hidden else "a firewall that can be punched"
        return Finding("cone", _sentence(tried, f"{most} see us at {host} port {port}: {what}", _remedy(seen)))
    ports = ", ".join(str(port) for port in sorted({port for _, port in latest.values()})[:3])
    what = f"each sees another port ({ports}): the NAT cannot be punched"
    return Finding("symmetric", _sentence(tried, what, _remedy(seen)))


def outside(seen: Seen) -> tuple[list[Sighting], list[Verdict]]:
    """What counts: without those who see us from inside our own network, if there is anybody else."""
    sightings = [one for one in seen.sightings if not inside(one.host, seen.own)]
    verdicts = [one for one in seen.verdicts if not inside(one.host, seen.own)]
    return (sightings, verdicts) if sightings or verdicts else (list(seen.sightings), list(seen.verdicts))


def inside(host: str, own: Iterable[str]) -> bool:
    """Whether who sees us at `host` sees us in a private network of our own."""
    return host in own and not public(host)


def _remedy(seen: Seen) -> str:
    if seen.mapped is not None:
        return f"The router gave us {_at(seen.mapped)} by UPnP, but nobody got through there: is there a second NAT before it?"
    forward = f"forward TCP port {seen.port} to this machine"
    if seen.router:
        return f"{seen.router[0].upper()}{seen.router[1:]}; allow UPnP in yours, or {forward}, to be reached directly."
    # from a container's network the router cannot be asked, so there the flag is right
    return f"F{forward[1:]}, or leave out --no-upnp if this is no container, to be reached directly."


def _at(address: str) -> str:
    found = endpoint(address)
    return f"{found[0]} port {found[1]}" if found else address


def _sentence(tried: str, what: str, remedy: str) -> str:
    return f"{tried}, and {what}. {remedy}" if tried else f"{what}. {remedy}"


def _of(count: int, total: int) -> str:
    people = "1 peer" if total == 1 else f"{total} peers"
    return people if count == total else f"{count} of {people}"


def _people(count: int) -> str:
    return "nobody sees us" if not count else "1 peer sees us" if count == 1 else f"{count} peers see us"


def _host(address: str) -> str:
    return (endpoint(address) or ("",))[0]


def _version(host: str) -> int:
    return ipaddress.ip_address(host).version


def needs_relay(member: Member, own: NatClass | None, unpunched: Collection[PeerId]) -> bool:
    """Whether only a relay reaches `member` from a node of class `own`; False where that is not known.

    The connection that there is decides, then the two classes: a punch needs two NATs that keep a port's mapping
    (RFC 4787, 4.1), one end that is public needs none. `unpunched` are members with which punching failed.
    """
    if member.reach in ("direct", "inbound", "punched"):
        return False
    if "public" in (own, member.nat):
        return False
    if member.peer_id in unpunched or "client" in (own, member.nat):
        return True
    if None in (own, member.nat):
        return member.reach == "relayed"
    return "symmetric" in (own, member.nat)
