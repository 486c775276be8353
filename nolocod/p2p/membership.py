"""Who is in the run and alive: a bounded table of signed heartbeats, a changing sample where the run is large.

The rule: only a heartbeat's own signature makes a member, whoever carried it; a member lives as long as its
count grows. A full table gives the place of its stalest entry to a fresher one, as Newscast does (Jelasity et
al., "Gossip-based peer sampling", ACM TOCS 25(3), 2007), so that whom a node knows is what it heard last. No
clock, no randomness, no network in here: `now` is a monotonic time in seconds, `wall` the time of day in
seconds, both passed in.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, cast, get_args

from nolocod.errors import ProtocolError
from nolocod.events import MADE_ROOM, NatClass, PeerLost, PeerSeen
from nolocod.identity import PeerId
from nolocod.p2p.addresses import MAX_ADDRESS, dialable
from nolocod.p2p.timing import Timing
from nolocod.proto.envelope import MAX_NUMBER, open_envelope, peek, readable, standing_from_wire
from nolocod.terms import Member, Standing

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Container, Iterable, Mapping

    from nolocod.errors import RefusedError
    from nolocod.events import Reach
    from nolocod.proto import nolocod_pb2 as pb

_STATE = re.compile(r"[a-z]{1,16}")
"""What a state looks like. One that we do not know is a later release's: such a member is shown, and not chosen."""
MAX_HEARTBEAT = 4096
"""Bytes of one sealed heartbeat."""
_MAX_ADDRESSES = 8
_MEMORY = 4096
"""Peers that are gone, or had to make room, of whom the last count is kept."""
_BACK_OFF = 10.0
_LONGEST_BACK_OFF = 300.0


@dataclass
class _Entry:
    """What is known of one member; `heard` is the time at which its last accepted heartbeat was sealed."""

    peer: PeerId
    raw: bytes
    count: int
    standing: Standing
    state: str
    addresses: tuple[str, ...]
    version: str
    offset: float
    heard: float
    lead: int
    nat: NatClass | None
    relays: bool
    admission: bytes
    life: int


_HEARD = attrgetter("heard")


@dataclass(frozen=True)
class _Memory:
    """What is kept of one that is no member now."""

    count: int
    heard: float
    unreached: float = -math.inf
    """When it could not be reached: a heartbeat from before brings it back no more."""


@dataclass
class _Suspicion:
    """A member that could not be reached at `since`: not chosen until `until` and until it is heard again."""

    since: float
    until: float
    failures: int
    heard_again: bool = False


class Access(Protocol):
    """Who may be a member, as the run's owner says; and what of that goes from member to member."""

    def admits(self, peer: PeerId, admission: bytes, wall: float) -> bool:
        """Whether `peer` may be a member by the admission that it shows, at this time of day."""
        ...

    def objection(self, peer: PeerId) -> RefusedError | None:
        """Why nothing of the run is given to `peer` now, by what it has shown so far; None if it may have it."""
        ...

    def told(self) -> bytes:
        """The revocations that we tell others, sealed; empty while there are none."""
        ...

    def learn(self, raw: bytes) -> bool:
        """Take in revocations that a peer told; whether they are valid and new. Raises RemoteError."""
        ...


class Open:
    """For runs that anybody may join."""

    def admits(self, peer: PeerId, admission: bytes, wall: float) -> bool:
        return True

    def objection(self, peer: PeerId) -> RefusedError | None:
        return None

    def told(self) -> bytes:
        return b""

    def learn(self, raw: bytes) -> bool:
        return False


