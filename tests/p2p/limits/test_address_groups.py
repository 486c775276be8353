"""Which addresses are one customer's, and which are one group."""

from __future__ import annotations

import pytest

from nolocod.p2p.limits.address_groups import address_group, customer


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2::1", "2001:db8:1::/48"),
        ("2001:db8:1:ffff:ffff::9", "2001:db8:1::/48"),
        ("2001:db8:2::1", "2001:db8:2::/48"),
        ("", ""),
        ("not an address", "not an address"),
    ],
)
def test_one_customer_is_an_ipv4_address_or_a_48_of_ipv6(host: str, name: str) -> None:
    assert customer(host) == name


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("192.0.2.1", "192.0.2.0/24"),
        ("::ffff:192.0.2.255", "192.0.2.0/24"),
        ("192.0.3.1", "192.0.3.0/24"),
        ("2001:db8:1:2::1", "2001:db8:1::/48"),
        ("2001:db8:1:ffff:ffff::9", "2001:db8:1::/48"),
        *((host, None) for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "169.254.1.1", "fe80::1")),
        *((host, None) for host in ("10.1.2.3", "172.20.0.1", "192.168.9.9", "100.64.0.1", "fd00::1", "", "no address")),
    ],
)
def test_a_group_is_a_24_or_a_48_and_no_group_is_private(host: str, group: str | None) -> None:
    assert address_group(host) == group
