"""What each node gave, counted from receipts that both partners signed.

The rule: a receipt tells of each side how many tokens were behind its replica, and when, as both signed it. What a node trained
between two of its receipts counts, if it was not away in between; whoever signed the later one vouches for it. Of what one
partner vouches for, a day counts and as much as all other partners vouch for; and nobody trained more in a time than so many
times the median of those whom the reader has met (docs/contributions.md says what is left to who lies). Tokens only grow along
a replica's life, so any of its receipts may be missing: fewer are needed than there are exchanges. No clock in here: times are
those in receipts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nolocod.errors import ProtocolError
from nolocod.identity import PeerId
from nolocod.observe.events import Contribution
from nolocod.proto.envelope import MAX_NUMBER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from nolocod.proto.receipt import Receipt
    from nolocod.proto.types import Member

AWAY = 3600.0
"""Seconds between two receipts of a node, after which nothing in between counts: it may have taken over others' tokens."""
SKEW = 600.0
"""Seconds by which the clocks of two partners may differ in a receipt that counts."""
ALONE = 86_400.0
"""Seconds for which one partner may vouch, beside as many as all others do."""
FASTEST = 8.0
"""Times the median of tokens per second."""
_MEDIAN_OF, _LONG_ENOUGH = 3, 600.0
"""Nodes of which a median is taken at least, and the seconds vouched for that make one of them."""
PEERS = 1024
"""Nodes that are counted; one more takes the place of the one that gave least."""
PARTNERS = 128
"""Partners that are told apart; of more, the two that vouch for least become one."""


@dataclass(frozen=True, slots=True)
class Point:
    """One side of a receipt: how far `peer` was at `time`, in seconds of its own clock, and who signed that too."""

    peer: PeerId
    partner: PeerId
    time: float
    round: int
    tokens: int


def points(receipt: Receipt) -> tuple[Point, ...]:
    """Both sides of `receipt`, the offerer's first; empty if no times that it tells can count. ProtocolError if it is none."""
    parsed = receipt.parsed
    sides = parsed.sides
    if sides[0].peer_id == sides[1].peer_id:
        raise ProtocolError("a receipt is of one peer with itself.")
    if any(max(side.standing.round, side.standing.tokens) >= MAX_NUMBER for side in sides):
        raise ProtocolError("a receipt's numbers are too large.")
    times = [side.standing.time_ms / 1000 for side in sides]
    if not all(times) or abs(times[0] - times[1]) > SKEW:
        return ()
    return tuple(
        Point(PeerId(one.peer_id), PeerId(other.peer_id), time, one.standing.round, one.standing.tokens)
        for one, other, time in zip(sides, reversed(sides), times, strict=True)
    )


@dataclass
class _Vouched:
    """What one partner vouches for."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float) -> None:
        self.seconds += seconds
        self.tokens += tokens


@dataclass
class _Account:
    """Of one node."""

    last: Point
    exchanges: int = 1
    vouched: dict[PeerId, _Vouched] = field(default_factory=dict)

    def take(self, point: Point) -> None:
        before, self.last = self.last, point
        self.exchanges += 1
        seconds, tokens = point.time - before.time, point.tokens - before.tokens
        if seconds <= AWAY and tokens > 0 and point.round > before.round:
            self.vouched.setdefault(point.partner, _Vouched()).add(seconds, tokens)
        if len(self.vouched) > PARTNERS:
            least, next_least = sorted(self.vouched, key=lambda one: self.vouched[one].seconds)[:2]
            gone = self.vouched.pop(least)
            self.vouched[next_least].add(gone.seconds, gone.tokens)

    @property
    def seconds(self) -> float:
        """For which somebody vouches."""
        return sum(one.seconds for one in self.vouched.values())

    @property
    def rate(self) -> float:
        """Tokens per second; 0 while little was vouched for."""
        seconds = self.seconds
        return sum(one.tokens for one in self.vouched.values()) / seconds if seconds >= _LONG_ENOUGH else 0.0

    def counted(self, most: float) -> tuple[float, float]:
        """Seconds and tokens that count, where `most` tokens per second do."""
        total = self.seconds
        seconds = tokens = 0.0
        for one in self.vouched.values():
            share = min(one.seconds, ALONE + total - one.seconds) / one.seconds
            seconds += share * one.seconds
            tokens += share * min(one.tokens, most * one.seconds)
        return seconds, tokens


class Tally:
    """Counts receipts, of each node in the order of its times; what is older than what was counted last is left out."""

    def __init__(self, own: PeerId | None = None) -> None:
        """`own`: the reader, if it is a node of the run; it always has its place."""
        self._own = own
        self._accounts: dict[PeerId, _Account] = {}

    def add(self, sides: Iterable[Point]) -> None:
        """Count the sides of one receipt."""
        for point in sides:
            account = self._accounts.get(point.peer)
            if account is None:
                if len(self._accounts) >= PEERS:
                    others = (peer for peer in self._accounts if peer != self._own)
                    del self._accounts[min(others, key=lambda peer: self._accounts[peer].seconds)]
                self._accounts[point.peer] = _Account(point)
            elif point.time > account.last.time:
                account.take(point)

    def add_all(self, receipts: Iterable[Sequence[Point]]) -> None:
        """Count the sides of receipts, in any order."""
        for sides in sorted(filter(None, receipts), key=lambda sides: sides[0].time):
            self.add(sides)

    def contributions(
        self, names: Mapping[PeerId, str] | None = None, judges: Collection[PeerId] | None = None
    ) -> list[Contribution]:
        """What each node gave, who gave most tokens first; `names` are what they are called, as they say. The pace of `judges`
        is the measure (None: of all): anybody can invent members."""
        rates = [one.rate for peer, one in self._accounts.items() if one.rate and (judges is None or peer in judges)]
        most = FASTEST * statistics.median(rates) if len(rates) >= _MEDIAN_OF else float("inf")
        found = []
        for peer, account in self._accounts.items():
            seconds, tokens = account.counted(most)
            name, partners = (names or {}).get(peer, ""), len(account.vouched)
            found.append(Contribution(peer, name, round(tokens), seconds, account.exchanges, partners))
        return sorted(found, key=lambda one: (-one.tokens, -one.exchanges, one.peer_id))

    def seen_among(self, members: Collection[Member]) -> list[Contribution]:
        """The same by the names of `members`; the reader and those of them that it verified are the judges."""
        met = {one.peer_id for one in members if one.verified} | ({self._own} if self._own else set())
        return self.contributions({one.peer_id: one.name for one in members}, met)
