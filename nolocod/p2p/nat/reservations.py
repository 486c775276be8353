"""Keeps reservations at relays for a node that others cannot reach straight.

The rule: two reservations at least, at different relays, on straight connections that are kept alive; one that is
lost is told and replaced at once. Three relays are tried beside each other and those that answer first are kept,
so that the quick and the idle are preferred without a word about load. No relay's clock is trusted: renewal is due
at three quarters of the shorter of its word and our own bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from nolocod.errors import NoRelayError, PeerUnavailableError, RemoteError
from nolocod.identity import short
from nolocod.observe.events import RelayHeld, RelayLost, Troubled
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.keepalive import fell_silent
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

_UNMEASURED = 0.2
"""Seconds that a relay is taken to answer in before it was asked, on average."""
_ADDRESSES = 2
"""Of one relay, in what we announce: heartbeats hold eight in all."""


@dataclass(frozen=True)
class Candidate:
    """A node that may relay for us. `gives` is its own word: None where it said nothing yet."""

    peer: PeerId
    addresses: tuple[str, ...]
    gives: bool | None = None


@dataclass(frozen=True)
class Needs:
    """What a keeper asks about its node before each look."""

    want: Callable[[], Want]
    candidates: Callable[[], Iterable[Candidate]]


@dataclass(frozen=True)
class KeeperLimits:
    """Counts of relays; times in seconds."""

    least: int = 2
    """Fewer than so many reservations are filled up, to `most`."""
    most: int = 3
    look: float = 1.0
    """Between two looks at what we hold."""
    answer: float = 8.0
    """A relay that takes longer over dial and answer is given up."""
    longest: float = 1800.0
    """Whatever the relay says, a reservation is renewed before so long."""
    unclear: float = 60.0
    """For a relay whose word lies in the past: its clock is not ours."""
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

    `gave`: it said that it relays when it was last looked at. One that begins to say so is asked at once.
    """

    gave: bool
    answer: float | None = None
    failures: int = 0
    until: float = 0.0


@dataclass
class _Without:
    """Since when a node that needs relays has none, and whether its owner was told."""

    since: float | None = None
    told: bool = False


