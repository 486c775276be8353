"""Who is let in, who goes when there are too many, and that nobody with a few addresses shuts out others."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.errors import PeerUnavailableError, RemoteError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.limits.connection_manager import (
    KEPT,
    MEMBER,
    PARTNER,
    STRANGER,
    ConnectionLimits,
    ConnectionManager,
    Held,
)
from nolocod.p2p.limits.rate_limits import Rate
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.p2p.transport.multiaddrs import through
from nolocod.units import Address
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FREE = Rate(1e6, 1e6)
HOME, OFFICE = "192.0.2.1", "198.51.100.7"
LATER = 100.0


class Door:
    """A manager and the connections that it let in; `ranks` are those of peers by name."""

    def __init__(self, most: int, limits: ConnectionLimits | None = None) -> None:
        self.manager = ConnectionManager(most, limits or ConnectionLimits(arrivals=FREE))
        self.held: list[Held] = []
        self.ranks: dict[str, int] = {}
        self.manager.open = lambda: self.held
        self.manager.rank = lambda peer: self.ranks.get(peer, STRANGER)

    def comes(self, host: str, now: float, peer: str = "") -> Held | None:
        """Somebody comes and shakes hands; None for one that is turned away or dropped at once."""
        held = self.manager.admit(host, now, lambda: None)
        if held is None:
            return None
        self.manager.half_open.pop(held, None)
        return self._is_there(held, now, peer)

    def dials(self, source: str, now: float, peer: str = "") -> Held | None:
        if not self.manager.has_room(source, now, arrived=False):
            return None
        return self._is_there(Held(source, now, arrived=False), now, peer)

    def _is_there(self, held: Held, now: float, peer: str) -> Held | None:
        held.peer, held.heard_at = PeerId(peer or f"peer {len(self.held)} of {held.source} at {now}"), now
        held.drop = lambda: self.held.remove(held)
        self.held.append(held)
        self.manager.enforce(now)
        return held if held in self.held else None

    @property
    def crowd(self) -> Counter[str]:
        return Counter(one.source for one in self.held)


def test_four_addresses_share_what_arrives_and_make_room_for_any_other() -> None:
    door = Door(256)
    for second in range(100):
        for number in range(4):
            door.comes(f"203.0.{number}.1", float(second))
    assert door.crowd == {f"203.0.{number}.0/24": 48 for number in range(4)}
    assert door.comes(HOME, LATER)
    assert sorted(door.crowd.values()) == [1, 47, 48, 48, 48]
    assert door.comes("203.0.1.1", LATER + 1) is None or max(door.crowd.values()) == 48, "none of theirs grows"


def test_a_quarter_is_left_for_those_that_we_open() -> None:
    door = Door(8)
    assert sum(door.comes(f"203.0.{number}.1", 0.0) is not None for number in range(20)) == 6
    door.ranks = {"first": MEMBER, "second": MEMBER}
    assert all(door.dials(name, 0.0, name) for name in door.ranks)
    assert not door.dials("third", 0.0), "nobody had time yet to become a member"
    assert door.dials("third", 10.0), "a stranger makes room for one that we open"
    assert sum(one.arrived for one in door.held) == 5


def test_what_we_opened_beyond_its_quarter_makes_room_for_who_comes() -> None:
    door = Door(8)
    for number in range(8):
        door.ranks[f"member {number}"] = KEPT if number == 0 else MEMBER
        assert door.dials(f"203.0.{number}.1", float(number), f"member {number}")
    door.held[1].busy = True
    assert not door.comes(HOME, 9.0), "they are new"
    assert all(door.comes(f"198.51.{number}.1", LATER) for number in range(6))
    assert [one.peer for one in door.held[:2]] == ["member 0", "member 1"], "a bootstrap, and one at work"
    assert not door.comes(OFFICE, LATER)


def test_so_many_of_one_group_of_addresses() -> None:
    door = Door(256, ConnectionLimits(per_source=2, arrivals=FREE))
    assert [door.comes(f"2001:db8:1:{number}::1", 0.0) is not None for number in range(4)] == [True, True, False, False]
    assert [door.comes(f"192.0.2.{number}", 0.0) is not None for number in range(4)] == [True, True, False, False]
    assert door.manager.turned_away == 4
    assert door.comes("2001:db8:2::1", 0.0)


def test_in_one_private_network_an_address_is_counted_alone() -> None:
    door = Door(256, ConnectionLimits(per_source=1, arrivals=FREE))
    assert all(door.comes(f"192.168.1.{number}", 0.0) for number in range(1, 10))


def test_members_partners_and_relays_stay_and_strangers_go_who_had_time_to_become_one() -> None:
    door = Door(8)
    door.ranks = {"member": MEMBER, "partner": PARTNER, "relay": KEPT}
    for name in ("stranger", *door.ranks, "other", "third"):
        assert door.comes(f"203.0.{len(door.held)}.1", 0.0, name)
    assert door.comes(HOME, 5.0) is None, "strangers have ten seconds"
    assert door.comes(HOME, 10.0)
    assert door.comes(OFFICE, 10.0)
    assert door.comes("192.88.99.1", 10.0)
    assert {one.peer for one in door.held} >= set(door.ranks)
    assert not {one.peer for one in door.held} & {"stranger", "other", "third"}
    assert door.comes("203.0.99.1", 10.0) is None


def test_of_one_source_a_handful_is_protected_whatever_they_are() -> None:
    door = Door(256)
    door.ranks = {f"sybil {number}": MEMBER for number in range(400)}
    for number in range(400):
        door.comes(f"203.0.{number % 4}.1", number / 100, f"sybil {number}")
    assert len(door.held) == 192
    assert all(door.comes(f"198.51.{number}.1", 5.0) for number in range(160))
    assert {door.crowd[f"203.0.{number}.0/24"] for number in range(4)} == {8}


def test_partners_are_of_that_handful_before_members() -> None:
    door = Door(16)
    door.ranks = {f"member {number}": MEMBER for number in range(10)} | {"partner": PARTNER}
    assert all(door.comes(HOME, float(number), peer) for number, peer in enumerate(door.ranks))
    assert all(door.comes(f"198.51.{number}.1", LATER) for number in range(4))
    assert "partner" in {one.peer for one in door.held}
    assert door.crowd["192.0.2.0/24"] == 8


def test_where_all_are_members_what_we_open_takes_the_place_of_the_idle_and_who_comes_does_not() -> None:
    door = Door(8)
    for number in range(8):
        door.ranks[f"member {number}"] = MEMBER
        assert (door.comes if number < 6 else door.dials)(f"203.0.{number}.1", float(number), f"member {number}")
    door.held[6].busy = True
    assert door.comes(HOME, LATER) is None
    assert door.dials(HOME, LATER, "one more")
    assert [one.peer for one in door.held[6:]] == ["member 6", "one more"]


def test_a_dial_is_refused_where_nobody_can_be_spared() -> None:
    door = Door(4)
    door.ranks = {f"relay {number}": KEPT for number in range(4)}
    assert all(door.dials(f"203.0.{number}.1", 0.0, f"relay {number}") for number in range(4))
    assert door.dials(HOME, LATER) is None


def test_handshakes_are_counted_by_source_and_in_all_until_they_are_over() -> None:
    manager = ConnectionManager(256, ConnectionLimits(half_open=5, half_open_per_source=3, arrivals=FREE))
    dropped = list[str]()
    for number in range(4):
        manager.admit(HOME, number / 10, lambda: dropped.append(HOME))
    assert manager.turned_away == 1
    assert all(manager.admit(host, 1.0, lambda: None) for host in (OFFICE, "203.0.113.1"))
    assert manager.admit(HOME, 1.0, lambda: None) is None
    assert not dropped
    assert manager.admit("203.0.1.1", 1.0, lambda: None), "five in all, and the largest source makes room"
    assert dropped == [HOME]
    assert len(manager.half_open) == 5
    for one in list(manager.half_open):
        manager.half_open.pop(one, None)
    assert manager.admit(HOME, 1.0, lambda: None)


def test_who_comes_too_often_waits_whatever_it_closed_again() -> None:
    manager = ConnectionManager(256, ConnectionLimits(arrivals=Rate(1.0, 4)))
    for _ in range(4):
        held = manager.admit("2001:db8::1", 0.0, lambda: None)
        assert held is not None
        manager.half_open.pop(held, None)
    assert manager.admit("2001:db8::2", 0.0, lambda: None) is None, "the same /48"
    assert manager.admit("2001:db8::2", 1.0, lambda: None) is not None


def test_above_the_low_water_idle_strangers_go() -> None:
    door = Door(8)
    door.ranks = {"member": MEMBER}
    assert door.comes("203.0.0.1", 0.0, "member")
    for number in range(1, 6):
        assert door.comes(f"203.0.{number}.1", float(number), f"stranger {number}")
    door.held[2].busy = True
    door.manager.trim(60.0)
    assert len(door.held) == 6, "the first of them has been idle for 59 s"
    door.manager.trim(70.0)
    assert [one.peer for one in door.held] == ["member", "stranger 2", "stranger 4", "stranger 5"]
    door.manager.trim(1000.0)
    assert len(door.held) == 4, "half of all may stay"


# --- real hosts -------------------------------------------------------------------------------------------

LIMITS = HostLimits(connect=ENOUGH, negotiate=ENOUGH, connections=8, inbound=ConnectionLimits(per_source=2))


def at(place: str) -> AsyncIterator[Host]:
    return open_host(Identity.generate(), (Address(place, 0),), (), lambda _: None, LIMITS)  # type: ignore[return-value]


@asynccontextmanager
async def besieged() -> AsyncIterator[Host]:
    """A host to which eight attackers hold connections from four addresses, or hold as many as they are let."""
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(at("127.0.0.1"))  # type: ignore[arg-type]
        for number in range(8):
            evil = await stack.enter_async_context(at(f"127.0.0.{41 + number // 2}"))  # type: ignore[arg-type]
            with suppress(RemoteError):
                await evil.connect(victim.own, victim.announced)
        yield victim


async def test_four_addresses_that_hold_all_connections_keep_us_from_nobody() -> None:
    async with besieged() as victim, at("127.0.0.60") as bootstrap, at("127.0.0.61") as newcomer:  # type: ignore[attr-defined]
        assert len(victim.peers()) >= 6
        await victim.connect(bootstrap.own, bootstrap.announced)
        await newcomer.connect(victim.own, victim.announced)
        await until(lambda: newcomer.own in victim.peers() and len(victim.peers()) <= 8)
        assert bootstrap.own in victim.peers()


async def test_four_addresses_that_begin_handshakes_leave_the_door_open_for_others() -> None:
    limits = HostLimits(connect=2 * ENOUGH, inbound=ConnectionLimits(half_open=8, half_open_per_source=2))
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(open_host(Identity.generate(), (Address("127.0.0.1", 0),), (), print, limits))
        port = int(victim.announced[0].rpartition("/")[2])
        for number in range(8):
            silent = await trio.open_tcp_stream("127.0.0.1", port, local_address=f"127.0.0.{41 + number // 2}")
            last = await stack.enter_async_context(silent)
        await until(lambda: len(victim.dialer.connection_manager.half_open) == 8)
        newcomer = await stack.enter_async_context(at("127.0.0.61"))  # type: ignore[arg-type]
        await newcomer.connect(victim.own, victim.announced)
        await until(lambda: len(victim.dialer.connection_manager.half_open) == 7)
        with trio.fail_after(ENOUGH / 3):  # less than libp2p waits for a handshake
            while await last.receive_some():
                pass  # until its end


async def test_a_circuit_or_a_dial_that_is_one_too_many_is_refused() -> None:
    limits = HostLimits(connections=1, connect=ENOUGH, negotiate=ENOUGH)
    small_one = open_host(Identity.generate(), (Address("127.0.0.3", 0),), (), lambda _: None, limits)
    async with at("127.0.0.1") as relay, at("127.0.0.2") as guest, small_one as small:  # type: ignore[attr-defined]
        Relay(relay).serve()
        for host in (guest, small):
            client = RelayClient(host)
            client.serve()
            host.through = client.connect
        await small.connect(relay.own, relay.announced)
        await RelayClient(small).reserve(relay.own)
        with pytest.raises(PeerUnavailableError):
            await guest.connect(small.own, [through(relay.own, relay.announced[0])])
        with pytest.raises(PeerUnavailableError, match="all the connections"):
            await small.connect(guest.own, guest.announced)
        assert set(small.peers()) == {relay.own}
