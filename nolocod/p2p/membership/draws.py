"""Who may offer to whom in which round, by a draw that both can verify (manifest: `trust.draws`).

The rule: a pair is drawn in the round of the one who offers if the hash of run, round and both ids is below a threshold
that both can work out: about `draws` of all members are drawn for each, others in each round, and nobody chooses
his victim. Both know the number of members only roughly, so that whoever answers lets pass up to `_SLACK` times as
many. A round that was used is used up: else one lucky round could be claimed for as long as staleness allows.
No clock and no network in here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import blake3

from nolocod.errors import NotDrawnError
from nolocod.identity import short
from nolocod.proto.types import Accept, Refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nolocod.identity import PeerId
    from nolocod.proto.types import Answer, Member, Offer

_SLACK = 2.0
_DOMAIN = b"nolocod draw 1\0"
_KEPT = 1024


def luck(run_id: str, round: int, one: PeerId, other: PeerId) -> float:
    """The pair's number in [0, 1) for a round: the same for both, and unlike that of any other pair or round."""
    low, high = sorted((one, other))
    raw = "\0".join((run_id, str(round), low, high)).encode()
    return int.from_bytes(blake3.blake3(_DOMAIN + raw).digest(length=6), "big") / 2**48


@dataclass
class Draw:
    """The draws of run `run_id` that node `own` has part in; `draws` 0 lets everybody choose among all."""

    run_id: str
    own: PeerId
    draws: int
    _used: OrderedDict[PeerId, int] = field(default_factory=OrderedDict)
    """The round in which each peer's last offer was accepted."""

    def undrawn(self, members: Iterable[Member], round: int) -> set[PeerId]:
        """Those of the live `members` to whom we may not offer in our `round`."""
        if not self.draws:
            return set()
        known = [member.peer_id for member in members if member.state == "training"]
        share = self._share(len(known))
        if share >= 1:
            return set()
        return {peer for peer in known if luck(self.run_id, round, self.own, peer) >= share}

    def objection(self, peer: PeerId, round: int, members: Callable[[], Iterable[Member]]) -> NotDrawnError | None:
        """Why `peer` may not offer to us in its `round`; None if it may. `members` gives the live ones that we know."""
        if not self.draws:
            return None
        share = _SLACK * self._share(sum(member.state == "training" for member in members()))
        if share >= 1:
            return None
        if luck(self.run_id, round, self.own, peer) >= share:
            return NotDrawnError(f"{short(peer)} and {short(self.own)} are no pair in round {round}.")
        if round <= self._used.get(peer, -1):
            return NotDrawnError(f"{short(peer)} offered in round {self._used[peer]} before, and now in round {round}.")
        return None

    def answer(self, offer: Offer, members: Callable[[], Iterable[Member]], decide: Callable[[Offer], Answer]) -> Answer:
        """What `decide` says to an offer that the draw allows; a round in which it says yes is used up."""
        objection = self.objection(offer.partner, offer.standing.round, members)
        if objection is not None:
            return Refuse(objection.code, objection.cause)
        answer = decide(offer)
        if isinstance(answer, Accept):
            self.accepted(offer.partner, offer.standing.round)
        return answer

    def accepted(self, peer: PeerId, round: int) -> None:
        """An offer of `peer` in its `round` was accepted."""
        if self.draws:
            self._used[peer] = round
            self._used.move_to_end(peer)
            if len(self._used) > _KEPT:
                self._used.popitem(last=False)

    def _share(self, members: int) -> float:
        """Of all pairs, how many are drawn."""
        return self.draws / members if self.draws < members else 1.0