class ReservationKeeper:
    """Holds the reservations of one node and sets `host.circuits`. `run` does the work."""

    def __init__(
        self,
        host: Host,
        client: RelayClient,
        needs: Needs,
        emit: Emit,
        rng: random.Random,
        limits: KeeperLimits | None = None,
    ) -> None:
        self._host = host
        self._client = client
        self._needs = needs
        self._emit = emit
        self._rng = rng
        self._limits = limits or KeeperLimits()
        self._held: dict[PeerId, _Held] = {}
        self._tried: dict[PeerId, _Tried] = {}
        self._without = _Without()

    @property
    def held(self) -> tuple[PeerId, ...]:
        """Where we hold a reservation now, the oldest first."""
        return tuple(self._held)

    async def run(self) -> None:
        """Keep reservations while they are wanted, until cancelled."""
        while True:
            want = self._needs.want()
            if want == "no":
                self._let_all_go()
            else:
                await self._look()
            self._complain(want)
            await trio.sleep(self._limits.look * self._rng.uniform(0.8, 1.2))

    def wake(self) -> None:
        """Forget what failed: the network is another one now."""
        for tried in self._tried.values():
            tried.failures, tried.until = 0, 0.0

    async def _look(self) -> None:
        host = self._host
        candidates = {one.peer: one for one in self._needs.candidates() if one.peer != host.own and not host.shuns(one.peer)}
        self._forget(candidates)
        for relay in filter(host.shuns, list(self._held)):
            self._lose(relay, "it is banned here, and its streams are reset")
        for relay in [relay for relay in self._held if not self._host.straight(relay)]:
            self._lose(relay, "the connection to it ended")
        for relay in [relay for relay in self._held if relay in candidates and candidates[relay].gives is False]:
            self._lose(relay, "it relays no more")
        now = trio.current_time()
        async with trio.open_nursery() as nursery:
            for relay, held in list(self._held.items()):
                if now >= held.renew_at:
                    nursery.start_soon(self._try, candidates.get(relay, Candidate(relay, held.addresses)))
                elif now - self._host.heard_at(relay) >= self._limits.ping:
                    nursery.start_soon(self._check, relay)
            if len(self._held) < self._limits.least:
                nursery.start_soon(self._fill, self._choose(candidates.values()))

    def _forget(self, candidates: dict[PeerId, Candidate]) -> None:
        """Keep in mind only what may be asked again, and nothing against one that says only now that it relays."""
        self._tried = {peer: tried for peer, tried in self._tried.items() if peer in candidates or peer in self._held}
        for peer, tried in self._tried.items():
            gives = peer in candidates and candidates[peer].gives is True
            if gives and not tried.gave:
                tried.failures, tried.until = 0, 0.0
            tried.gave = gives

    async def _fill(self, chosen: Iterable[Candidate]) -> None:
        """Try all at once; those that answer much later than the ones that do are left."""

        async def attempt(candidate: Candidate) -> None:
            await self._try(candidate)
            if len(self._held) >= self._limits.least:
                scope.deadline = min(scope.deadline, trio.current_time() + self._limits.look)

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for candidate in chosen:
                    nursery.start_soon(attempt, candidate)

    def _choose(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Whom to try now: those that answered quickest, and unknown ones among them."""
        now = trio.current_time()

        def expected(candidate: Candidate) -> float:
            tried = self._tried.get(candidate.peer)
            if tried is not None and tried.answer is not None:
                return tried.answer
            return self._rng.uniform(0.0, 2 * _UNMEASURED)

        free = [
            candidate
            for candidate in candidates
            if candidate.peer not in self._held
            and candidate.gives is not False
            and self._tried.get(candidate.peer, _Tried(gave=False)).until <= now
        ]
        return sorted(free, key=expected)[: self._limits.most - len(self._held)]

    async def _try(self, candidate: Candidate) -> None:
        """Have or renew a reservation at `candidate`; a failure costs a pause, and the reservation if we had one."""
        relay, limits = candidate.peer, self._limits
        tried = self._tried.setdefault(relay, _Tried(gave=candidate.gives is True))
        began = trio.current_time()
        try:
            with deadline(limits.answer, "a reservation"):
                await self._host.connect(relay, [address for address in candidate.addresses if straight(address)])
                if not self._host.straight(relay):
                    raise PeerUnavailableError(f"{short(relay)} is reached only through another relay.")
                seconds = await self._client.reserve(relay)
        except RemoteError as error:
            self._pause(relay)
            if relay in self._held:
                self._lose(relay, error.cause)
            return
        now = trio.current_time()
        tried.answer, tried.failures, tried.until = now - began, 0, 0.0
        lasts = min(seconds or limits.unclear, limits.longest)
        self._held[relay] = _Held(candidate.addresses, now + 0.75 * lasts)
        self._announce()
        self._emit(RelayHeld(relay, lasts))

    async def _check(self, relay: PeerId) -> None:
        """End a connection that died without a word: nobody would reach us through it."""
        if await fell_silent(self._host, relay, self._limits.pong):
            await self._host.disconnect(relay)
            if relay in self._held:
                self._lose(relay, "it does not answer")

    def _lose(self, relay: PeerId, reason: str) -> None:
        del self._held[relay]
        self._pause(relay)
        self._announce()
        self._emit(RelayLost(relay, reason))

    def _pause(self, relay: PeerId) -> None:
        tried = self._tried.setdefault(relay, _Tried(gave=False))
        now = trio.current_time()
        if tried.until > now:
            return
        tried.until = now + min(self._limits.back_off * 2.0 ** min(tried.failures, 16), self._limits.longest_back_off)
        tried.failures += 1

    def _let_all_go(self) -> None:
        """Reached straight, we need none: the relays keep our places until these run out."""
        if not self._held:
            return
        for relay in list(self._held):
            del self._held[relay]
            self._emit(RelayLost(relay, "not needed any more"))
        self._announce()

    def _announce(self) -> None:
        found = [
            through(relay, address)
            for relay, held in self._held.items()
            for address in [one for one in held.addresses if straight(one)][:_ADDRESSES]
        ]
        self._host.circuits = tuple(dict.fromkeys(found))

    def _complain(self, want: Want) -> None:
        """Tell once when a node that nobody reaches is without a relay for too long; again after it had one."""
        now, without = trio.current_time(), self._without
        if self._held or want != "yes":
            self._without = _Without()
        elif without.since is None:
            without.since = now
        elif not without.told and now - without.since >= self._limits.patience:
            without.told = True
            asked = len(self._tried)
            cause = f"of {asked} that were asked none took us." if asked else "no member and no bootstrap offers to relay."
            self._emit(Troubled(NoRelayError.entry.code, f"This node is not reached from outside, and {cause}"))
