"""What partners cost a node: the time of exchanges that came to nothing.

The rule: who takes our time for nothing may have a sixteenth of it, and two minutes besides. After that its offers are
refused, and nothing is offered to it, until 15 times as much time has gone by. Nobody is blamed for it: an honest partner
on a bad line, or one that was suspended, comes to the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nolocod.identity import PeerId

_SHARE, _FORGIVEN = 15.0, 120.0


class WastedTime:
    """By partner. Times in seconds of one clock."""

    def __init__(self) -> None:
        self._until: dict[PeerId, float] = {}  # when it has paid for all, _FORGIVEN aside

    def charge(self, peer: PeerId, seconds: float, now: float) -> None:
        """An exchange with `peer` took `seconds`, and came to nothing."""
        before = max(now, self._until.get(peer, now))
        self._until = {other: until for other, until in self._until.items() if until > now}
        self._until[peer] = before + _SHARE * seconds

    def by(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` took too much of it."""
        return self._until.get(peer, now) > now + _SHARE * _FORGIVEN

    def peers(self, now: float) -> list[PeerId]:
        return [peer for peer in self._until if self.by(peer, now)]
