"""What kind of NAT follows from what others saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nolocod.p2p.nat.classify import Finding, Seen, Sighting, Verdict, find

HOME = "192.168.1.17"
WAN = "198.51.100.7"
WAN_AT = f"/ip4/{WAN}/tcp/4001"
SIX = "2001:db8:1::17"
SIX_AT = f"/ip6/{SIX}/tcp/4001"
FAR = ("203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4")
BEHIND = Seen(port=4001, own=frozenset({HOME}), relays="held", router="no router answers UPnP here")


def sightings(*ports: int, host: str = WAN) -> tuple[Sighting, ...]:
    """Observers on different addresses, each of whom sees one of `ports`."""
    return tuple(Sighting(observer, host, port) for observer, port in zip(FAR, ports, strict=False))


def verdicts(*dialled: str | None, host: str = WAN) -> tuple[Verdict, ...]:
    return tuple(Verdict(observer, host, address) for observer, address in zip(FAR, dialled, strict=False))


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        pytest.param(BEHIND, None, id="nobody yet"),
        pytest.param(replace(BEHIND, sightings=sightings(4001)), None, id="one sees us"),
        pytest.param(replace(BEHIND, sightings=sightings(4001), verdicts=verdicts(None)), None, id="one sees us, in vain"),
        pytest.param(replace(BEHIND, sightings=sightings(4001, 4001), asked=False), None, id="two see us, none was asked"),
        pytest.param(replace(BEHIND, sightings=sightings(4001, 4001)), "cone", id="none of two would dial"),
        pytest.param(replace(BEHIND, sightings=sightings(5123, 5123), verdicts=verdicts(None, None)), "cone", id="one port"),
        pytest.param(replace(BEHIND, sightings=sightings(5123, 5124), verdicts=verdicts(None, None)), "symmetric", id="two"),
        pytest.param(
            replace(BEHIND, sightings=sightings(7, 5123, 5123), verdicts=verdicts(None)), "cone", id="one is from long ago"
        ),
        pytest.param(
            replace(BEHIND, sightings=sightings(1, 2, 3, 3), verdicts=verdicts(None)), "symmetric", id="chance agrees once"
        ),
        pytest.param(replace(BEHIND, verdicts=verdicts(WAN_AT)), "public", id="one got through"),
        pytest.param(replace(BEHIND, verdicts=verdicts(WAN_AT, None)), "public", id="every other one did"),
        pytest.param(
            replace(BEHIND, sightings=sightings(9, 9, 9), verdicts=verdicts(WAN_AT, None, None)), "cone", id="most did not"
        ),
        pytest.param(
            replace(BEHIND, sightings=tuple(replace(one, from_listen_port=False) for one in sightings(1, 2, 3))),
            None,
            id="ports of chance tell nothing",
        ),
        pytest.param(
            replace(BEHIND, sightings=(Sighting(FAR[0], WAN, 1), Sighting(FAR[0], WAN, 2)), verdicts=verdicts(None)),
            None,
            id="two peers on one address are one observer",
        ),
        pytest.param(
            Seen(port=4001, own=frozenset({WAN}), sightings=sightings(4001, 4001), verdicts=verdicts(None, None)),
            "cone",
            id="no NAT, but a firewall",
        ),
        pytest.param(Seen(port=4001, own=frozenset({WAN}), sightings=sightings(4001, 4001)), None, id="no NAT, not tried"),
        pytest.param(replace(BEHIND, relays="only"), "symmetric", id="relays only"),
    ],
)
def test_what_was_seen_makes_the_class(seen: Seen, kind: str | None) -> None:
    found = find(seen)
    assert found.kind == kind
    assert found.why.endswith(".")


@pytest.mark.parametrize("relays", ["off", "missing"])
def test_without_relays_there_is_no_way_in_but_straight(relays: str) -> None:
    for ports in ((5, 5), (5, 6)):
        seen = replace(BEHIND, sightings=sightings(*ports), verdicts=verdicts(None, None), relays=relays)
        assert find(seen).kind == "client"
        assert ("--no-relay" in find(seen).why) == (relays == "off")
        assert find(replace(seen, relays="sought")).kind != "client"
    assert find(replace(BEHIND, verdicts=verdicts(WAN_AT), relays=relays)).kind == "public"


def test_neighbours_count_only_while_nobody_sees_us_from_outside() -> None:
    inside = tuple(Verdict(f"192.168.1.{last}", HOME, f"/ip4/{HOME}/tcp/4001") for last in (2, 3, 4))
    alone = replace(BEHIND, verdicts=inside)
    assert find(alone) == Finding("public", f"3 peers dialled us at /ip4/{HOME}/tcp/4001.", (f"/ip4/{HOME}/tcp/4001",))
    far = replace(alone, sightings=sightings(5, 5), verdicts=(*inside, *verdicts(None, None)))
    assert (find(far).kind, find(far).external) == ("cone", ())


def test_where_others_got_through_is_told_best_known_first() -> None:
    other = f"/ip4/{WAN}/tcp/4999"
    found = find(replace(BEHIND, verdicts=verdicts(other, WAN_AT, WAN_AT), mapped=WAN_AT))
    assert found == Finding(
        "public", f"3 peers dialled us at {WAN_AT}, the port that the router gave us by UPnP.", (WAN_AT, other)
    )


def test_one_liar_cannot_have_us_announce_anothers_address() -> None:
    lie = "/ip4/192.0.2.66/tcp/4001"
    liars = tuple(Verdict("203.0.113.66", "192.0.2.66", lie) for _ in range(5))
    assert find(replace(BEHIND, verdicts=(*liars, *verdicts(WAN_AT, WAN_AT)))).external == (WAN_AT,)
    found = find(replace(BEHIND, sightings=sightings(9, 9), verdicts=(*liars, *verdicts(None, None))))
    assert (found.kind, found.external) == ("cone", ()), "five peers on one address are one"
    own = replace(BEHIND, own=frozenset({HOME, "192.0.2.66"}), verdicts=(*liars, *verdicts(WAN_AT, WAN_AT)))
    assert find(own).external == (WAN_AT, lie), "one of our own interfaces is no lie"


def test_a_mapping_that_nobody_gets_through_is_no_way_in() -> None:
    found = find(replace(BEHIND, sightings=sightings(5, 5), verdicts=verdicts(None, None), mapped=WAN_AT, router=""))
    assert found.kind == "cone"
    assert f"{WAN} port 4001 by UPnP, but nobody got through" in found.why


def test_the_owner_has_the_last_word_and_is_warned() -> None:
    told = replace(BEHIND, announce=(WAN_AT,))
    assert find(told) == Finding("public", f"--announce names {WAN_AT}.")
    assert "2 peers could not dial it" in find(replace(told, verdicts=verdicts(None, None))).why
    assert "could not" not in find(replace(told, verdicts=verdicts(None, WAN_AT))).why


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "No router answers UPnP here; allow UPnP in yours, or forward TCP port 4001 to this machine"),
        ({"router": ""}, "Forward TCP port 4001 to this machine, or leave out --no-upnp if this is no container"),
        ({"sightings": sightings(5, 6, 7)}, "each sees another port (5, 6, 7): the NAT cannot be punched"),
        ({"verdicts": verdicts(None, None, None)}, "3 peers could not dial us, and 3 see us at 198.51.100.7 port 5"),
    ],
)
def test_the_reason_names_what_was_seen_and_what_to_do(change: dict[str, object], text: str) -> None:
    seen = replace(BEHIND, sightings=sightings(5, 5, 5), verdicts=verdicts(None))
    assert text in find(replace(seen, **change)).why  # type: ignore[arg-type]  # fields by name


def test_ipv6_stands_in_where_ipv4_tells_nothing_and_beside_it_where_it_does() -> None:
    six = verdicts(SIX_AT, host=SIX)
    alone = Seen(port=4001, own=frozenset({SIX}), verdicts=six)
    assert find(alone) == Finding("public", f"1 peer dialled us at {SIX_AT}.", (SIX_AT,))
    both = replace(BEHIND, own=frozenset({HOME, SIX}), sightings=sightings(5, 6), verdicts=(*verdicts(None, None), *six))
    found = find(both)
    assert (found.kind, found.external) == ("symmetric", (SIX_AT,))
    assert f"Over IPv6 1 peer dialled us at {SIX_AT}." in found.why
    unknown = replace(both, sightings=(), verdicts=six)
    assert find(unknown).kind == "public"
