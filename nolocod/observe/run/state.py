"""Fills the run's report from the members that are known, again and again.

The rule: members say what they like, so a figure is a median, or a sum in which none counts for more than four times the
median. Those that answered the observer are counted, and of those only heard of at most half as many (at least four).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import msgspec

from nolocod import __version__
from nolocod.disk import write_whole
from nolocod.errors import DataDirError
from nolocod.observe.events import Contribution, NatClass
from nolocod.observe.run.report import MemberRow, RunReport
from nolocod.observe.status.state import Curve
from nolocod.p2p.transport.multiaddrs import via

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.proto.types import Member
    from nolocod.run.manifest import Sealed

STATES = ("joining", "training", "paused", "finished", "other")
REACHABLE = (*get_args(NatClass), "unknown")
SHOWN = 512
"""Members in a report."""
PER_GROUP = 64
"""Members that answered from one address group, as many as a node takes connections of one."""
CONTRIBUTORS = 64
"""Of those that gave something."""
_REMEMBERED = 1024
"""Contributors that outlive an observer."""
_RELEASES = 8
_LEAST_HEARD_OF = 4
_MOST_OF_MEDIAN = 4.0
_RATE_WINDOW = 120.0
"""Seconds over which tokens per second are measured."""
_SAME = 0.5
"""Seconds by which the ages that two carriers tell of one heartbeat may differ."""
_PACE_WINDOW = 900.0
"""Seconds over which rounds per second are."""
_MOST_HISTORY = 1 << 20


class History(msgspec.Struct, frozen=True):
    """What outlives an observer, as JSON in a file."""

    run_id: str
    curve: tuple[tuple[int, float], ...]
    stride: int
    tokens: int
    given: tuple[Contribution, ...] = ()


@dataclass
class Watched:
    """What is followed of one member: (time of a heartbeat, its tokens), oldest first."""

    told: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, at: float, tokens: int) -> None:
        if self.told and tokens < self.told[-1][1]:
            self.told.clear()  # it began anew
        if self.told and at <= self.told[-1][0] + _SAME:
            return
        self.told.append((at, tokens))
        while self.told[0][0] < at - _RATE_WINDOW and len(self.told) > 2:
            self.told.popleft()

    @property
    def rate(self) -> float:
        """Tokens per second."""
        (begin, first), (end, last) = self.told[0], self.told[-1]
        return (last - first) / (end - begin) if end > begin else 0.0


class RunState:
    """Of the run `sealed`; `clock` gives monotonic seconds. `look` is told the live members every second or so."""

    def __init__(self, sealed: Sealed, clock: Callable[[], float]) -> None:
        manifest = sealed.manifest
        self.clock = clock
        self._began = self._looked = clock()
        self._base = RunReport(
            release=__version__, run_id=sealed.run_id, run_name=manifest.name, owner=manifest.owner, access=manifest.access,
            watched=0.0, rounds=manifest.outer.rounds,
        )  # fmt: skip
        self._watched: dict[PeerId, Watched] = {}
        self._rounds: deque[tuple[float, int]] = deque()
        self._curve = Curve()
        self._tokens = 0.0
        self._before: dict[PeerId, Contribution] = {}
        self._given: list[Contribution] = []
        self.report = self._base

    def look(
        self,
        members: Sequence[Member],
        given: Iterable[Contribution] = (),
        exchanges: Sequence[tuple[PeerId, PeerId, float]] = (),
        goal: int | None = None,
    ) -> None:
        """Make a new report of the live `members`, of what was given since this observer began, and of late exchanges; `goal`
        is the run's, where its owners changed it."""
        now = self.clock()
        self._watched = {one.peer_id: self._watched.get(one.peer_id, Watched()) for one in members}
        for one in members:
            if one.state == "joining":
                self._watched[one.peer_id].told.clear()  # it takes over a donor's tokens at once
            else:
                self._watched[one.peer_id].note(now - one.age, one.standing.tokens)
        counted = _counted(members)
        training = [one for one in counted if one.state == "training"]
        pace = self._pace(now, training)
        standing = training or [one for one in counted if one.state == "finished"]
        losses = [one.standing.loss for one in training if math.isfinite(one.standing.loss)]
        rates = self._rates(training)
        self._tokens += sum(rates.values()) * (now - self._looked)
        self._looked = now
        number = round(statistics.median_low([one.standing.round for one in standing])) if standing else self._base.round
        if losses and (not self._curve.points or number > self._curve.points[-1][0]):
            self._curve.add(number, statistics.median(losses))
        self._given = [one for one in _together(self._before, given) if one.tokens]
        goal = self._base.rounds if goal is None else goal
        self._base = msgspec.structs.replace(
            self._base,
            rounds=goal,
            watched=now - self._began,
            states=_counts((one.state for one in members), STATES, "other"),
            reachable=_counts((one.nat or "unknown" for one in members), REACHABLE, "unknown"),
            releases=_most(Counter(one.version for one in members)),
            round=number,
            progress=min(number / goal, 1.0) if goal else None,
            eta=max(goal - number, 0) / pace if goal and pace else None,
            loss=statistics.median(losses) if losses else self._base.loss,
            tokens=round(statistics.median_low([one.standing.tokens for one in standing])) if standing else self._base.tokens,
            tokens_per_second=sum(rates.values()),
            watched_tokens=round(self._tokens),
            curve=self._curve.points,
            members=self._rows(members, rates),
            exchanges=tuple(exchanges[:SHOWN]),
            contributors=tuple(self._given[:CONTRIBUTORS]),
            contributed_by=len(self._given),
            contributed=sum(one.tokens for one in self._given),
            counted=len(counted),
            known=len(members),
        )
        self.report = self._base

    def _rates(self, training: Sequence[Member]) -> dict[PeerId, float]:
        """Tokens per second of each of `training`; none counts for more than so many times the median."""
        rates = {one.peer_id: self._watched[one.peer_id].rate for one in training if self._watched[one.peer_id].told}
        positive = [rate for rate in rates.values() if rate > 0]
        most = _MOST_OF_MEDIAN * statistics.median(positive) if positive else 0.0
        return {peer: min(rate, most) for peer, rate in rates.items()}

    def _pace(self, now: float, training: Sequence[Member]) -> float:
        """Rounds per second of the median member; 0 while it is not known."""
        if training:
            number = statistics.median_low([one.standing.round for one in training])
            if not self._rounds or number > self._rounds[-1][1]:
                self._rounds.append((now, number))
        while len(self._rounds) > 2 and self._rounds[0][0] < now - _PACE_WINDOW:
            self._rounds.popleft()
        if len(self._rounds) < 2:
            return 0.0
        (begin, first), (_, last) = self._rounds[0], self._rounds[-1]
        return (last - first) / (now - begin)

    def _rows(self, members: Sequence[Member], rates: dict[PeerId, float]) -> tuple[MemberRow, ...]:
        shown = sorted(members, key=lambda one: (not one.group, one.state != "training"))[:SHOWN]
        return tuple(
            MemberRow(
                peer_id=one.peer_id,
                state=one.state,
                nat=one.nat,
                round=one.standing.round,
                tokens=one.standing.tokens,
                tokens_per_second=rates.get(one.peer_id, 0.0),
                loss=one.standing.loss if math.isfinite(one.standing.loss) else None,
                release=one.version,
                age=max(one.age, 0.0),
                relays=one.relays,
                via=tuple(dict.fromkeys(found[0] for address in one.addresses if (found := via(address)))),
                answered=bool(one.group),
                name=one.name,
            )
            for one in sorted(shown, key=lambda one: one.peer_id)
        )

    # --- what outlives this process ---------------------------------------------------------------

    def restore(self, path: Path) -> None:
        """Go on from the history in the file `path`, if there is one. DataDirError if it holds none of this run."""
        try:
            with path.open("rb") as file:
                found = msgspec.json.decode(file.read(_MOST_HISTORY), type=History)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataDirError(f"--history {path}: it holds no history ({error}).", remedy="Name another file.") from error
        if found.run_id != self._base.run_id:
            remedy = "Name another file for this run."
            raise DataDirError(f"--history {path}: it is of run {found.run_id[:12]}.", remedy=remedy)
        self._curve = Curve(found.curve, found.stride)
        self._tokens = float(found.tokens)
        self._before = {one.peer_id: one for one in found.given}
        self._given = list(found.given)
        self._base = msgspec.structs.replace(self._base, watched_tokens=found.tokens, curve=self._curve.points)
        self.report = self._base

    def save(self, path: Path) -> None:
        """Replace the file `path`. Raises DiskFullError or DataDirError."""
        history = History(
            self._base.run_id, self._curve.points, self._curve.stride, round(self._tokens), tuple(self._given[:_REMEMBERED])
        )
        write_whole(path, msgspec.json.encode(history))


