"""How often and how much a peer may have of this node: by peer, and by the address that it comes from.

The rule: an identity costs nothing and an address costs something, so whatever is limited for a peer is limited for its
address too (address_groups.customer). What is remembered is bounded, and forgotten once it means nothing any more. No
clock in here: `now` is a monotonic time in seconds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nolocod.p2p.limits.address_groups import customer
from nolocod.p2p.limits.newest import Newest

if TYPE_CHECKING:
    from nolocod.identity import PeerId

_KEPT = 1024
"""Names whose buckets are kept: of those that are not full, the ones used last."""


@dataclass(frozen=True)
class Rate:
    """`burst` at once, and `per_second` in the long run."""

    per_second: float
    burst: float

    def times(self, factor: float) -> Rate:
        return Rate(self.per_second * factor, self.burst * factor)


class TokenBuckets:
    """One token bucket for each name (RFC 2697 has the idea), all of the same `rate`."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when there were so many

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, name: str, now: float) -> bool:
        """Take a token; False if there is none."""
        level = self._level(name, now)
        if level < 1:
            return False
        self._levels[name] = (level - 1, now)
        self._levels.move_to_end(name)
        while len(self._levels) > _KEPT or (self._levels and self._level(next(iter(self._levels)), now) >= self.rate.burst):
            self._levels.popitem(last=False)
        return True

    def give_back(self, name: str, now: float) -> None:
        """What was taken was not needed."""
        if name in self._levels:
            self._levels[name] = (min(self.rate.burst, self._level(name, now) + 1), now)

    def charge(self, name: str, count: float, now: float) -> None:
        """Take `count` tokens of `name` that has or has not so many: what is missing is its debt, a burst at most."""
        self._levels[name] = (max(self._level(name, now) - count, -self.rate.burst), now)

    def _level(self, name: str, now: float) -> float:
        level, then = self._levels.get(name, (self.rate.burst, now))
        return min(self.rate.burst, level + (now - then) * self.rate.per_second)


class Windows:
    """What happened in the last `span` seconds, by name: at most `most` of each of `_KEPT` names."""

    def __init__(self, most: int, span: float) -> None:
        self._most = most
        self._span = span
        self._taken: deque[tuple[float, str]] = deque()

    def full(self, name: str, now: float) -> bool:
        while self._taken and self._taken[0][0] <= now - self._span:
            self._taken.popleft()
        counts = Counter(other for _, other in self._taken)
        return counts[name] >= self._most or (name not in counts and len(counts) >= _KEPT)

    def take(self, name: str, now: float) -> bool:
        """Count one more; False if there is no room for it."""
        if self.full(name, now):
            return False
        self._taken.append((now, name))
        return True


# --- streams ----------------------------------------------------------------------------------------------

ALL = Rate(20, 120)
"""Streams that a peer may open, whatever they are for."""
NORMAL = Rate(10, 60)
"""Streams of one protocol that a peer may open: an exchange may take less than a second."""
RARE = Rate(1, 60)
"""Of protocols that a node asks a peer a few times in some minutes: the DHT, relays, AutoNAT, hole punching."""
BANNED = Rate(0.1, 8)
"""Connections that a banned peer may open, and streams: enough to be told why."""
_PER_SOURCE = 4
"""By how much more all peers of one source may have than one of them."""
_INSISTING = 2
"""Streams more for which one counts that is refused for its source's sake: who goes on all the same floods."""


class StreamLimiter:
    """Counts the streams that peers open; `rate` is that of one peer.

    Who exceeds its own rate floods, and is blamed (46 such streams are a ban). An honest node never does: it gossips with a
    peer once in three seconds at most, exchanges with it less than once a second, and asks twice a second for ten seconds on
    two protocols while it looks for its run: 2 streams a second, and 40 in ten seconds. Nobody is blamed for the others of
    its source: 64 nodes behind one NAT draw us as often as one does, all together.
    """

    def __init__(self, rate: Rate = NORMAL) -> None:
        self._of_peers, self._of_sources = TokenBuckets(rate), TokenBuckets(rate.times(_PER_SOURCE))

    def objection(self, peer: PeerId, source: str | None, now: float) -> Literal["peer", "source"] | None:
        """Who had too many of these streams, if this is one too many: the peer, or all of its `source` (None: nobody counts
        them) together."""
        if not self._of_peers.take(peer, now):
            return "peer"
        if source is not None and not self._of_sources.take(source, now):
            self._of_peers.charge(peer, _INSISTING, now)
            return "source"
        return None


# --- dialling ---------------------------------------------------------------------------------------------


PUNCHES = Rate(1, 60)
"""Punches to one address, ten a second until both ends meet, within a second or two as a rule."""


class DialLimiter:
    """How often we may dial in vain where members say that they are: they may name anybody's address.

    What counts is the address that is dialled, however many members name it. Where one of ours has answered before, as
    behind a NAT that many share, more is allowed.
    """

    def __init__(self, unknown: Rate = Rate(0.5, 40), known: Rate = Rate(5, 200)) -> None:
        self._unknown = TokenBuckets(unknown)
        self._known = TokenBuckets(known)
        self._answered = Newest[str, None](_KEPT)

    def may(self, host: str, now: float) -> bool:
        """Whether to dial `host` now, which counts as in vain until it has `answered`."""
        name = customer(host)
        return self._buckets(name).take(name, now)

    def answered(self, host: str, now: float) -> None:
        """The one who was dialled is there."""
        name = customer(host)
        self._buckets(name).give_back(name, now)
        self._answered[name] = None

    def overtaken(self, host: str, now: float) -> None:
        """Another address of the same peer was faster, so nobody knows whether this one would have answered.

        It counts as where one of ours has answered: whose addresses they are chooses the race and who wins it.
        """
        name = customer(host)
        if name not in self._answered and self._known.take(name, now):
            self._unknown.give_back(name, now)

    def _buckets(self, name: str) -> TokenBuckets:
        return self._known if name in self._answered else self._unknown
