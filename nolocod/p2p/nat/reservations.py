"""Holds reservations at relays for a node that others cannot reach straight (libp2p calls this AutoRelay).

The rule: two reservations at least, at different relays, on straight connections that are kept alive; one that is
lost is told and replaced at once. Three relays are tried beside each other and those that answer first are kept,
so that quick and idle ones are preferred. No relay's clock is trusted: renewal is due at three quarters of the shorter
of what it says and our own bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from nolocod.errors import NoRelayError, RemoteError
from nolocod.observe.events import RelayHeld, RelayLost, Troubled
from nolocod.p2p.keepalive import fell_silent
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.multiaddrs import straight, through

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.host import Host
    from nolocod.p2p.nat.circuit_relay import RelayClient

Want = Literal["no", "perhaps", "yes"]
"""Whether a node needs relays: it is reached straight, does not know yet, or is not reached."""

_LEAST, _MOST = 2, 3
"""Fewer than so many reservations are filled up, to so many."""
_ANSWER = 8.0
"""Seconds after which a relay is given up that has not been dialled and answered."""
_UNMEASURED = 0.2
"""Seconds that a relay is taken to answer in before it was asked, on average."""
_ADDRESSES = 2
"""Of one relay, in what we announce: heartbeats hold eight in all."""


@dataclass(frozen=True)
class Candidate:
    """A node that may relay for us. `relays`: whether it says so; None where it said nothing yet."""

    peer: PeerId
    addresses: tuple[str, ...]
    relays: bool | None = None


@dataclass(frozen=True)
class ReservationTiming:
    """Seconds."""

    look: float = 1.0
    """Between two looks at what we hold."""
    longest: float = 1800.0
    """Whatever the relay says, a reservation is renewed before so long."""
    unclear: float = 60.0
    """How long one lasts that is over already, as its relay says: its clock is not ours."""
    ping: float = 10.0
    """A relay of which nothing came for so long is pinged, which also keeps a NAT's mapping."""
    pong: float = 5.0
    back_off: float = 5.0
    """After a failure, doubled with every one in a row."""
    longest_back_off: float = 30.0
    patience: float = 20.0
    """How long a node that needs relays may be without one before its owner is told."""


@dataclass
class _Held:
    """A reservation: where it is reached, and when to renew it (trio's time)."""

    addresses: tuple[str, ...]
    renew_at: float


@dataclass
class _Tried:
    """What was seen of a relay: seconds of its latest answer, failures in a row, and until when it is left alone.

    `relayed`: it said that it relays when it was last looked at. One that begins to say so is asked at once.
    """

    relayed: bool
    answer: float | None = None
    failures: int = 0
    until: float = 0.0


