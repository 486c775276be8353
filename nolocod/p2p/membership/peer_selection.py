"""With whom this node exchanges: whom it draws, and whose offers it takes.

The rule: two members meet in their hours. A hash of both ids gives each pair hours of `_HOUR` rounds, so many that a node has
`_AT_ONCE` members to meet at any time, however many there are; no partner comes twice within an hour. Nobody who is always
there, always first, or many at one address has more of a node's steps than its share of the members, or little more; and
among honest nodes, who know the hours too, nothing is slower. A partner is drawn with the weight of
`Reputation.influence`, which verified exchanges earn and faults cost; those of an address group weigh no more than
`PER_GROUP` of others, and those behind a relay a quarter. Whoever is only heard of may be invented: such count and are drawn
as far as others of them answered. Preferring near or fast peers would make cliques (arXiv 2506.10911, 3.2); this does not.
Where own draws fail, as in an hour with nobody free, any member may be the partner.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import blake3

from nolocod.p2p.membership.table import PER_GROUP, share

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.membership.peer_scoring import Reputation
    from nolocod.proto.types import Member, Standing

RELAYED, HEARD_OF = 0.25, 0.2
"""The weight of a member that only a relay reaches, beside 1 for one that is reached straight; and the share of draws for
those that nobody here ever spoke to, where others than the last partner are free: they may be invented."""
_HOUR, _AT_ONCE = 16, 16
"""Rounds of an hour, and members whose hour it is at a time: one for each round. More would be attackers' too."""
_UNSURE = 2
"""Others may count so many times our members, as each believes in those that it met: who meets us by that count comes first."""
FEW = 16
"""Of no more members any may be the partner where own draws failed: in so few the hours of all may be over."""
_RECENT, _ANSWERED = 8, 6
"""Of so many steps so few may be answered ones: own and answered steps alternate, as far as that costs nothing."""
_MEMORY = 256
"""Steps whose partners are remembered, to know how large the run is where the table does not hold it."""


@lru_cache(maxsize=4096)
def _pair(one: PeerId, other: PeerId) -> bytes:
    return blake3.blake3(f"{one} {other}".encode()).digest()


def meet(one: PeerId, other: PeerId, number: int, count: int) -> bool:
    """Whether round `number` lies in an hour of two nodes, each with `count` others; with more of them hours are fewer."""
    if count <= _AT_ONCE:
        return True
    pair = _pair(min(one, other), max(one, other))
    hour = (number + pair[0] % _HOUR) // _HOUR
    whole = _HOUR if hour else (_HOUR - pair[0] % _HOUR) // 7  # the run began within it, and attackers use each hour at once
    drawn = int.from_bytes(blake3.blake3(pair + hour.to_bytes(8, "big")).digest(8), "big")
    return drawn * count * _HOUR < _AT_ONCE * whole << 64