@dataclass
class Membership:
    """The members of run `run_id` as node `own` knows them; `own` itself is never in it.

    `timing` bounds how many are kept, and for how long without a new heartbeat.
    """

    own: PeerId
    run_id: str
    timing: Timing = field(default_factory=Timing)
    access: Access = field(default_factory=Open)
    strangers: int = 0
    """How many members came of whom nothing was known."""
    in_our_name: Callable[[pb.Heartbeat], None] = lambda _heartbeat: None
    """Told every valid heartbeat that carries our own signature."""
    _entries: dict[PeerId, _Entry] = field(default_factory=dict)
    _memories: dict[PeerId, _Memory] = field(default_factory=dict)  # so that echoes do not revive those that are gone
    _suspicions: dict[PeerId, _Suspicion] = field(default_factory=dict)
    _made_room: list[PeerId] = field(default_factory=list)
    _began: float | None = None

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def among(self, peers: Iterable[PeerId]) -> set[PeerId]:
        """Those of `peers` that are members."""
        return {peer for peer in peers if peer in self._entries}

    # --- what comes in ----------------------------------------------------------------------------

    def heard(
        self, raw: bytes, now: float, wall: float, own_round: int = 0, *, age: float = 0.0, newcomer: bool = True
    ) -> PeerSeen | PeerLost | None:
        """Take in a sealed heartbeat; return what it changed, None for an echo.

        `age` is how many seconds ago it was sealed, as its carriers say, `own_round` our round at that time.
        Without `newcomer` a full table takes nobody new.

        Raises ProtocolError (size, content), SignatureError, OtherRunError or PeerVersionError.
        """
        if self._began is None:
            self._began = now
        if len(raw) > MAX_HEARTBEAT:
            raise ProtocolError(f"a heartbeat of {len(raw)} bytes is above the limit of {MAX_HEARTBEAT}.")
        if self._is_unwanted(raw, newcomer=newcomer):
            return None
        body = open_envelope(raw, run_id=self.run_id, receiver="")
        if body.WhichOneof("content") != "heartbeat":
            raise ProtocolError("gossip carries something that is no heartbeat.")
        entry = _entry(raw, body, (now - max(age, 0.0), wall - max(age, 0.0)), own_round)
        peer = entry.peer
        if peer == self.own:
            self.in_our_name(body.heartbeat)
            return None
        if not self.access.admits(peer, entry.admission, wall):
            return None
        if entry.state == "leaving":
            known = self._drop(peer)
            self._remember(peer, _Memory(entry.count, now))
            return PeerLost(peer, "it left") if known else None
        return self._admit(peer, entry, now)

    def _is_unwanted(self, raw: bytes, *, newcomer: bool) -> bool:
        """Tell cheaply, without a look at the signature, that a heartbeat is no newer than what we have."""
        try:
            body = peek(raw)
        except ProtocolError:
            return False  # open_envelope says it better
        peer = PeerId(body.sender)
        last = self._entries.get(peer) or self._memories.get(peer)
        if body.HasField("heartbeat") and last is not None and body.heartbeat.count <= last.count:
            return True
        return not newcomer and peer != self.own and peer not in self._entries and len(self._entries) >= self.timing.capacity

    def _admit(self, peer: PeerId, entry: _Entry, now: float) -> PeerSeen | None:
        if now - entry.heard > self.lasts(now):
            return None  # it would not live
        before, memory = self._entries.get(peer), self._memories.get(peer)
        if memory is not None and entry.heard <= memory.unreached:
            return None
        if before is None and len(self._entries) >= self.timing.capacity:
            stalest = min(self._entries.values(), key=_HEARD)
            if entry.heard <= stalest.heard:
                return None
            self._drop(stalest.peer)
            self._made_room.append(stalest.peer)
        self.strangers += before is None and memory is None
        if before is not None:
            entry.heard = max(entry.heard, before.heard)
        self._entries[peer] = entry
        self._memories.pop(peer, None)
        suspicion = self._suspicions.get(peer)
        if suspicion is not None and entry.heard > suspicion.since:  # what was on its way before says nothing
            suspicion.heard_again = True
        if before is not None and (before.standing, before.state, before.nat) == (entry.standing, entry.state, entry.nat):
            return None
        standing = entry.standing
        return PeerSeen(peer, standing.round, standing.tokens, standing.loss, entry.state, entry.nat)

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
            allowed = seconds / 2 if peer in doubted else seconds
            if now - entry.heard > allowed:
                self._drop(peer)
                lost.append(PeerLost(peer, f"silent for {allowed:.0f} s"))
        return lost

    def review(self, wall: float) -> list[PeerLost]:
        """Drop the members that may be none any more: an admission ended, or was revoked."""
        refused = [peer for peer, entry in self._entries.items() if not self.access.admits(peer, entry.admission, wall)]
        for peer in refused:
            self._drop(peer)
        return [PeerLost(peer, "it may not be a member any more") for peer in refused]

    def _drop(self, peer: PeerId) -> bool:
        entry, suspicion = self._entries.pop(peer, None), self._suspicions.pop(peer, None)
        if entry is None:
            return False
        self._remember(peer, _Memory(entry.count, entry.heard, suspicion.since if suspicion else -math.inf))
        return True

    def _remember(self, peer: PeerId, memory: _Memory) -> None:
        self._memories.pop(peer, None)
        self._memories[peer] = memory
        while len(self._memories) > _MEMORY:
            del self._memories[next(iter(self._memories))]

    def known(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` is a member, or had to make room and was heard not so long ago that it must be gone."""
        memory = self._memories.get(peer)
        return peer in self._entries or (memory is not None and self._is_sample() and now - memory.heard < 3 * self.lasts(now))

    def _is_sample(self) -> bool:
        """Whether there are more members than we hold."""
        return len(self._entries) + len(self._memories) > self.timing.capacity

    # --- who can be reached -----------------------------------------------------------------------

    def suspect(self, peer: PeerId, now: float, seconds: float = _BACK_OFF) -> None:
        """`peer` could not be reached: no partner for `seconds`, doubled with every failure in a row."""
        if peer not in self._entries:
            return
        failures = self._suspicions[peer].failures + 1 if peer in self._suspicions else 0
        pause = min(seconds * 2.0 ** min(failures, 16), _LONGEST_BACK_OFF)
        self._suspicions[peer] = _Suspicion(now, now + pause, failures)

    def trust(self, peer: PeerId) -> None:
        """`peer` was reached: all is forgiven."""
        self._suspicions.pop(peer, None)

    def suspected(self, now: float) -> set[PeerId]:
        """Members that are not to be chosen now."""
        return {peer for peer, doubt in self._suspicions.items() if now < doubt.until or not doubt.heard_again}

    # --- what is asked ----------------------------------------------------------------------------

    def live(self, now: float, reach: Mapping[PeerId, Reach] | None = None) -> list[Member]:
        """All live members, in the order in which they were learned; `reach` says who is connected how."""
        seconds = self.lasts(now)
        return [
            Member(
                peer_id=peer,
                standing=entry.standing,
                state=entry.state,
                addresses=entry.addresses,
                version=entry.version,
                age=now - entry.heard,
                reach=(reach or {}).get(peer),
                lead=entry.lead,
                nat=entry.nat,
                relays=entry.relays,
            )
            for peer, entry in self._entries.items()
            if now - entry.heard <= seconds
        ]

    def said(self, peer: PeerId) -> tuple[bytes, int, float]:
        """The last heartbeat of `peer` as it came, its life, and when it was sealed; empty for one that is no member."""
        entry = self._entries.get(peer)
        return (entry.raw, entry.life, entry.heard) if entry else (b"", 0, 0.0)

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        entry = self._entries.get(peer)
        return entry.addresses if entry else ()

    def sample(self, rng: random.Random, count: int, now: float) -> list[PeerId]:
        """Up to `count` live members, uniformly at random; suspected ones too, or they would never be cleared."""
        seconds = self.lasts(now)
        peers = [peer for peer, entry in self._entries.items() if now - entry.heard <= seconds]
        return rng.sample(peers, min(count, len(peers)))

    def encode_view(self, rng: random.Random, now: float, without: Container[bytes] = ()) -> list[tuple[bytes, float]]:
        """Sealed heartbeats for others, each with its age in seconds, within `timing.view` and `timing.view_bytes`:
        half of them the freshest, half drawn from the rest. `without` are those that the other side has."""
        seconds = self.lasts(now)
        entries = [entry for entry in self._entries.values() if now - entry.heard <= seconds and entry.raw not in without]
        entries.sort(key=_HEARD, reverse=True)
        half = (self.timing.view + 1) // 2
        rest = entries[half:]
        chosen, size = [], 0
        for entry in entries[:half] + rng.sample(rest, min(len(rest), self.timing.view - half)):
            if size + len(entry.raw) <= self.timing.view_bytes:
                size += len(entry.raw)
                chosen.append((entry.raw, now - entry.heard))
        return chosen

    def clock_offset(self) -> float:
        """The median of the members' clocks minus ours, in seconds; 0 without members."""
        offsets = [entry.offset for entry in self._entries.values()]
        return statistics.median(offsets) if offsets else 0.0


@lru_cache(maxsize=1024)
def _usable(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Those that can be dialled. Parsing costs more than the signature, and a member mostly tells the same ones again."""
    return tuple(address for address in addresses if dialable(address))


def _entry(raw: bytes, body: pb.Body, times: tuple[float, float], own_round: int) -> _Entry:
    """Check a heartbeat's content; ProtocolError for what no honest node sends."""
    heartbeat, (now, wall) = body.heartbeat, times
    nat = cast("NatClass", heartbeat.reach) if heartbeat.reach in get_args(NatClass) else None
    standing = standing_from_wire(heartbeat.standing)
    if not _STATE.fullmatch(heartbeat.state):
        raise ProtocolError(f"a heartbeat tells of a state {readable(heartbeat.state, 20)!r}.")
    if max(heartbeat.count, heartbeat.time_ms) >= MAX_NUMBER:
        raise ProtocolError("a heartbeat's numbers are beyond all measure.")
    if len(heartbeat.addresses) > _MAX_ADDRESSES or len(heartbeat.version) > 32:
        raise ProtocolError("a heartbeat has too many addresses or too long a version.")
    addresses = _usable(tuple(address[: MAX_ADDRESS + 1] for address in heartbeat.addresses))
    return _Entry(
        peer=PeerId(body.sender),
        raw=raw,
        count=heartbeat.count,
        standing=standing,
        state=heartbeat.state,
        addresses=addresses,
        version=readable(heartbeat.version),
        offset=heartbeat.time_ms / 1000 - wall,
        heard=now,
        lead=standing.round - own_round,
        nat=nat,
        relays=heartbeat.relays,
        admission=heartbeat.admission,
        life=heartbeat.life,
    )