class Reservations:
    """The reservations of `host`; sets `host.circuits`. `run` does the work.

    `want` and `candidates` are asked before each look; `client` makes the reservations.
    """

    def __init__(
        self, host: Host, client: RelayClient, emit: Emit, rng: random.Random, timing: ReservationTiming | None = None
    ) -> None:
        self.want: Callable[[], Want] = lambda: "perhaps"
        self.candidates: Callable[[], Iterable[Candidate]] = tuple
        self._host = host
        self._client = client
        self._emit = emit
        self._rng = rng
        self._timing = timing or ReservationTiming()
        self._held: dict[PeerId, _Held] = {}
        self._tried: dict[PeerId, _Tried] = {}
        self._complain_at: float | None = None

    @property
    def held(self) -> tuple[PeerId, ...]:
        """Where we hold a reservation now, the oldest first."""
        return tuple(self._held)

    async def run(self) -> None:
        """Keep reservations while they are wanted, until cancelled."""
        while True:
            want = self.want()
            if want != "no":
                await self._look()
            for relay in self.held if want == "no" else ():  # they run out at the relays by themselves
                self._drop(relay, "not needed any more")
            self._complain(want)
            await trio.sleep(self._timing.look * self._rng.uniform(0.8, 1.2))

    def wake(self) -> None:
        """Forget what failed: the network is another one now."""
        for tried in self._tried.values():
            tried.failures, tried.until = 0, 0.0

    async def _look(self) -> None:
        host = self._host
        candidates = {one.peer: one for one in self.candidates() if one.peer != host.own and not host.refuses(one.peer)}
        self._forget(candidates)
        for relay in self.held:
            if host.refuses(relay):
                self._lose(relay, "it is banned here, and its streams are reset")
            elif not host.straight(relay):
                self._lose(relay, "the connection to it ended")
            elif relay in candidates and candidates[relay].relays is False:
                self._lose(relay, "it relays no more")
        now = trio.current_time()
        async with trio.open_nursery() as nursery:
            for relay, held in list(self._held.items()):
                if now >= held.renew_at:
                    nursery.start_soon(self._try, candidates.get(relay, Candidate(relay, held.addresses)))
                elif now - host.heard_at(relay) >= self._timing.ping:
                    nursery.start_soon(self._check, relay)
            if len(self._held) < _LEAST:
                nursery.start_soon(self._fill, self._choose(candidates.values()))

    def _forget(self, candidates: dict[PeerId, Candidate]) -> None:
        """Keep in mind only what may be asked again, and nothing against one that says only now that it relays."""
        self._tried = {peer: tried for peer, tried in self._tried.items() if peer in candidates or peer in self._held}
        for peer, tried in self._tried.items():
            relays = peer in candidates and candidates[peer].relays is True
            if relays and not tried.relayed:
                tried.failures, tried.until = 0, 0.0
            tried.relayed = relays

    async def _fill(self, chosen: Iterable[Candidate]) -> None:
        """Try all at once; those that answer much later than the ones that do are left."""

        async def attempt(candidate: Candidate) -> None:
            await self._try(candidate)
            if len(self._held) >= _LEAST:
                scope.deadline = min(scope.deadline, trio.current_time() + self._timing.look)

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for candidate in chosen:
                    nursery.start_soon(attempt, candidate)

    def _choose(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Whom to try now: those that answered quickest, and unknown ones among them."""
        now = trio.current_time()
        ranked: list[tuple[float, Candidate]] = []
        for candidate in candidates:
            tried = self._tried.get(candidate.peer, _Tried(relayed=False))
            if candidate.peer not in self._held and candidate.relays is not False and tried.until <= now:
                ranked.append((self._rng.uniform(0.0, 2 * _UNMEASURED) if tried.answer is None else tried.answer, candidate))
        return [candidate for _, candidate in sorted(ranked, key=lambda one: one[0])][: _MOST - len(self._held)]

    async def _try(self, candidate: Candidate) -> None:
        """Have or renew a reservation at `candidate`; a failure costs a pause, and the reservation if we had one."""
        relay, timing = candidate.peer, self._timing
        tried = self._tried.setdefault(relay, _Tried(relayed=candidate.relays is True))
        began = trio.current_time()
        try:
            with deadline(_ANSWER, "a reservation"):
                await self._host.connect_straight(relay, candidate.addresses)
                seconds = await self._client.reserve(relay)
        except RemoteError as error:
            self._pause(relay)
            if relay in self._held:
                self._lose(relay, error.cause)
            return
        now = trio.current_time()
        tried.answer, tried.failures, tried.until = now - began, 0, 0.0
        lasts = min(seconds or timing.unclear, timing.longest)
        self._held[relay] = _Held(candidate.addresses, now + 0.75 * lasts)
        self._announce()
        self._emit(RelayHeld(relay, lasts))

    async def _check(self, relay: PeerId) -> None:
        """End a connection that died unnoticed: nobody would reach us through it."""
        if await fell_silent(self._host, relay, self._timing.pong):
            await self._host.disconnect(relay)
            if relay in self._held:
                self._lose(relay, "it does not answer")

    def _lose(self, relay: PeerId, reason: str) -> None:
        self._pause(relay)
        self._drop(relay, reason)

    def _drop(self, relay: PeerId, reason: str) -> None:
        del self._held[relay]
        self._announce()
        self._emit(RelayLost(relay, reason))

    def _pause(self, relay: PeerId) -> None:
        tried, now = self._tried.setdefault(relay, _Tried(relayed=False)), trio.current_time()
        if tried.until <= now:
            tried.until = now + min(self._timing.back_off * 2.0 ** min(tried.failures, 16), self._timing.longest_back_off)
            tried.failures += 1

    def _announce(self) -> None:
        reached = {relay: [one for one in held.addresses if straight(one)] for relay, held in self._held.items()}
        found = [through(relay, address) for relay, addresses in reached.items() for address in addresses[:_ADDRESSES]]
        self._host.circuits = tuple(dict.fromkeys(found))

    def _complain(self, want: Want) -> None:
        """Tell once when a node that nobody reaches is without a relay for too long; again after it had one."""
        now = trio.current_time()
        if self._held or want != "yes":
            self._complain_at = None
        elif self._complain_at is None:
            self._complain_at = now + self._timing.patience
        elif now >= self._complain_at:
            self._complain_at = math.inf
            asked = len(self._tried)
            cause = f"of {asked} that were asked none took us." if asked else "no member and no bootstrap offers to relay."
            self._emit(Troubled(NoRelayError.entry.code, f"This node is not reached from outside, and {cause}"))
