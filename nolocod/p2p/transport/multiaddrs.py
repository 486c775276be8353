"""How multiaddrs are read and written, and which of those that others tell may be dialled (libp2p specs, addressing)."""

from __future__ import annotations

import ipaddress
from itertools import zip_longest
from typing import TYPE_CHECKING

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from multiaddr.exceptions import ProtocolLookupError

from nolocod.errors import SignatureError, UsageError
from nolocod.identity import PeerId, public_key
from nolocod.p2p.limits.address_groups import PRIVATE, IpAddress, address_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nolocod.units import Address

MAX_ADDRESS = 256
"""Characters of one multiaddr, told by others, that we look at."""
_CIRCUIT = "/p2p-circuit"


def multiaddr_of(address: Address) -> str:
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


def host_of(text: str) -> str:
    """The IP address of a TCP multiaddr; empty where `endpoint` has none."""
    return (endpoint(text) or ("",))[0]


def tcp_parts(text: str) -> tuple[str, str, int]:
    """("ip4" | "ip6" | "dns" | "dns4" | "dns6", host, port) of a straight address; ValueError for anything else."""
    if (parts := _parts(text)) is None:
        raise ValueError(f"{text!r} is not a TCP multiaddr.")
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
    address = address_of(host)
    return address is not None and not (address.is_loopback or _never(address) or _private_network(address))


def near(host: str, ours: Iterable[str]) -> bool:
    """Whether `host`, as somebody told it, may be dialled by one who has the addresses `ours`.

    Public ones may; private ones in a network of ours; loopback if we have it among ours.
    """
    address, own = address_of(host), [one for text in ours if (one := address_of(text))]
    if address is not None and address.is_loopback:
        return any(one.is_loopback for one in own)
    if address is None or _never(address):
        return False
    network = _private_network(address)
    return network is None or any(one.version == network.version and one in network for one in own)


def _never(address: IpAddress) -> bool:
    return address.is_unspecified or address.is_multicast or address.is_link_local or address.is_reserved


def _private_network(address: IpAddress) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """The part of a private block that one site or one carrier is likely to have in one piece."""
    for block, prefix in PRIVATE:
        if address.version == block.version and address in block:
            return ipaddress.ip_network((int(address), prefix), strict=False)
    return None
