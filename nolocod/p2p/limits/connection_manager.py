"""Which connections a node keeps (libp2p's connection manager): who is let in, and who goes when there are too many.

The rule: three quarters of all connections may be others' doing, a quarter is left for those that we open. Who is one too
many comes from the source with most connections. So whoever holds many addresses shuts out nobody who comes from another
one. Relays, bootstraps, partners and members are protected, a handful from each source, as identities are free; others
have some seconds to become one of these, and then those who came first go first. Above the low water idle strangers go
without need. No clock and no sockets: `now` is a monotonic time in seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.p2p.limits.address_groups import source
from nolocod.p2p.limits.rate_limits import Rate, TokenBuckets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nolocod.identity import PeerId

STRANGER, MEMBER, PARTNER, KEPT = range(4)
"""What a peer is to us: KEPT are relays that we use and bootstraps, PARTNER one with whom exchanges were committed."""
ARRIVALS = Rate(2, 64)
"""Connections from one source: those of 64 nodes that come back at once, and come and go each half a minute."""
_PER_BAN = 30
"""Arrivals that a ban costs the source of the banned: new identities are free, and a handshake is not."""
_PROTECTED = 8
"""Members and better of one source that are protected."""
_GRACE = 10.0
"""Seconds after which a stranger may have become a member."""
_IDLE = 60.0
"""Seconds without a byte after which a stranger goes, above the low water."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Of connections that others open to us, those that are not told yet who they are included."""

    per_source: int = 64
    half_open: int = 64
    """In their handshake at once."""
    half_open_per_source: int = 16
    arrivals: Rate = ARRIVALS
    """From one source."""


@dataclass(eq=False)
class Held:
    """One connection; `arrived`: others opened it. `peer` is None during its handshake."""

    source: str
    since: float
    drop: Callable[[], object] = lambda: None
    peer: PeerId | None = None
    arrived: bool = True
    busy: bool = False
    """Streams are open on it."""
    heard_at: float = 0.0


class ConnectionManager:
    """Of a host that may have `most` connections; `limits` are for those that arrive."""

    def __init__(self, most: int, limits: ConnectionLimits) -> None:
        self.open: Callable[[], Sequence[Held]] = tuple
        """All connections whose handshake is over."""
        self.rank: Callable[[PeerId], int] = lambda _: STRANGER
        self.turned_away = 0
        self.half_open: dict[Held, None] = {}
        self._most = most
        self._limits = limits
        self._arrivals = TokenBuckets(limits.arrivals)

    def admit(self, host: str, now: float, drop: Callable[[], object]) -> Held | None:
        """Let a connection from `host` begin its handshake; None if it is one too many. It is to be taken out of `half_open`
        afterwards."""
        new, limits = Held(source(host), now, drop), self._limits
        beginning = sum(one.source == new.source for one in self.half_open)
        may = beginning < limits.half_open_per_source and self._arrivals.take(new.source, now)
        inside = sum(one.source == new.source and one.arrived for one in self.open()) if may else 0
        if not may or inside + beginning >= limits.per_source or not self.has_room(new.source, now):
            self.turned_away += 1
            return None
        self.half_open[new] = None
        if len(self.half_open) > limits.half_open:
            least = self._least([*self.half_open], now) or new
            del self.half_open[least]
            least.drop()
            self.turned_away += least is new
        return new if new in self.half_open else None

    def blame(self, source: str, now: float) -> None:
        """Let in fewer from `source`, where one was banned that it had open: who shares its address could have been kept
        out by its connections as well."""
        self._arrivals.charge(source, _PER_BAN, now)

    def has_room(self, source: str, now: float, *, arrived: bool = True) -> bool:
        """Whether one more connection with `source` would stay; not `arrived`: one that we open."""
        new = Held(source, now, arrived=arrived)
        return self._excess([*self.open(), new], now) is not new

    def enforce(self, now: float) -> None:
        """After a handshake: drop the connection that is one too many."""
        if (least := self._excess(self.open(), now)) is not None:
            least.drop()

    def trim(self, now: float) -> None:
        """Drop idle strangers, the longest idle first, down to the low water: half of all."""
        held = self.open()
        idle = [one for one in held if not (one.busy or self._rank(one)) and now - one.heard_at >= _IDLE]
        for one in sorted(idle, key=lambda one: one.heard_at)[: max(len(held) - self._most // 2, 0)]:
            one.drop()

    def _rank(self, one: Held) -> int:
        return self.rank(one.peer) if one.peer is not None else STRANGER

    def _excess(self, held: Sequence[Held], now: float) -> Held | None:
        """Who of `held` has to go, if they are too many."""
        arrived = [one for one in held if one.arrived]
        if len(arrived) > self._most - self._most // 4:
            least = self._least(arrived, now)
        elif len(held) > self._most:  # by those that we opened, which are more than their quarter
            least = self._least([one for one in held if not one.arrived or now - one.since >= _GRACE], now)
        else:
            return None
        return least or max(reversed(held), key=lambda one: one.since)

    def _least(self, held: Sequence[Held], now: float) -> Held | None:
        """Of the unprotected, one of the largest source: the oldest past its grace, else the newest. If all are protected,
        the idle one that we opened and did not hear for longest."""
        protected, inside, crowd = set[Held](), Counter[str](), Counter(one.source for one in held)
        for one in sorted(held, key=lambda one: (-self._rank(one), one.since)):
            fresh = not one.arrived and now - one.since < _GRACE  # we have just dialled it, and have a use for it
            if fresh or (self._rank(one) and inside[one.source] < _PROTECTED):
                inside[one.source] += not fresh
                protected.add(one)

        def order(one: Held) -> tuple[int, float]:
            age = now - one.since
            return crowd[one.source], age if age >= _GRACE else -age

        if may := [one for one in held if one not in protected]:
            return max(reversed(may), key=order)
        settled = [one for one in held if not one.arrived and now - one.since >= _GRACE]
        idle = [one for one in settled if not one.busy and self._rank(one) < KEPT]
        return min(idle, key=lambda one: one.heard_at, default=None)
