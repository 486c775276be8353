"""The choice of a partner: uniform among those that may be one, as the convergence of NoLoCo asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable

    from nolocod.identity import PeerId
    from nolocod.terms import Member, Standing


def choose(
    rng: random.Random, members: Iterable[Member], own: Standing, staleness: int, avoid: Collection[PeerId]
) -> PeerId | None:
    """Draw one training member whose round is at most `staleness` outer steps from ours, or None.

    That is judged by the rounds of now, or of the time of its heartbeat, whichever speaks for it: what it
    really is now it says itself when it answers the offer.
    `members` are the live ones (never ourselves), `avoid` those suspected, or that refused lately. Nothing
    but these conditions weighs in: preferring near or fast peers would make cliques (arXiv 2506.10911, 3.2).
    """
    fit = [
        member.peer_id
        for member in members
        if member.state == "training" and member.peer_id not in avoid and _distance(member, own) <= staleness
    ]
    return rng.choice(fit) if fit else None


def _distance(member: Member, own: Standing) -> int:
    return min(abs(member.standing.round - own.round), abs(member.lead))
