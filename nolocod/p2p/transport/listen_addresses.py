"""Which of its own addresses a node tells others.

The rule: only what can be dialled is announced. A wildcard is replaced by the interfaces' own addresses,
loopback is told only by a node that listens on nothing else, and bridges of container engines come last.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import psutil

from nolocod.errors import PortTakenError, UsageError
from nolocod.p2p.transport.multiaddrs import multiaddr_of
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_BRIDGES = ("docker", "br-", "veth", "virbr", "cni", "podman", "lxc", "flannel", "cali")
_LOOPBACK = 2  # its rank among the interfaces
_TRIES = 16


@contextmanager
def claim(listen: Sequence[Address]) -> Iterator[tuple[Address, ...]]:
    """Find out whether `listen` can be bound, and give every address a port, the same one where there is a choice.

    libp2p binds with SO_REUSEPORT, which lets two daemons share a port without a word; a bind without it tells. Within the
    block the ports are held: the system gives them to nobody else who asks for any port, and libp2p may bind them. A wildcard
    of a family that this machine lacks is left out, unless nothing else is left.
    Raises PortTakenError, or UsageError for an address that this machine does not have.
    """
    for _ in range(_TRIES):
        with ExitStack() as holders:
            if found := _claim_once(listen, holders):
                yield found
                return
    raise PortTakenError(f"no port is free for {' and '.join(map(str, listen))} together.")


def _claim_once(listen: Sequence[Address], holders: ExitStack) -> tuple[Address, ...] | None:
    """None if the port that chance gave the first is another's in the next family."""
    found: list[Address] = []
    missing: UsageError | None = None
    for address in listen:
        chosen = found[0].port if found and not address.port else address.port
        try:
            found.append(Address(address.host, _bind(Address(address.host, chosen), holders)))
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


def _bind(address: Address, holders: ExitStack) -> int:
    """The port that was bound, until `holders` close. OSError, or UsageError for what is no IP address."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address.host).version == 6 else socket.AF_INET
    except ValueError as error:
        raise UsageError(f"--listen {address}: {address.host!r} is not an IP address.") from error
    holder = holders.enter_context(socket.socket(family, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
    if family == socket.AF_INET6:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    holder.bind((address.host, address.port))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # from now on libp2p may bind it too
    return int(holder.getsockname()[1])


def announced(bound: Iterable[Address]) -> tuple[str, ...]:
    """The transport multiaddrs to tell others, best first, of a node whose sockets are `bound`."""
    found: list[tuple[int, str]] = []
    for address in bound:
        if not ipaddress.ip_address(address.host).is_unspecified:
            found.append((0, multiaddr_of(address)))
            continue
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        found += [(rank, multiaddr_of(Address(host, address.port))) for rank, host in _interfaces(family)]
    if any(rank < _LOOPBACK for rank, _ in found):
        found = [pair for pair in found if pair[0] < _LOOPBACK]
    return tuple(dict.fromkeys(text for _, text in sorted(found, key=lambda pair: pair[0])))


def _interfaces(family: socket.AddressFamily) -> Iterator[tuple[int, str]]:
    """(rank, host) of the interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name in up and entry.family == family:
                host = ipaddress.ip_address(entry.address.partition("%")[0])
                if not host.is_link_local:  # which cannot be dialled without a zone
                    yield _LOOPBACK if host.is_loopback else int(name.startswith(_BRIDGES)), str(host)


def is_bridge(host: str) -> bool:
    """Whether the IP address `host` of this machine belongs to a bridge of a container engine."""
    entries = psutil.net_if_addrs().items()
    return any(name.startswith(_BRIDGES) and host in {entry.address for entry in found} for name, found in entries)
