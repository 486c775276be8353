"""A node that is not reached straight holds reservations at relays: which it takes, what it does when one is gone."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from nolocod.errors import NoRelayError
from nolocod.identity import Identity
from nolocod.observe.events import RelayHeld, RelayLost, Troubled
from nolocod.p2p.host import open_host
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient, RelayLimits
from nolocod.p2p.nat.reservations import Candidate, Reservations, ReservationTiming, Want
from nolocod.p2p.transport.stream import PING
from nolocod.units import Address
from tests.support.wires import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nolocod.observe.events import Event
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

QUICK = ReservationTiming(look=0.05, ping=60.0, back_off=0.2, longest_back_off=0.4, patience=0.3)


@dataclass
class Place:
    """A relay that is up until it is killed."""

    host: Host
    relay: Relay
    kill: Callable[[], None]

    def candidate(self, relays: bool | None = True) -> Candidate:
        return Candidate(self.host.own, self.host.announced, relays)


@dataclass
class Scene:
    """Relays, and one node that keeps places at them."""

    nursery: trio.Nursery
    host: Host
    events: list[Event] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    want: Want = "yes"

    async def place(self, limits: RelayLimits | None = None) -> Place:
        scope = trio.CancelScope()
        started: list[Place] = []
        up = trio.Event()

        async def live() -> None:
            with scope:
                async with open_host(Identity.generate(), LOOPBACK, (), lambda _: None) as host:
                    relay = Relay(host, limits)
                    relay.serve()
                    started.append(Place(host, relay, scope.cancel))
                    up.set()
                    await trio.sleep_forever()

        self.nursery.start_soon(live)
        await up.wait()
        self.candidates.append(started[0].candidate())
        return started[0]

    def keep(self, timing: ReservationTiming = QUICK) -> Reservations:
        made = Reservations(self.host, RelayClient(self.host), self.events.append, random.Random(5), timing)
        made.want, made.candidates = lambda: self.want, lambda: self.candidates
        self.nursery.start_soon(made.run)
        return made

    def lost(self) -> list[RelayLost]:
        return [event for event in self.events if isinstance(event, RelayLost)]


LOOPBACK = (Address("127.0.0.1", 0),)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """A node without relays yet."""
    host_of = open_host(Identity.generate(), LOOPBACK, (), lambda _: None)
    async with host_of as host, trio.open_nursery() as nursery:
        yield Scene(nursery, host)
        nursery.cancel_scope.cancel()


async def test_two_reservations_at_least_and_circuits_through_both() -> None:
    async with scene() as here:
        places = [await here.place() for _ in range(2)]
        reservations = here.keep()
        await until(lambda: len(reservations.held) == 2)
        assert set(here.host.circuits) == {f"{place.host.announced[0]}/p2p/{place.host.own}/p2p-circuit" for place in places}
        RelayClient(here.host).serve()
        async with open_host(Identity.generate(), LOOPBACK, (), lambda _: None) as caller:
            await caller.connect(places[1].host.own, places[1].host.announced)
            await RelayClient(caller).connect(places[1].host.own, here.host.own)
            assert caller.peers()[here.host.own] == "relayed"


async def test_no_place_is_kept_at_one_that_is_banned_since_nobody_would_come_in_through_it() -> None:
    async with scene() as here:
        banned = await here.place()
        reservations = here.keep()
        await until(lambda: set(reservations.held) == {banned.host.own})
        here.host.refuses = lambda peer: peer == banned.host.own
        other = await here.place()
        await until(lambda: set(reservations.held) == {other.host.own})
        assert [lost.relay for lost in here.lost()] == [banned.host.own]
        here.host.refuses = lambda _: False
        await until(lambda: len(reservations.held) == 2)


async def test_never_more_places_than_needed() -> None:
    async with scene() as here:
        for _ in range(5):
            await here.place()
        reservations = here.keep()
        await until(lambda: len(reservations.held) >= 2)
        await trio.sleep(4 * QUICK.look)
        assert 2 <= len(reservations.held) <= 3
        assert not here.lost()


async def test_a_relay_that_came_to_us_through_another_one_is_dialled_straight() -> None:
    async with scene() as here:
        first = await here.place()
        RelayClient(here.host).serve()
        reservations = here.keep()
        await until(lambda: set(reservations.held) == {first.host.own})
        second = await here.place()
        here.candidates.pop()
        await second.host.connect(first.host.own, first.host.announced)
        await RelayClient(second.host).connect(first.host.own, here.host.own)
        await until(lambda: here.host.peers().get(second.host.own) == "relayed")
        here.candidates.append(second.candidate())
        await until(lambda: second.host.own in reservations.held)
        assert here.host.straight(second.host.own)


async def test_a_relay_that_is_gone_is_replaced_at_once() -> None:
    async with scene() as here:
        places = [await here.place() for _ in range(2)]
        reservations = here.keep()
        await until(lambda: len(reservations.held) == 2)
        third = await here.place()
        places[0].kill()
        await until(lambda: third.host.own in reservations.held)
        assert set(reservations.held) == {places[1].host.own, third.host.own}
        assert [event.relay for event in here.lost()] == [places[0].host.own]
        assert not any(places[0].host.own in circuit for circuit in here.host.circuits)
        assert len([event for event in here.events if isinstance(event, RelayHeld)]) == 3


async def test_a_relay_that_goes_silent_is_found_by_a_ping() -> None:
    async with scene() as here:
        silent = await here.place()
        timing = ReservationTiming(look=0.05, ping=0.3, pong=1.0, back_off=60.0)

        async def never(_: Stream) -> None:
            await trio.sleep_forever()

        silent.host.serve(PING, never)
        reservations = here.keep(timing)
        await until(lambda: reservations.held == (silent.host.own,))
        await until(lambda: reservations.held == ())
        assert here.lost() == [RelayLost(silent.host.own, "it does not answer")]
        assert not here.host.connected(silent.host.own)


async def test_places_are_renewed_whatever_the_relays_clock_says() -> None:
    async with scene() as here:
        # By its word one lasts a tenth of a second, another an hour, and we believe nothing for longer than 0.4 s.
        short = await here.place(RelayLimits(reservation_seconds=0.1))
        long = await here.place()
        reservations = here.keep(ReservationTiming(look=0.02, longest=0.4, unclear=0.2))

        def times(place: Place) -> int:
            return len([event for event in here.events if isinstance(event, RelayHeld) and event.relay == place.host.own])

        await until(lambda: times(short) >= 3 and times(long) >= 3)
        assert len(reservations.held) == 2
        assert not here.lost()


async def test_one_that_refuses_is_left_alone_until_it_says_that_it_relays() -> None:
    async with scene() as here:
        place = await here.place()
        place.relay.willing = lambda: False
        here.candidates[0] = place.candidate(relays=None)
        reservations = here.keep(ReservationTiming(look=0.02, back_off=60.0, longest_back_off=60.0))
        await until(lambda: place.relay.refused == 1)
        place.relay.willing = lambda: True
        await trio.sleep(0.1)
        assert reservations.held == ()
        here.candidates[0] = place.candidate(relays=True)
        await until(lambda: len(reservations.held) == 1)
        here.candidates[0] = place.candidate(relays=False)
        await until(lambda: reservations.held == ())
        assert here.lost() == [RelayLost(place.host.own, "it relays no more")]


async def test_without_a_relay_the_owner_is_told_once() -> None:
    async with scene() as here:
        here.want = "perhaps"
        reservations = here.keep()
        await trio.sleep(0.5)
        assert not here.events, "a node that does not know yet complains of nothing"
        here.want = "yes"
        await until(lambda: bool(here.events))
        await trio.sleep(0.5)
        (told,) = here.events
        assert isinstance(told, Troubled)
        assert told.code == NoRelayError.entry.code
        await here.place()
        await until(lambda: len(reservations.held) == 1)


async def test_a_node_that_turns_out_to_be_public_lets_its_places_go() -> None:
    async with scene() as here:
        place = await here.place()
        reservations = here.keep()
        await until(lambda: len(reservations.held) == 1)
        here.want = "no"
        await until(lambda: here.host.circuits == ())
        assert here.lost() == [RelayLost(place.host.own, "not needed any more")]
        assert here.host.connected(place.host.own)
