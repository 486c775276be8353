"""Which addresses count as one: what is limited for a peer is limited for these together, since identities are free.

The rule: what one customer has is an IPv4 address, or a /48 of IPv6 (RFC 6177); a larger attacker, or one who rents by the
hour, has several of one /24. Limits for a customer leave room for a household behind one NAT, those for a group for a
university. Loopback and private networks are no groups: whoever is in ours is let in by its owner, and the nodes of a test
swarm all come from one of them, as may all peers where a proxy stands before us.
"""

from __future__ import annotations

import ipaddress

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

PRIVATE = (
    (ipaddress.ip_network("10.0.0.0/8"), 16),
    (ipaddress.ip_network("172.16.0.0/12"), 16),
    (ipaddress.ip_network("192.168.0.0/16"), 24),
    (ipaddress.ip_network("100.64.0.0/10"), 10),
    (ipaddress.ip_network("fc00::/7"), 48),
)
"""Private blocks, and how many bits those share that are taken for neighbours (RFC 1918, 4193, 6598)."""
_GROUP = {4: 24, 6: 48}
"""Bits that the addresses of one group share."""


def address_of(host: str) -> IpAddress | None:
    """The address that `host` stands for, an IPv4 address inside IPv6 unwrapped; None for what is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def customer(host: str) -> str:
    """What stands for all addresses that one customer has."""
    address = address_of(host)
    if address is None:
        return host
    return str(address) if address.version == 4 else _network(address)


def address_group(host: str) -> str | None:
    """ "203.0.113.0/24" or "2001:db8:1::/48"; None for loopback, link-local and private addresses, and what is no address."""
    address = address_of(host)
    if address is None or address.is_loopback or address.is_link_local:
        return None
    if any(address.version == block.version and address in block for block, _ in PRIVATE):
        return None
    return _network(address)


def counted_with(peer: str, host: str) -> str:
    """The group that `peer` counts with: that of the IP address `host` which it comes from; its own id where this has none;
    one for all that only relays reach (""), since they may come from anywhere."""
    return (address_group(host) or peer) if host else "relayed"


def source(host: str) -> str:
    """The group of `host`, or the address alone where it has none."""
    return address_group(host) or customer(host)


def _network(address: IpAddress) -> str:
    return str(ipaddress.ip_network((int(address), _GROUP[address.version]), strict=False))
