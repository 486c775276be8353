"""What kind of NAT we are behind, from what others saw: a pure function, with its reasons in words.

The rule: we are public if half of those who tried to dial us got through. To tell a NAT that can be punched from one
that cannot takes two observers on different addresses: several peers on one address count as one, and no single one
puts us at another host than the rest do. Observers in a private network of ours count only while nobody sees us from
further away. Terms: RFC 5780 (endpoint-independent mapping is "cone" here).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from nolocod.p2p.transport.multiaddrs import endpoint, host_of, public

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import NatClass
    from nolocod.proto.types import Member

_ENOUGH = 2
"""Observers, on different addresses, that it takes to tell one NAT from another."""
_AGREE = 2 / 3
"""Of the observers, that see us at one address: some of their connections may be older than the NAT's last restart."""

RelayUse = Literal["off", "only", "missing", "open"]
"""Forbidden by the owner; nothing else wanted; none found for long; there is one, or it is still looked for."""


@dataclass(frozen=True)
class Observed:
    """`observer`, an IP address, sees our connection come from `host` and `port`."""

    observer: str
    host: str
    port: int
    from_listen_port: bool = True
    """The connection's own port here is the one that we listen on."""


@dataclass(frozen=True)
class DialBack:
    """`observer`, who sees us at `host`, dialled us back: at the multiaddr `dialled`, or in vain (None)."""

    observer: str
    host: str
    dialled: str | None


@dataclass(frozen=True)
class Evidence:
    """All that is known. `own` are our interfaces' IP addresses, `port` is what we listen on."""

    port: int
    own: frozenset[str]
    observed: Sequence[Observed] = ()
    dial_backs: Sequence[DialBack] = ()
    asked: bool = True
    """Helpers had the time to dial us; before that nothing follows from their silence."""
    announce: Sequence[str] = ()
    """What the owner says that we are reached at."""
    mapped: str | None = None
    """The multiaddr that a router says it maps to us."""
    router: str = ""
    """Why there is none, in words; empty if none is asked."""
    relays: RelayUse = "open"

    def seen_at(self, wanted: Callable[[str], bool]) -> Evidence:
        """Only what those tell who see us at a `wanted` IP address."""
        observed = [one for one in self.observed if wanted(one.host)]
        return replace(self, observed=observed, dial_backs=[one for one in self.dial_backs if wanted(one.host)])

    @property
    def empty(self) -> bool:
        """Whether nobody tells anything."""
        return not (self.observed or self.dial_backs)


@dataclass(frozen=True)
class Conclusion:
    """`external` are the multiaddrs at which others got through, the surest first."""

    kind: NatClass | None
    why: str
    external: tuple[str, ...] = ()


def classify(evidence: Evidence) -> Conclusion:
    """How others reach us, as far as that can be told."""
    if evidence.relays == "only":
        return Conclusion("symmetric", "--relay-only lets nobody connect straight.")
    outside = evidence.seen_at(lambda host: not inside(host, evidence.own))
    if not outside.empty:
        evidence = outside
    if evidence.announce:
        return _announced(evidence)
    over_four = evidence.seen_at(lambda host: ":" not in host)
    four, six = _of_family(over_four), _of_family(evidence.seen_at(lambda host: ":" in host))
    found = six if four.kind is None and (six.kind is not None or over_four.empty) else four
    external = tuple(dict.fromkeys((*four.external, *six.external)))
    why = found.why
    if found.kind != "public" and six.kind == "public":
        why = f"{why} Over IPv6 {six.why}"
    if found.kind in ("cone", "symmetric") and evidence.relays in ("off", "missing"):
        how = "--no-relay forbids the relays that others would need" if evidence.relays == "off" else "no relay takes us"
        return Conclusion("client", f"{how}, and {why}", external)
    return Conclusion(found.kind, why, external)


def _announced(evidence: Evidence) -> Conclusion:
    told, tried = f"--announce names {', '.join(evidence.announce)}", evidence.dial_backs
    if tried and not any(one.dialled for one in tried):
        return Conclusion("public", f"{told}; but {_peers(len(tried))} could not dial it: check that it leads here.")
    return Conclusion("public", f"{told}.")


def _of_family(evidence: Evidence) -> Conclusion:
    """The same for IPv4 or IPv6 alone."""
    tried = {one.observer: one.dialled for one in evidence.dial_backs}
    through = [dialled for dialled in tried.values() if dialled is not None]
    if not through or 2 * len(through) < len(tried):
        return _behind_nat(evidence, len(tried))
    (best, _), *others = Counter(through).most_common()
    hosts = {host_of(best), *evidence.own}
    who = _peers(len(tried)) if len(through) == len(tried) else f"{len(through)} of {_peers(len(tried))}"
    by = ", the port that the router gave us by UPnP" if best == evidence.mapped else ""
    believed = [one for one, times in others if times > 1 or host_of(one) in hosts]
    return Conclusion("public", f"{who} dialled us at {best}{by}.", (best, *believed))


def _behind_nat(evidence: Evidence, failed: int) -> Conclusion:
    """What kind of NAT or firewall it is, when of `failed` observers that tried most or all did not get through."""
    observed, remedy = evidence.observed, _remedy(evidence)
    hidden = any(one.host not in evidence.own for one in observed)
    latest = {one.observer: (one.host, one.port) for one in observed if one.from_listen_port}
    if not failed and not (hidden and evidence.asked):
        see = "nobody sees us" if not observed else "1 peer sees us" if len(observed) == 1 else f"{len(observed)} peers see us"
        return Conclusion(None, f"{see} so far, and nobody has tried to dial us.")
    tried = f"{_peers(failed)} could not dial us" if failed else ""
    if len(latest) < _ENOUGH:
        state = tried or "we are behind a NAT"
        return Conclusion(None, f"{state}, and it takes {_ENOUGH} on different addresses to tell the NAT's kind. {remedy}")
    tried = tried and f"{tried}, and "
    (host, port), most = Counter(latest.values()).most_common(1)[0]
    if most >= _AGREE * len(latest) and most >= _ENOUGH:
        what = "a NAT that can be punched" if hidden else "a firewall that can be punched"
        return Conclusion("cone", f"{tried}{most} see us at {host} port {port}: {what}. {remedy}")
    ports = ", ".join(str(port) for port in sorted({port for _, port in latest.values()})[:3])
    return Conclusion("symmetric", f"{tried}each sees another port ({ports}): the NAT cannot be punched. {remedy}")


def inside(host: str, own: Iterable[str]) -> bool:
    """Whether who sees us at `host` sees us in a private network of our own."""
    return host in own and not public(host)


def _remedy(evidence: Evidence) -> str:
    if evidence.mapped is not None:
        host, port = endpoint(evidence.mapped) or ("", 0)
        return f"The router gave us {host} port {port} by UPnP, but nobody got through there: is there a second NAT before it?"
    if why := evidence.router:
        router = f"{why[0].upper()}{why[1:]}; allow UPnP in yours"
        return f"{router}, or forward TCP port {evidence.port} to this machine, to be reached directly."
    # from a container's network the router cannot be asked, so there the flag is right
    how = "leave out --no-upnp if this is no container, to be reached directly."
    return f"Forward TCP port {evidence.port} to this machine, or {how}"


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


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