@dataclass
class PeerSelection:
    """The partners of node `own`: `met` is told of each, after the exchange with it was committed."""

    own: PeerId
    rng: random.Random
    reputation: Reputation
    size: Callable[[], tuple[int, int]] = lambda: (0, 0)
    answers: Callable[[], Collection[bool]] = tuple
    """How many members are verified, and heard of (table.py); whether those answered that were dialled last, only heard of."""
    banned: Callable[[], Collection[PeerId]] = tuple
    """Who counts for nothing: with them there would be fewer hours, and no more partners."""
    _met: deque[tuple[PeerId, str]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    """The partners of the last steps and their address groups, the latest at the end."""
    _answered: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Of the last steps, whether another offered."""

    def draw(
        self, members: Sequence[Member], own: Standing, staleness: int, avoid: Collection[PeerId],
        carried: Collection[PeerId] = (), apart: Collection[PeerId] = (),
    ) -> PeerId | None:  # fmt: skip
        """Draw one training member whose round is at most `staleness` outer steps from ours, or None.

        Its round counts as of now or of the time of its heartbeat, whichever speaks for it: it says itself when it answers.
        `members` are the live ones, `avoid` those suspected or that refused lately, `carried` those that only a relay reaches;
        those `apart` are no members here.
        """
        fit, told, sure = self._field(members, own, staleness, apart)
        resting = self._resting(fit, sure)
        free = [member for member in fit if member.peer_id not in avoid]
        rested = [member for member in free if member.peer_id not in resting] or (free if sure <= FEW else [])
        known, all_of_them = [one for one in rested if one.group], sure + sum(one.peer_id in apart for one in members)
        chosen = [one for one in known if meet(self.own, one.peer_id, own.round, all_of_them)]  # others may not know of `apart`
        by_theirs = [one for one in chosen if meet(self.own, one.peer_id, max(0, own.round + one.lead), all_of_them)]
        surely = [one for one in by_theirs if meet(self.own, one.peer_id, own.round, _UNSURE * all_of_them)]
        chosen = surely or by_theirs or chosen or (known if apart else [])  # who says no loses us a round trip
        heard = [one for one in rested if not one.group and meet(self.own, one.peer_id, own.round, told)]
        others = [one for one in chosen if not self._met or one.peer_id != self._met[-1][0]]  # than the last partner
        trust = share(self.answers()) * (HEARD_OF if others else 1.0) if any(member.group for member in fit) else 1.0
        chosen = heard if heard and self.rng.random() < trust else chosen
        crowds = Counter(member.group for member in fit)
        weights = [
            self.reputation.influence(member.peer_id)
            * (RELAYED if member.peer_id in carried else 1.0)
            * (min(1.0, PER_GROUP / crowds[member.group]) if "/" in member.group else 1.0)
            for member in chosen
        ]
        return self.rng.choices(chosen, weights)[0].peer_id if chosen else None

    def admits(
        self, peer: PeerId, members: Sequence[Member], own: Standing, staleness: int, apart: Collection[PeerId] = (),
        *, late: bool,
    ) -> bool:  # fmt: skip
        """Whether an offer of the member `peer`, that is not `apart`, may be taken; `late`: our own draws have failed."""
        fit, told, sure = self._field(members, own, staleness, apart)
        if peer in self._resting(fit, sure):
            return False
        count = sure if any(member.peer_id == peer and member.group for member in members) else told
        if count <= (FEW if late else 2) or (late and apart):
            return True
        group, groups = _group(peer, members), [member.group for member in fit if member.group]
        of_group = sum(one == group for _, one in list(self._met)[-4 * PER_GROUP :])
        if not late and group and of_group >= PER_GROUP and 2 * groups.count(group) <= len(groups):
            return False
        return (late or sum(self._answered) < _ANSWERED) and meet(self.own, peer, own.round, count)

    def met(self, peer: PeerId, members: Sequence[Member], *, offered: bool) -> None:
        """An exchange with `peer` was committed, that it `offered`."""
        self._met.append((peer, _group(peer, members)))
        self._answered.append(offered)

    def _field(
        self, members: Sequence[Member], own: Standing, staleness: int, apart: Collection[PeerId]
    ) -> tuple[list[Member], int, int]:
        """Who may be a partner by its round, and how many may (`count`), as if those `apart` and the banned were not there."""
        out = {*apart, *self.banned()}
        kept = [member for member in members if member.peer_id not in out]
        fit = near(kept, own, staleness)
        return fit, *self.count(kept, fit, len(members) - len(kept))

    def count(self, members: Sequence[Member], fit: Collection[Member], without: int = 0) -> tuple[int, int]:
        """How many may be partners as we are told, and as we believe: of those that are only heard of as many as answer."""
        verified, heard_of = self.size()
        idle = sum(member.state != "training" for member in members) + without
        met = {peer for peer, _ in self._met}.union(member.peer_id for member in fit if member.group)
        sure = max(verified - idle, len(met))
        believed = round(share(self.answers()) * heard_of) if 2 * sure > FEW else 0
        return max(verified + heard_of - idle, len(met.union(member.peer_id for member in fit))), sure + believed

    def _resting(self, fit: Sequence[Member], sure: int) -> set[PeerId]:
        """Partners of the last steps; half of a small run's members, and never all that we spoke to."""
        steps = min(_HOUR, len(fit) // 2, sure // 2, 3 * sum(bool(member.group) for member in fit) // 4)
        return {peer for peer, _ in list(self._met)[-steps:]} if steps else set()


def near(members: Sequence[Member], own: Standing, staleness: int) -> list[Member]:
    trained = [member for member in members if member.state == "training"]
    return [one for one in trained if min(abs(one.standing.round - own.round), abs(one.lead)) <= staleness]


def _group(peer: PeerId, members: Sequence[Member]) -> str:
    """The network in which `peer` was verified; none of those that only relays reach, and of private ones."""
    return next((member.group for member in members if member.peer_id == peer and "/" in member.group), "")