def _counted(members: Sequence[Member]) -> list[Member]:
    """Those whose word the figures are made of."""
    groups: Counter[str] = Counter()
    answered: list[Member] = []
    for one in members:
        if one.group:
            groups[one.group] += 1
            if "/" not in one.group or groups[one.group] <= PER_GROUP:
                answered.append(one)
    heard_of = [one for one in members if not one.group]
    return answered + heard_of[: max(len(answered) // 2, _LEAST_HEARD_OF)]


def _together(before: dict[PeerId, Contribution], given: Iterable[Contribution]) -> list[Contribution]:
    """What was given before and since, who gave most first."""
    found = dict(before)
    for one in given:
        if (was := before.get(one.peer_id)) is not None:
            found[one.peer_id] = msgspec.structs.replace(
                one, name=one.name or was.name, tokens=was.tokens + one.tokens, seconds=was.seconds + one.seconds,
                exchanges=was.exchanges + one.exchanges, partners=max(was.partners, one.partners),
            )  # fmt: skip
        else:
            found[one.peer_id] = one
    return sorted(found.values(), key=lambda one: (-one.tokens, one.peer_id))


def _counts(found: Iterable[str], names: Sequence[str], other: str) -> dict[str, int]:
    counts = Counter(one if one in names else other for one in found)
    return {name: counts[name] for name in names}


def _most(counts: Counter[str]) -> dict[str, int]:
    """The most frequent; what peers call their release is theirs."""
    told = dict(counts.most_common(_RELEASES))
    rest = counts.total() - sum(told.values())
    return {**told, "other": rest} if rest else told
