"""What partners cost a node: the time of exchanges that came to nothing.

The rule: all partners together may have a sixteenth of our time for nothing, and twenty seconds besides. While they had more we
are wary: a partner has less time for its part (`Limits.paced`), and whoever took some of ours is set apart, until all is
paid: partners are drawn, and their offers taken, as if it were not there, as long as there are others. Who takes a sixteenth
and four minutes alone gets nothing more. Nobody is blamed for it: an honest partner on a bad line comes to the same. Who says
soon that it is busy is charged an eighth: training went on, and nothing was copied or sent. So half of our time may go into
asking those who are in another exchange, again and again, across a line that this exchange fills.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nolocod.identity import PeerId

_SHARE, _FORGIVEN = 15.0, 20.0
_FORGIVEN_ONE = 240.0
"""One broken line is waited for as long (`Limits.longest_resume_seconds`), and some more was spent before."""
_SLIGHT = 1.0
"""So many seconds set nobody apart, and are soon."""
_ASKED = 1 / 8
"""Of a short time for an answer, what is charged."""
_KEPT = 1024


class WastedTime:
    """By partner. Times in seconds of one clock."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, float] = {}
        """When it has paid for all, what is forgiven aside."""
        self._paid = 0.0  # when all have

    def charge(self, peer: PeerId, seconds: float, now: float, *, busy: bool = False) -> None:
        """An exchange with `peer` took `seconds`, and came to nothing; `busy`: it said only that."""
        if busy and seconds <= _SLIGHT:
            seconds *= _ASKED
        if now >= self._paid:
            self.peers = {other: until for other, until in self.peers.items() if until > now}
        self._paid = max(now, self._paid) + _SHARE * seconds
        if seconds > _SLIGHT or peer in self.peers:
            self.peers[peer] = max(now, self.peers.pop(peer, now)) + _SHARE * seconds
            if len(self.peers) > _KEPT:
                del self.peers[next(iter(self.peers))]

    def by(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` took too much of it alone."""
        return self.peers.get(peer, now) > now + _SHARE * _FORGIVEN_ONE

    def wary(self, now: float) -> bool:
        """Whether all partners together took too much."""
        return self._paid > now + _SHARE * _FORGIVEN

    def apart(self, now: float) -> set[PeerId]:
        """Who had a part in too much."""
        return {*self.peers} if self.wary(now) else set()
