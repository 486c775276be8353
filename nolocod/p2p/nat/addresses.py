"""Which addresses a node tells others, and how multiaddrs are read.

The rule: only what can be dialled is announced. A wildcard is replaced by the interfaces' own addresses,
loopback is told only by a node that listens on nothing else, and bridges of container engines come last.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from itertools import zip_longest
from typing import TYPE_CHECKING

import psutil
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from multiaddr.exceptions import ProtocolLookupError

from nolocod.errors import PortTakenError, SignatureError, UsageError
from nolocod.identity import PeerId, public_key
from nolocod.node.config import Address

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BRIDGES = ("docker", "br-", "veth", "virbr", "cni", "podman", "lxc", "flannel", "cali")
MAX_ADDRESS = 256
"""Characters of one multiaddr, told by others, that we look at."""
_CIRCUIT = "/p2p-circuit"
_LOOPBACK = 2
"""The rank of loopback among the interfaces."""
_TRIES = 16
_PRIVATE = (
    (ipaddress.ip_network("10.0.0.0/8"), 16),
    (ipaddress.ip_network("172.16.0.0/12"), 16),
    (ipaddress.ip_network("192.168.0.0/16"), 24),
    (ipaddress.ip_network("100.64.0.0/10"), 10),
    (ipaddress.ip_network("fc00::/7"), 48),
)
"""Private blocks, and how many bits those share that are taken for neighbours (RFC 1918, 4193, 6598)."""


def transport(address: Address) -> str:
    """The multiaddr of a TCP address, without a peer id."""
    return f"/ip{6 if ':' in address.host else 4}/{address.host}/tcp/{address.port}"


def with_peer(address: str, peer: PeerId) -> str:
    """`address` with /p2p/PEER at its end."""
    return address if address.endswith(f"/p2p/{peer}") else f"{address}/p2p/{peer}"


def split(text: str, flag: str = "--bootstrap") -> tuple[PeerId, str]:
    """Read "/ip4/…/tcp/…/p2p/PEER" into (PEER, transport address); UsageError names `flag`."""
    head, mark, tail = text.rpartition("/p2p/")
    if not mark or not dialable(head):
        raise UsageError(f"{flag} {text!r} is not a TCP multiaddr that ends in /p2p/PEER.")
    try:
        public_key(tail)
    except SignatureError as error:
        raise UsageError(f"{flag} {text!r}: {error.cause}") from error
    return PeerId(tail), head


def dialable(text: str) -> bool:
    """Whether `text` is an address that a node may be told to dial: a TCP multiaddr, or a circuit through one."""
    return straight(text) or via(text) is not None


def straight(text: str) -> bool:
    """Whether `text` is a TCP multiaddr, with or without /p2p/PEER, to a host that a node may be told to dial."""
    return _parts(text) is not None


def via(text: str) -> tuple[PeerId, str] | None:
    """Read "/…/tcp/…/p2p/RELAY/p2p-circuit", /p2p/PEER behind it or not, into (RELAY, its address); None if it is none."""
    head, mark, tail = text.partition(_CIRCUIT)
    address, named, relay = head.rpartition("/p2p/")
    if not mark or not named or len(text) > MAX_ADDRESS or not straight(address) or "/p2p/" in address:
        return None
    peers = [relay, *([tail.removeprefix("/p2p/")] if tail else [])]
    try:
        for peer in peers:
            public_key(peer)
    except SignatureError:
        return None
    return PeerId(relay), address


def through(relay: PeerId, address: str) -> str:
    """The address of whoever holds a reservation at `relay`, which is reached at `address`."""
    return f"{with_peer(address, relay)}{_CIRCUIT}"


def endpoint(text: str) -> tuple[str, int] | None:
    """The IP address and port of a TCP multiaddr; None for names, and for what is no straight address."""
    parts = _parts(text)
    if parts is None or not parts[0].startswith("ip"):
        return None
    return str(ipaddress.ip_address(parts[1])), parts[2]


def tcp_parts(text: str) -> tuple[str, str, int]:
    """("ip4" | "ip6" | "dns" | "dns4" | "dns6", host, port) of a straight address; ValueError for anything else."""
    parts = _parts(text)
    if parts is None:
        raise ValueError(f"{text!r} is no TCP multiaddr.")
    return parts


def _parts(text: str) -> tuple[str, str, int] | None:
    if len(text) > MAX_ADDRESS:
        return None
    names = text.strip("/").split("/")[::2]
    # multiaddr 0.2 is not asked about others: it raises what comes for those that it does not know well (/ip6zone)
    if names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or names[1:] not in (["tcp"], ["tcp", "p2p"]):
        return None
    try:
        parsed = Multiaddr(text)
        host, port = str(parsed.value_for_protocol(names[0])), int(parsed.value_for_protocol("tcp"))
    except (MultiaddrError, ProtocolLookupError, ValueError):
        return None
    if names[0].startswith("ip") and (ipaddress.ip_address(host).is_unspecified or ipaddress.ip_address(host).is_multicast):
        return None
    return (names[0], host, port) if 0 < port < 65_536 else None


def interleave(addresses: Iterable[str]) -> list[str]:
    """The same addresses, IPv6 and others taking turns while there are both (RFC 8305, section 4)."""
    distinct = list(dict.fromkeys(addresses))
    six = [address for address in distinct if address.startswith("/ip6/")]
    rest = [address for address in distinct if not address.startswith("/ip6/")]
    first, second = (six, rest) if distinct[:1] == six[:1] else (rest, six)
    return [address for pair in zip_longest(first, second) for address in pair if address is not None]


def public(host: str) -> bool:
    """Whether an IP address may be reached from anywhere: neither loopback nor link-local nor any private block's."""
    address = ipaddress.ip_address(host)
    return not (address.is_loopback or _never(address) or _private_network(address))


