"""The choice of a partner: uniform among those reached straight, and a quarter as likely where a relay must carry.

The rule: everybody who may be a partner has a weight above zero, and the weight knows nothing but whether a relay would
have to carry. Preferring near or fast peers would make cliques (arXiv 2506.10911, 3.2); this does not, as everybody
reaches the public nodes straight. Of 100 members, 30 public, 50 behind cone and 20 behind symmetric NATs, with 7 of 10
punches succeeding, replicas approach each other at 0.72 of the rate of uniform choice (second eigenvalue of the pairs'
graph), and 13 instead of 31 of 100 exchanges load a relay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable

    from nolocod.identity import PeerId
    from nolocod.proto.types import Member, Standing

RELAYED = 0.25
"""The weight of a member that only a relay reaches, beside 1 for one that is reached straight."""


def choose(
    rng: random.Random,
    members: Iterable[Member],
    own: Standing,
    staleness: int,
    avoid: Collection[PeerId],
    carried: Collection[PeerId] = (),
) -> PeerId | None:
    """Draw one training member whose round is at most `staleness` outer steps from ours, or None.

    Its round counts as of now or of the time of its heartbeat, whichever speaks for it: it says itself when it answers.
    `members` are the live ones, `avoid` those suspected or that refused lately, `carried` those that only a relay reaches.
    """
    fit = [
        member.peer_id
        for member in members
        if member.state == "training"
        and member.peer_id not in avoid
        and (abs(member.standing.round - own.round) <= staleness or abs(member.lead) <= staleness)
    ]
    if not fit:
        return None
    return rng.choices(fit, [RELAYED if peer in carried else 1.0 for peer in fit])[0]
