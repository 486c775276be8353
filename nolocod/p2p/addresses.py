"""Which addresses a node tells others, and how multiaddrs are read.

The rule: only what can be dialled is announced. A wildcard is replaced by the interfaces' own addresses,
loopback is told only by a node that listens on nothing else, and bridges of container engines come last.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

import psutil
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from multiaddr.exceptions import ProtocolLookupError

from nolocod.config import Address
from nolocod.errors import PortTakenError, SignatureError, UsageError
from nolocod.identity import PeerId, public_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BRIDGES = ("docker", "br-", "veth", "virbr", "cni", "podman", "lxc", "flannel", "cali")
MAX_ADDRESS = 256
"""Characters of one multiaddr, told by others, that we look at."""


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
    """Whether `text` is a TCP multiaddr to a host that a node may be told to dial."""
    if len(text) > MAX_ADDRESS:
        return False
    try:
        parsed = Multiaddr(text)
        names = [protocol.name for protocol in parsed.protocols()]
        if len(names) not in (2, 3) or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or names[1] != "tcp":
            return False
        host, port = parsed.value_for_protocol(names[0]), parsed.value_for_protocol("tcp")
    except (MultiaddrError, ProtocolLookupError, ValueError):
        return False
    if len(names) == 3 and names[2] != "p2p":
        return False
    wildcard = names[0].startswith("ip") and (
        ipaddress.ip_address(host).is_unspecified or ipaddress.ip_address(host).is_multicast
    )
    return not wildcard and 0 < int(port) < 65_536


def claim(listen: Address) -> None:
    """Find out whether `listen` can be bound.

    libp2p binds with SO_REUSEPORT, which lets two daemons share a port without a word; a bind without it
    tells. Raises PortTakenError, or UsageError for an address that this machine does not have.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(listen.host).version == 6 else socket.AF_INET
    except ValueError as error:
        raise UsageError(f"--listen {listen}: {listen.host!r} is not an IP address.") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(f"{listen} is in use.") from error
            raise UsageError(f"--listen {listen} cannot be bound ({error.strerror}).") from error


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
                loopback.append((2, str(host)))
            else:
                ranked.append((1 if name.startswith(_BRIDGES) else 0, str(host)))
    return ranked or loopback
