"""Who is in the run and alive: a bounded table of signed heartbeats, a changing sample where the run is large.

The rule: only a heartbeat's own signature makes a member, whoever carried it; a member lives as long as its
count grows. What it says on its own connection, and the signed times of its heartbeats, go before any carrier's
word; and whoever is only heard of decides nothing. A full table gives the place of its stalest entry to a fresher
one, as Newscast does (Jelasity et al., "Gossip-based peer sampling", ACM TOCS 25(3), 2007), so that whom a node
knows is what it heard last; some verified members keep their place. No clock, no randomness, no network in here: `now` is
a monotonic time in seconds, `wall` the time of day in seconds, both passed in.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from nolocod.observe.events import MADE_ROOM, PeerLost, PeerSeen
from nolocod.p2p.limits.address_groups import counted_with
from nolocod.p2p.membership import heartbeat
from nolocod.p2p.membership.admission import Admission
from nolocod.p2p.timing import Timing
from nolocod.proto.types import Member

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Container, Iterable, Mapping

    from nolocod.errors import RefusedError
    from nolocod.identity import PeerId
    from nolocod.observe.events import Reach
    from nolocod.p2p.membership.heartbeat import Heartbeat

_MEMORY = 4096
"""Peers that are gone, or had to make room, of whom the last count is kept."""
_BACK_OFF = 10.0
_LONGEST_BACK_OFF = 300.0
_GIVEN_UP = 3  # failures in a row to reach a member after which it is verified no more
PER_GROUP = 4
"""Verified members of one address group that count."""
_KEPT = 16
"""Verified members that make room for nobody: enough to hold a random graph together, few enough to change with time."""
_THERE = 4  # times longer than others those are believed that are connected: a connection is pinged


def share(answers: Collection[bool]) -> float:
    """Of those that were tried, the share that answered; all of them before anybody was."""
    return sum(answers) / len(answers) if answers else 1.0


@dataclass(slots=True)
class _Entry:
    """One member by its last accepted heartbeat, which was sealed at `heard`, and came first at `came`; `lead` is its round
    minus ours at that time, `offset` its clock minus ours, by what it said on its own connection."""

    said: Heartbeat
    heard: float
    came: float
    lead: int
    offset: float | None


_HEARD = attrgetter("heard")


@dataclass(frozen=True, slots=True)  # thousands of them in a large run
class _Memory:
    """What is kept of one that is no member now."""

    count: int
    heard: float
    time: float
    verified: bool = False
    """Whether it was when it was dropped."""
    unreached: float = -math.inf
    """When it could not be reached: a heartbeat from before brings it back no more."""


@dataclass
class _Suspicion:
    """A member that could not be reached at `since`: not chosen until `until` and until it is heard again."""

    since: float
    until: float
    failures: int
    heard_again: bool = False


@dataclass
class Membership:
    """The members of run `run_id` as node `own` knows them; `own` itself is never in it.

    `timing` bounds how many are kept, and for how long without a new heartbeat.
    """

    own: PeerId
    run_id: str
    timing: Timing = field(default_factory=Timing)
    admission: Admission = field(default_factory=Admission)
    ban: Callable[[PeerId], RefusedError | None] = lambda _: None
    """Why nothing is asked of a peer and given to it for now."""
    committed: Callable[[PeerId], int] = lambda _: 0
    """Exchanges with a peer that were committed."""
    answers: deque[bool] = field(default_factory=lambda: deque(maxlen=32))
    """Whether they answered: of the last members that we dialled and had only heard of."""
    newcomers: int = 0
    """How many members came of whom nothing was known."""
    in_our_name: Callable[[Heartbeat], None] = lambda _heartbeat: None
    """Told every valid heartbeat that carries our own signature."""
    _entries: dict[PeerId, _Entry] = field(default_factory=dict)
    _memories: dict[PeerId, _Memory] = field(default_factory=dict)  # so that echoes do not revive those that are gone
    _suspicions: dict[PeerId, _Suspicion] = field(default_factory=dict)
    _met: dict[PeerId, tuple[bool, str]] = field(default_factory=dict)
    """Of members that spoke on an authenticated connection: whether we dialled it, and their address group."""
    connected: frozenset[PeerId] = frozenset()
    """Whom we have a connection to now."""
    _made_room: list[PeerId] = field(default_factory=list)
    _began: float | None = None

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def objection(self, peer: PeerId) -> RefusedError | None:
        """Why `peer` is given nothing of the run now; None if it may have what members have."""
        return self.ban(peer) or self.admission.objection(peer)

    def among(self, peers: Iterable[PeerId]) -> set[PeerId]:
        """Those of `peers` that are members."""
        return {peer for peer in peers if peer in self._entries}

    # --- what comes in ----------------------------------------------------------------------------

    def heard(
        self, raw: bytes, now: float, wall: float, own_round: int = 0, *,
        age: float = 0.0, newcomer: bool = True, carrier: PeerId | None = None,
    ) -> PeerSeen | PeerLost | None:  # fmt: skip
        """Take in a sealed heartbeat; return what it changed, None for an echo.

        `age` is how many seconds ago it was sealed, as `carrier` says, `own_round` our round at that time.
        Without `newcomer` a full table takes nobody new.

        Raises ProtocolError (size, content), SignatureError, OtherRunError or PeerVersionError.
        """
        if self._began is None:
            self._began = now
        age = max(age, 0.0)
        if len(raw) <= heartbeat.MAX_HEARTBEAT and self._is_unwanted(raw, now, wall, age, newcomer=newcomer, carrier=carrier):
            return None
        said = heartbeat.read(raw, self.run_id)
        peer = said.peer
        if peer == self.own:
            self.in_our_name(said)
            return None
        if not self.admission.admits(peer, said.admission, wall) or said.state == heartbeat.WATCHING:
            return None
        if said.state == "leaving":
            known = self._drop(peer)
            self._remember(peer, _Memory(said.count, -math.inf, said.time))
            return PeerLost(peer, "it left") if known else None
        before = self._entries.get(peer)
        heard, offset = now - age, before.offset if before else None
        if carrier == peer:
            offset = said.time - wall + age
        elif (known_of := before or self._memories.get(peer)) is not None:
            # by its own clock it was sealed so long after the one before, whatever its carrier says
            since = said.time - (before.said.time if before else self._memories[peer].time)
            heard = min(now, max(heard, known_of.heard + since))
        return self._admit(peer, _Entry(said, heard, now, said.standing.round - own_round, offset), now)

    def _is_unwanted(self, raw: bytes, now: float, wall: float, age: float, *, newcomer: bool, carrier: PeerId | None) -> bool:
        """Tell cheaply, without a look at the signature, that a heartbeat is no newer than what we have.

        It may still show that its sender was alive later than we thought: a carrier may have made ours older than it was.
        """
        glance = heartbeat.glance(raw)
        if glance is None:
            return False
        peer, count = glance
        if (entry := self._entries.get(peer)) is not None:
            if count > entry.said.count:
                return False
            entry.heard = min(entry.came, max(entry.heard, now - age))
            if carrier == peer and raw == entry.said.raw:
                entry.offset = entry.said.time - wall + age
            if (suspicion := self._suspicions.get(peer)) is not None and entry.heard > suspicion.since:
                suspicion.heard_again = True
            return True
        memory = self._memories.get(peer)
        if memory is not None and count <= memory.count:
            return True
        return not newcomer and peer != self.own and len(self._entries) >= self.timing.capacity

    def _admit(self, peer: PeerId, entry: _Entry, now: float) -> PeerSeen | None:
        if now - entry.heard > self.lasts(now):
            return None  # it would not live
        before, memory = self._entries.get(peer), self._memories.get(peer)
        if memory is not None and entry.heard <= memory.unreached:
            return None
        if before is None and len(self._entries) >= self.timing.capacity:
            kept = self._kept()  # they make room for nobody, however fresh the others are
            stalest = min((one for other, one in self._entries.items() if other not in kept), key=_HEARD)
            if entry.heard <= stalest.heard:
                return None
            self._drop(stalest.said.peer)
            self._made_room.append(stalest.said.peer)
        self.newcomers += before is None and memory is None
        if before is not None:
            entry.heard = max(entry.heard, before.heard)
        self._entries[peer] = entry
        self._memories.pop(peer, None)
        suspicion = self._suspicions.get(peer)
        if suspicion is not None and entry.heard > suspicion.since:  # what was on its way before says nothing
            suspicion.heard_again = True
        said, was = entry.said, before.said if before else None
        if was is not None and (was.standing, was.state, was.nat) == (said.standing, said.state, said.nat):
            return None
        return PeerSeen(peer, said.standing.round, said.standing.tokens, said.standing.loss, said.state, said.nat)

    def _kept(self) -> set[PeerId]:
        """Those that we met last, verified or connected: up to half of the table, where few answer of those that we hear of."""
        there, half = self.verified() | self.connected, self.timing.capacity // 2
        most = max(min(_KEPT, half), round(half * (1 - share(self.answers))))
        return {*[peer for peer in self._met if peer in there][-most:]}

    def lasts(self, now: float) -> float:
        """Seconds for which a silent member is believed: at first as in a large run, until we know how large this one is."""
        young = self._began is None or now - self._began < self.timing.live
        return self.timing.lasting if young else self.timing.lasts(len(self._entries))

    def settled(self, now: float) -> bool:
        """Whether we have been here for long enough to know the run."""
        return self._began is not None and now - self._began >= self.lasts(now)

    def expire(self, now: float) -> list[PeerLost]:
        """Drop the members that are silent for too long, those we could not reach after half the time; tell who
        had to make room since the last call."""
        lost = [PeerLost(peer, MADE_ROOM) for peer in self._made_room if peer not in self._entries]
        self._made_room.clear()
        seconds, doubted = self.lasts(now), {peer for peer, doubt in self._suspicions.items() if not doubt.heard_again}
        for peer, entry in list(self._entries.items()):
            allowed = seconds / 2 if peer in doubted else seconds * (_THERE if peer in self.connected else 1)
            if now - entry.heard > allowed:
                self._drop(peer)
                lost.append(PeerLost(peer, f"silent for {allowed:.0f} s"))
        return lost

    def review(self, wall: float) -> list[PeerLost]:
        """Drop the members that may be none any more: an admission ended, or was revoked."""
        refused = [peer for peer, entry in self._entries.items() if not self.admission.admits(peer, entry.said.admission, wall)]
        for peer in refused:
            self._drop(peer)
        return [PeerLost(peer, "it is no longer allowed to be a member") for peer in refused]

    def _drop(self, peer: PeerId) -> bool:
        entry, suspicion = self._entries.pop(peer, None), self._suspicions.pop(peer, None)
        verified = peer in self._met and peer in self.verified()
        self._met.pop(peer, None)
        if entry is None:
            return False
        unreached = suspicion.since if suspicion else -math.inf
        self._remember(peer, _Memory(entry.said.count, entry.heard, entry.said.time, verified, unreached))
        return True

    def _remember(self, peer: PeerId, memory: _Memory) -> None:
        self._memories.pop(peer, None)
        self._memories[peer] = memory
        while len(self._memories) > _MEMORY:
            del self._memories[next(iter(self._memories))]

    def known(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` is a member, or was one and was heard not so long ago that it must be gone."""
        return peer in self._entries or (peer in self._memories and self._lately(self._memories[peer], now))

    def _lately(self, memory: _Memory, now: float) -> bool:
        return now - memory.heard < 3 * self.lasts(now)

    def size(self) -> tuple[int, int]:
        """How many members the run may have: those that are verified, and those that are only heard of and were not dialled in
        vain, at most `PER_GROUP` of an address group; of both also those that had to make room or fell silent lately."""
        now, verified = max((entry.heard for entry in self._entries.values()), default=0.0), self.verified()
        known = verified.union(self._suspicions)
        groups = Counter(entry.said.group for peer, entry in self._entries.items() if peer not in known)
        heard_of = sum(count if "/" not in group else min(count, PER_GROUP) for group, count in groups.items())
        gone = [one.verified for one in self._memories.values() if one.unreached == -math.inf and self._lately(one, now)]
        return len(verified) + sum(gone), heard_of + len(gone) - sum(gone)

    # --- who can be reached -----------------------------------------------------------------------

    def suspect(self, peer: PeerId, now: float) -> None:
        """`peer` could not be reached: no partner for ten seconds, doubled with every failure in a row."""
        if peer not in self._entries:
            return
        if peer not in self._met and peer not in self._suspicions:
            self.answers.append(False)
        failures = self._suspicions[peer].failures + 1 if peer in self._suspicions else 0
        pause = min(_BACK_OFF * 2.0 ** min(failures, 16), _LONGEST_BACK_OFF)
        self._suspicions[peer] = _Suspicion(now, now + pause, failures)
        if failures + 1 >= _GIVEN_UP:
            self._met.pop(peer, None)

    def met(self, peer: PeerId, reach: Reach, host: str) -> None:
        """`peer` spoke on an authenticated connection, had by `reach`, from the IP address `host` ("" through a relay).

        It can be reached, and it is verified if we dialled it.
        """
        self._suspicions.pop(peer, None)
        dialled = reach != "inbound"
        if peer in self._entries and (dialled or not self._met.get(peer, (False, ""))[0]):
            # who comes to us may come from many places: where it was dialled counts
            if dialled and peer not in self._met:
                self.answers.append(True)
            self._met.pop(peer, None)  # the last are those met last
            self._met[peer] = dialled, counted_with(peer, host)

    def verified(self) -> set[PeerId]:
        """The members that count where something is decided: dialled and authenticated, or partners of committed exchanges
        that speak for themselves; at most `PER_GROUP` of an address group, long-standing partners first."""
        groups: dict[str, list[PeerId]] = {}
        for peer, (dialled, group) in self._met.items():
            if dialled or self.committed(peer):
                groups.setdefault(group, []).append(peer)
        for peers in groups.values():
            if len(peers) > PER_GROUP:
                peers.sort(key=self.committed, reverse=True)
        return {peer for peers in groups.values() for peer in peers[:PER_GROUP]}

    def suspected(self, now: float) -> set[PeerId]:
        """Members that are not to be chosen now."""
        return {peer for peer, doubt in self._suspicions.items() if now < doubt.until or not doubt.heard_again}

    # --- what is asked ----------------------------------------------------------------------------

    def live(self, now: float, reach: Mapping[PeerId, Reach] | None = None) -> list[Member]:
        """All live members as they were learned, those banned as not verified; `reach` says who is connected how."""
        seconds, reach, verified = self.lasts(now), reach or {}, self.verified()
        members = []
        for peer, entry in self._entries.items():
            said, age = entry.said, now - entry.heard
            if age <= seconds or peer in self.connected:
                facts = said.standing, said.state, said.addresses, said.version, age
                dialled, group = self._met.get(peer, (False, ""))
                group = group if dialled or self.committed(peer) else ""
                ways, told = (reach.get(peer), entry.lead, said.nat, said.relays), (said.phase, said.name, said.built)
                members.append(Member(peer, *facts, *ways, group, peer in verified and not self.ban(peer), *told))
        return members

    def said(self, peer: PeerId) -> tuple[bytes, int, float]:
        """The last heartbeat of `peer` as it came, its life, and when it was sealed; empty for one that is no member."""
        entry = self._entries.get(peer)
        return (entry.said.raw, entry.said.life, entry.heard) if entry else (b"", 0, 0.0)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        entry = self._entries.get(peer)
        return entry.said.addresses if entry else ()

    def sample(self, rng: random.Random, count: int, now: float, among: Container[PeerId] | None = None) -> list[PeerId]:
        """Up to `count` live members, uniformly at random, of those in `among` if that is given; suspected ones too, or they
        would never be cleared."""
        seconds = self.lasts(now)
        peers = [
            peer for peer, entry in self._entries.items() if now - entry.heard <= seconds and (among is None or peer in among)
        ]
        return rng.sample(peers, min(count, len(peers)))

    def encode_view(self, rng: random.Random, now: float, without: Container[bytes] = ()) -> list[tuple[bytes, float]]:
        """Sealed heartbeats for others, each with its age in seconds, within `timing.view` and `timing.view_bytes`:
        half of them the freshest, half drawn from the rest; half of each are those that we keep, and more where few answer of
        those that we hear of, so that no flood drives them out. `without` are those that the other side has."""
        seconds, kept, more = self.lasts(now), self._kept(), 1 - share(self.answers) / 2
        entries = [entry for entry in self._entries.values() if now - entry.heard <= seconds and entry.said.raw not in without]

        def some(count: int, pick: Callable[[int, list[_Entry]], list[_Entry]]) -> list[_Entry]:
            taken: dict[PeerId, _Entry] = {}
            for most, among in ((round(count * more), kept), (count, self._entries)):
                free = [one for one in entries if one.said.peer in among and one.said.peer not in taken]
                taken |= {one.said.peer: one for one in pick(most - len(taken), free)}
            entries[:] = [one for one in entries if one.said.peer not in taken]
            return [*taken.values()]

        half = (self.timing.view + 1) // 2
        fresh = some(half, lambda count, of: heapq.nlargest(count, of, _HEARD))
        drawn = some(self.timing.view - half, lambda count, of: rng.sample(of, min(count, len(of))))
        chosen, size = [], 0
        for entry in fresh + drawn:
            raw = entry.said.raw
            if size + len(raw) <= self.timing.view_bytes:
                size += len(raw)
                chosen.append((raw, now - entry.heard))
        return chosen

    def clock_offset(self) -> float:
        """The median of the verified members' clocks minus ours, in seconds, as each told us itself; 0 without any."""
        offsets = [entry.offset for peer in self.verified() if (entry := self._entries[peer]).offset is not None]
        return statistics.median(offsets) if offsets else 0.0
