"""What time it is in the run: in which round its members are, and how long a round takes them.

The rule: only members that are verified decide it, and of these the median or the lower third, which a few who lie do not
move far.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from nolocod.identity import PeerId
    from nolocod.p2p.membership.table import Membership
    from nolocod.proto.types import Member


def median_round(members: Iterable[Member]) -> int:
    """Of the verified of `members` that train, the lower one of two; 0 without any."""
    rounds = [member.standing.round for member in _counted(members)]
    return statistics.median_low(rounds) if rounds else 0


def believed_round(members: Iterable[Member], phase: float, peer: PeerId, told: int) -> int:
    """The round to which a step with `peer`, who says that it is at `told`, takes us.

    Rounds are the run's clock, so one who is ahead takes us along; but no further than two thirds of the verified have come,
    who took a step in each `phase` seconds since their heartbeats: a few who lie would run down everybody's schedule, and part
    those whom they took along from the others. And each step takes us as far as two thirds told, or who steps with the slow,
    with liars or alone would fall behind. It is not the median: that would follow, step by step, liars who are always ahead.
    """
    aged = [(one.peer_id, one.standing.round, _gone_by(one, max(phase, 1.0))) for one in _counted(members)]
    if not aged:
        return 0
    least, most = (
        sorted(told if other == peer else number + since * counts for other, number, since in aged)[len(aged) // 3]
        for counts in (0, 1)
    )
    return max(least, min(told, most))


def _counted(members: Iterable[Member], states: Collection[str] = ("training",)) -> Iterable[Member]:
    """Those whose rounds decide anything."""
    return (member for member in members if member.verified and member.state in states)


def _gone_by(member: Member, phase: float) -> int:
    """Rounds that a member has taken since its heartbeat, if each takes `phase` seconds (0: not known)."""
    return int(member.age / phase) if phase and member.state == "training" else 0


def pace_in(table: Membership, now: float, number: int, phase: float) -> tuple[float, int]:
    """`pace` among the members of `table`; nobody is followed until we know the run, for whom a newcomer meets first may all
    lie."""
    return pace(table.live(now) if table.settled(now) else (), number, phase)


def pace(members: Iterable[Member], number: int, phase: float) -> tuple[float, int]:
    """Seconds that a phase takes the median machine, and by how many rounds one at round `number` is before the others.

    `phase`: what ours takes; 0 where nobody knows. Of an even number the mean of the middle two: two unlike
    machines meet halfway. Who has finished counts as well, or the last ones would follow whoever stays on to lie. The
    others have gone on since their heartbeats, or of short rounds everybody would be before everybody else.
    """
    counted = [*_counted(members, ("training", "finished"))]
    phases = [told for told in (phase, *(member.phase for member in counted)) if told] or [0.0]
    runs = statistics.median(phases)
    rounds = [one.standing.round + _gone_by(one, runs) for one in counted] or [number]
    return runs, number - statistics.median_low(rounds)
