"""What members tell each other of each other: which heartbeats go into a message, and what is made of those that come.

The rule: one contact decides little. Per beat, a source is listened to for so many heartbeats, and where the
table is full it brings in so many newcomers, whatever it sends (limited pushes: Bortnikov et al., "Brahms",
Computer Networks 53(13), 2009). No clock and no network in here: `now` is a monotonic time in seconds.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nolocod.errors import ProtocolError, RemoteError
from nolocod.identity import short
from nolocod.observe.events import PartitionHealed, PeerLost, PeerSeen
from nolocod.p2p.membership.table import share
from nolocod.proto import nolocod_pb2 as pb

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator, Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.membership.amended import AmendedRun
    from nolocod.p2p.membership.heartbeat import OwnHeartbeat
    from nolocod.p2p.membership.table import Membership

_ENOUGH = 16
"""With so many connections, gossip prefers connected members: a random graph of that degree holds together."""
_CANDIDATES = 3
"""Members drawn to find a connected one. Few, so that one to whom everybody is connected, as to a bootstrap, is
asked at most so many times as often as others."""
_MOST_TOLD = 64
"""Heartbeats in one message; this release sends and reads 16."""
_MESSAGES = 3
"""Full messages that a source is listened to per beat."""
_MORE = 4
"""Members that are contacted more at each beat, for every one that answers where none of those that we hear of does."""
_SLOW_STATES = frozenset({"paused", "finished"})
_CONTACTS_AT_ONCE = 8
"""Members of another part of the mesh that are contacted when it is found."""
_HISTORY = 64
_MAX_AGE = 1e6


@dataclass
class Heard:
    """What one message changed."""

    changes: list[PeerSeen | PeerLost] = field(default_factory=list)
    newcomers: list[PeerId] = field(default_factory=list)
    """Members now, of whom nothing was known before."""
    contact: list[PeerId] = field(default_factory=list)
    """Whom to swap views with at once."""
    faults: int = 0
    healed: PartitionHealed | None = None


class Gossip:
    """Speaks and listens for one node, and keeps `table` up to date."""

    def __init__(
        self, table: Membership, own_heartbeat: OwnHeartbeat, rng: random.Random, amended: AmendedRun | None = None
    ) -> None:
        """`amended`: what the run's owners changed of it; None where nobody does, as in the simulator."""
        self._table = table
        self._amended = amended
        self._own_heartbeat = own_heartbeat
        table.in_our_name = own_heartbeat.hear
        self._rng = rng
        self._timing = table.timing
        self._beat = own_heartbeat.heartbeat()
        self._beat_at: float | None = None
        self._listened: Counter[PeerId] = Counter()
        self._brought: Counter[PeerId] = Counter()
        self._rounds: deque[tuple[float, int]] = deque([(0.0, own_heartbeat.own()[0].round)], _HISTORY)
        self._healed_at: float | None = None
        self._began: float | None = None
        self._greeted = 0
        self._connected: frozenset[PeerId] = frozenset()
        self._asked: list[PeerId] = []
        """Whom we drew at the last beat."""

    def beat(self, now: float) -> list[PeerLost]:
        """Seal a new heartbeat; return who is no member any more."""
        self._beat, self._beat_at = self._own_heartbeat.heartbeat(), now
        self._listened.clear()
        self._brought.clear()
        own_round = self._own_heartbeat.own()[0].round
        if own_round != self._rounds[-1][1]:
            self._rounds.append((now, own_round))
        return [*self._table.expire(now), *self._table.review(self._own_heartbeat.clock())]

    def pause(self) -> float:
        """Seconds until the next heartbeat."""
        slow = 2.0 if self._own_heartbeat.own()[1] in _SLOW_STATES else 1.0
        return slow * self._timing.pace(len(self._table)) * self._rng.uniform(0.8, 1.2)

    def targets(self, now: float, connected: Collection[PeerId]) -> list[PeerId]:
        """Members to swap views with at this beat; and those whose connection ended since the last one, because they
        may have ended themselves."""
        gone = sorted(self._table.among(self._connected.difference(connected)))
        self._connected = self._table.connected = frozenset(connected)
        return list(dict.fromkeys([*self._drawn(now, connected), *gone[: _ENOUGH if len(self._table) <= 2 * _ENOUGH else 1]]))

    def _drawn(self, now: float, connected: Collection[PeerId]) -> list[PeerId]:
        near = self._table.among(connected)
        fanout = self._timing.fanout + round(_MORE * (1 - share(self._table.answers)))
        drawn = self._table.sample(self._rng, fanout * (_CANDIDATES if len(near) >= _ENOUGH else 1), now)
        drawn.sort(key=lambda peer: peer not in near)
        # whoever was drawn last is not there: now somebody who spoke, too, however many others are only heard of
        failed = self._table.suspected(now).intersection(self._asked)
        self._asked = drawn[:fanout]
        return self._asked + (self._table.sample(self._rng, fanout, now, near | self._table.verified()) if failed else [])

    def question(self, now: float) -> pb.Gossip:
        """Our view, for a member that shall answer with its own."""
        return self._message(now, (), answer=True)

    def reply(self, source: PeerId, message: pb.Gossip, now: float) -> tuple[pb.Gossip, Heard]:
        """Learn from a question, and answer it."""
        before = self._table.said(source)
        heard = self.learn(source, message, now)
        return self.answer(source, message, before, now), heard

    def answer(self, source: PeerId, message: pb.Gossip, said: tuple[bytes, int, float], now: float) -> pb.Gossip:
        """The answer to a question: what the other does not have. `said` is what the table knew of `source` before it."""
        if not message.answer:
            return pb.Gossip()
        before, life, sealed = said
        # two speak in one name, or one has begun anew: whoever asks is told of the other, for it hears of it nowhere else
        other = before and self._table.said(source)[1] != life
        first = [(before, max(0.0, now - sealed))] if other else []
        return self._message(now, frozenset(message.heartbeats), answer=False, first=first)

    def _message(
        self, now: float, without: Collection[bytes], *, answer: bool, first: Sequence[tuple[bytes, float]] = ()
    ) -> pb.Gossip:
        """Our own heartbeat, `first` and what else there is room for, each with its age."""
        if self._beat_at is None:
            self._beat_at = now  # sealed when we began, which is now
        others = [*first, *self._table.encode_view(self._rng, now, without)][: self._timing.view]
        view = [(self._beat, now - self._beat_at), *others]
        return pb.Gossip(
            heartbeats=[raw for raw, _ in view],
            ages=[math.ceil(age * 1000) for _, age in view],  # nobody grows younger on the way
            answer=answer,
            revocations=self._table.admission.revocations,
            amendments=self._amended.raw if self._amended else b"",
        )

    def learn(self, source: PeerId, message: pb.Gossip, now: float) -> Heard:
        """`learning`, all at once."""
        heard = Heard()
        for _ in self.learning(heard, source, message, now):
            pass
        return heard

    def learning(self, heard: Heard, source: PeerId, message: pb.Gossip, now: float) -> Iterator[None]:
        """Take in what `source` told, into `heard`; heartbeats that are not valid are dropped, one by one. Each takes a
        signature or three, and is a step. ProtocolError for more of them than anybody tells."""
        if max(len(message.heartbeats), len(message.ages)) > _MOST_TOLD:
            raise ProtocolError(f"{short(source)} tells more than {_MOST_TOLD} heartbeats at once.")
        table, wall = self._table, self._own_heartbeat.clock()
        before, settled, looked_at = len(table), table.settled(now), 0
        own_round = self._own_heartbeat.own()[0].round
        ages = [*message.ages, *[0] * len(message.heartbeats)]
        for raw, told in zip(message.heartbeats[: self._timing.view + 1], ages, strict=False):
            yield
            if self._listened[source] >= _MESSAGES * (self._timing.view + 1):
                break
            self._listened[source] += 1
            age, met = min(told / 1000, _MAX_AGE), table.newcomers
            welcome = self._brought[source] <= self._timing.view // 2
            try:
                own = self._round_at(now - age, own_round)
                change = table.heard(raw, now, wall, own, age=age, newcomer=welcome, carrier=source)
            except RemoteError:
                heard.faults += 1
                continue
            looked_at += 1
            if change is not None:
                heard.changes.append(change)
            if table.newcomers > met and isinstance(change, PeerSeen):
                heard.newcomers.append(change.peer_id)
                self._brought[source] += 1
        self._learn_revocations(message.revocations, heard)
        self._learn_amendments(message.amendments, heard)
        newcomers = [peer for peer in heard.newcomers if peer in table and peer != source]
        # this view had next to nobody of ours: it is of another part of the mesh
        if settled and before >= 2 and len(heard.newcomers) >= 2 and looked_at - len(heard.newcomers) <= looked_at / 16:
            if self._healed_at is None or now - self._healed_at >= table.lasts(now):  # once for all that come together
                self._healed_at = now
                heard.healed = PartitionHealed(source, len(heard.newcomers))
            heard.contact = newcomers[:_CONTACTS_AT_ONCE]
        elif self._is_new(now):
            heard.contact = newcomers[: max(_ENOUGH - self._greeted, 0)]
            self._greeted += len(heard.contact)

    def _is_new(self, now: float) -> bool:
        if self._began is None:
            self._began = now
        return now < self._began + self._timing.eager

    def _learn_revocations(self, raw: bytes, heard: Heard) -> None:
        if not raw or raw == self._table.admission.revocations:
            return
        try:
            if self._table.admission.learn(raw):
                heard.changes += self._table.review(self._own_heartbeat.clock())
        except RemoteError:
            heard.faults += 1

    def _learn_amendments(self, raw: bytes, heard: Heard) -> None:
        try:
            if self._amended is not None:
                self._amended.learn(raw)
        except RemoteError:
            heard.faults += 1

    def _round_at(self, then: float, own_round: int) -> int:
        """Our own round, now `own_round`, at a time that is not long ago."""
        if own_round != self._rounds[-1][1] and (self._beat_at is None or then >= self._beat_at):
            return own_round
        return next((number for since, number in reversed(self._rounds) if since <= then), self._rounds[0][1])