def near(host: str, ours: Iterable[str]) -> bool:
    """Whether `host`, as a stranger told it, may be dialled by one who has the addresses `ours`.

    Public ones may; private ones in a network of ours; loopback if we have it among ours.
    """
    address = ipaddress.ip_address(host)
    own = [ipaddress.ip_address(text) for text in ours]
    if _never(address):
        return False
    if address.is_loopback:
        return any(one.is_loopback for one in own)
    network = _private_network(address)
    return network is None or any(one.version == network.version and one in network for one in own)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _never(address: _Address) -> bool:
    return address.is_unspecified or address.is_multicast or address.is_link_local


def _private_network(address: _Address) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The part of a private block that one site or one carrier is likely to have in one piece."""
    for block, prefix in _PRIVATE:
        if address.version == block.version and address in block:
            return ipaddress.ip_network((int(address), prefix), strict=False)
    return None


def claim(listen: Sequence[Address]) -> tuple[Address, ...]:
    """Find out whether `listen` can be bound, and give every address a port, the same one where there is a choice.

    libp2p binds with SO_REUSEPORT, which lets two daemons share a port without a word; a bind without it
    tells. A wildcard of a family that this machine lacks is left out, unless nothing else is left. Raises
    PortTakenError, or UsageError for an address that this machine does not have.
    """
    for _ in range(_TRIES):
        found = _claim_once(listen)
        if found is not None:
            return found
    raise PortTakenError(f"no port is free for {' and '.join(map(str, listen))} together.")


def _claim_once(listen: Sequence[Address]) -> tuple[Address, ...] | None:
    """None if the port that chance gave the first is another's in the next family."""
    found: list[Address] = []
    missing: UsageError | None = None
    for address in listen:
        chosen = found[0].port if found and not address.port else address.port
        try:
            found.append(Address(address.host, _bind(Address(address.host, chosen))))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                if chosen != address.port:
                    return None
                raise PortTakenError(f"{address} is in use.") from error
            missing = UsageError(f"--listen {address} cannot be bound ({error.strerror}).")
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) or address.host not in ("0.0.0.0", "::"):
                raise missing from error
    if not found:
        raise missing or UsageError("--listen has no address.")
    return tuple(found)


def _bind(address: Address) -> int:
    """Bind for a moment; the port that it was. OSError, or UsageError for what is no IP address."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address.host).version == 6 else socket.AF_INET
    except ValueError as error:
        raise UsageError(f"--listen {address}: {address.host!r} is not an IP address.") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address.host, address.port))
        return int(probe.getsockname()[1])


def announced(bound: Iterable[Address], override: Sequence[str]) -> tuple[str, ...]:
    """The transport multiaddrs to tell others, best first.

    `bound` are the sockets' own addresses, `override` is what the user wants told instead.
    """
    if override:
        return tuple(override)
    found: list[tuple[int, str]] = []
    for address in bound:
        if not ipaddress.ip_address(address.host).is_unspecified:
            found.append((0, transport(address)))
            continue
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        found += [(rank, transport(Address(host, address.port))) for rank, host in _interfaces(family)]
    if any(rank < _LOOPBACK for rank, _ in found):
        found = [pair for pair in found if pair[0] < _LOOPBACK]
    ranked = [text for _, text in sorted(found, key=lambda pair: pair[0])]
    return tuple(dict.fromkeys(ranked))


def _interfaces(family: socket.AddressFamily) -> list[tuple[int, str]]:
    """(rank, host) of the interfaces that are up; loopback only where there is nothing else."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    ranked, loopback = [], []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name not in up or entry.family != family:
                continue
            host = ipaddress.ip_address(entry.address.partition("%")[0])
            if host.is_link_local:
                continue  # cannot be dialled without a zone
            if host.is_loopback:
                loopback.append((_LOOPBACK, str(host)))
            else:
                ranked.append((1 if name.startswith(_BRIDGES) else 0, str(host)))
    return ranked or loopback


def is_bridge(host: str) -> bool:
    """Whether the IP address `host` of this machine belongs to a bridge of a container engine."""
    entries = psutil.net_if_addrs().items()
    return any(name.startswith(_BRIDGES) and host in {entry.address for entry in found} for name, found in entries)
