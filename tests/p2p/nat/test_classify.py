"""What kind of NAT follows from what others saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nolocod.p2p.nat.classify import Conclusion, DialBack, Evidence, Observed, classify

HOME = "192.168.1.17"
WAN = "198.51.100.7"
WAN_AT = f"/ip4/{WAN}/tcp/4001"
SIX = "2001:db8:1::17"
SIX_AT = f"/ip6/{SIX}/tcp/4001"
FAR = ("203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4")
BEHIND = Evidence(port=4001, own=frozenset({HOME}), relays="open", router="no router answers UPnP here")


def observed(*ports: int, host: str = WAN) -> tuple[Observed, ...]:
    """Observers on different addresses, each of whom sees one of `ports`."""
    return tuple(Observed(observer, host, port) for observer, port in zip(FAR, ports, strict=False))


def dial_backs(*dialled: str | None, host: str = WAN) -> tuple[DialBack, ...]:
    return tuple(DialBack(observer, host, address) for observer, address in zip(FAR, dialled, strict=False))


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        pytest.param(BEHIND, None, id="nobody yet"),
        pytest.param(replace(BEHIND, observed=observed(4001)), None, id="one sees us"),
        pytest.param(replace(BEHIND, observed=observed(4001), dial_backs=dial_backs(None)), None, id="one sees us, in vain"),
        pytest.param(replace(BEHIND, observed=observed(4001, 4001), asked=False), None, id="two see us, none was asked"),
        pytest.param(replace(BEHIND, observed=observed(4001, 4001)), "cone", id="none of two would dial"),
        pytest.param(replace(BEHIND, observed=observed(5123, 5123), dial_backs=dial_backs(None, None)), "cone", id="one port"),
        pytest.param(replace(BEHIND, observed=observed(5123, 5124), dial_backs=dial_backs(None, None)), "symmetric", id="two"),
        pytest.param(
            replace(BEHIND, observed=observed(7, 5123, 5123), dial_backs=dial_backs(None)), "cone", id="one is from long ago"
        ),
        pytest.param(
            replace(BEHIND, observed=observed(1, 2, 3, 3), dial_backs=dial_backs(None)), "symmetric", id="chance agrees once"
        ),
        pytest.param(replace(BEHIND, dial_backs=dial_backs(WAN_AT)), "public", id="one got through"),
        pytest.param(replace(BEHIND, dial_backs=dial_backs(WAN_AT, None)), "public", id="every other one did"),
        pytest.param(
            replace(BEHIND, observed=observed(9, 9, 9), dial_backs=dial_backs(WAN_AT, None, None)), "cone", id="most did not"
        ),
        pytest.param(
            replace(BEHIND, observed=tuple(replace(one, from_listen_port=False) for one in observed(1, 2, 3))),
            None,
            id="ports of chance tell nothing",
        ),
        pytest.param(
            replace(BEHIND, observed=(Observed(FAR[0], WAN, 1), Observed(FAR[0], WAN, 2)), dial_backs=dial_backs(None)),
            None,
            id="two peers on one address are one observer",
        ),
        pytest.param(
            Evidence(port=4001, own=frozenset({WAN}), observed=observed(4001, 4001), dial_backs=dial_backs(None, None)),
            "cone",
            id="no NAT, but a firewall",
        ),
        pytest.param(Evidence(port=4001, own=frozenset({WAN}), observed=observed(4001, 4001)), None, id="no NAT, not tried"),
        pytest.param(replace(BEHIND, relays="only"), "symmetric", id="relays only"),
    ],
)
def test_what_was_seen_makes_the_class(seen: Evidence, kind: str | None) -> None:
    found = classify(seen)
    assert found.kind == kind
    assert found.why.endswith(".")


@pytest.mark.parametrize("relays", ["off", "missing"])
def test_without_relays_there_is_no_way_in_but_straight(relays: str) -> None:
    for ports in ((5, 5), (5, 6)):
        seen = replace(BEHIND, observed=observed(*ports), dial_backs=dial_backs(None, None), relays=relays)
        assert classify(seen).kind == "client"
        assert ("--no-relay" in classify(seen).why) == (relays == "off")
        assert classify(replace(seen, relays="open")).kind != "client"
    assert classify(replace(BEHIND, dial_backs=dial_backs(WAN_AT), relays=relays)).kind == "public"


def test_neighbours_count_only_while_nobody_sees_us_from_outside() -> None:
    inside = tuple(DialBack(f"192.168.1.{last}", HOME, f"/ip4/{HOME}/tcp/4001") for last in (2, 3, 4))
    alone = replace(BEHIND, dial_backs=inside)
    assert classify(alone) == Conclusion("public", f"3 peers dialled us at /ip4/{HOME}/tcp/4001.", (f"/ip4/{HOME}/tcp/4001",))
    far = replace(alone, observed=observed(5, 5), dial_backs=(*inside, *dial_backs(None, None)))
    assert (classify(far).kind, classify(far).external) == ("cone", ())


def test_where_others_got_through_is_told_best_known_first() -> None:
    other = f"/ip4/{WAN}/tcp/4999"
    found = classify(replace(BEHIND, dial_backs=dial_backs(other, WAN_AT, WAN_AT), mapped=WAN_AT))
    assert found == Conclusion(
        "public", f"3 peers dialled us at {WAN_AT}, the port that the router gave us by UPnP.", (WAN_AT, other)
    )


def test_one_liar_cannot_have_us_announce_anothers_address() -> None:
    lie = "/ip4/192.0.2.66/tcp/4001"
    liars = tuple(DialBack("203.0.113.66", "192.0.2.66", lie) for _ in range(5))
    assert classify(replace(BEHIND, dial_backs=(*liars, *dial_backs(WAN_AT, WAN_AT)))).external == (WAN_AT,)
    found = classify(replace(BEHIND, observed=observed(9, 9), dial_backs=(*liars, *dial_backs(None, None))))
    assert (found.kind, found.external) == ("cone", ()), "five peers on one address are one"
    own = replace(BEHIND, own=frozenset({HOME, "192.0.2.66"}), dial_backs=(*liars, *dial_backs(WAN_AT, WAN_AT)))
    assert classify(own).external == (WAN_AT, lie), "one of our own interfaces is no lie"


def test_a_mapping_that_nobody_gets_through_is_no_way_in() -> None:
    found = classify(replace(BEHIND, observed=observed(5, 5), dial_backs=dial_backs(None, None), mapped=WAN_AT, router=""))
    assert found.kind == "cone"
    assert f"{WAN} port 4001 by UPnP, but nobody got through" in found.why


def test_the_owner_has_the_last_word_and_is_warned() -> None:
    told = replace(BEHIND, announce=(WAN_AT,))
    assert classify(told) == Conclusion("public", f"--announce names {WAN_AT}.")
    assert "2 peers could not dial it" in classify(replace(told, dial_backs=dial_backs(None, None))).why
    assert "could not" not in classify(replace(told, dial_backs=dial_backs(None, WAN_AT))).why


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "No router answers UPnP here; allow UPnP in yours, or forward TCP port 4001 to this machine"),
        ({"router": ""}, "Forward TCP port 4001 to this machine, or leave out --no-upnp if this is no container"),
        ({"observed": observed(5, 6, 7)}, "each sees another port (5, 6, 7): the NAT cannot be punched"),
        ({"dial_backs": dial_backs(None, None, None)}, "3 peers could not dial us, and 3 see us at 198.51.100.7 port 5"),
    ],
)
def test_the_reason_names_what_was_seen_and_what_to_do(change: dict[str, object], text: str) -> None:
    seen = replace(BEHIND, observed=observed(5, 5, 5), dial_backs=dial_backs(None))
    assert text in classify(replace(seen, **change)).why  # type: ignore[arg-type]  # fields by name


def test_ipv6_stands_in_where_ipv4_tells_nothing_and_beside_it_where_it_does() -> None:
    six = dial_backs(SIX_AT, host=SIX)
    alone = Evidence(port=4001, own=frozenset({SIX}), dial_backs=six)
    assert classify(alone) == Conclusion("public", f"1 peer dialled us at {SIX_AT}.", (SIX_AT,))
    both = replace(BEHIND, own=frozenset({HOME, SIX}), observed=observed(5, 6), dial_backs=(*dial_backs(None, None), *six))
    found = classify(both)
    assert (found.kind, found.external) == ("symmetric", (SIX_AT,))
    assert f"Over IPv6 1 peer dialled us at {SIX_AT}." in found.why
    unknown = replace(both, observed=(), dial_backs=six)
    assert classify(unknown).kind == "public"
