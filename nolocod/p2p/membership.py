"""Who is in the run and alive: a table of signed heartbeats.

The rule: only a heartbeat's own signature makes a member, whoever carried it; a member lives as long as its
count grows. No clock, no randomness, no network in here: `now` is a monotonic time in seconds, `wall` the
time of day in seconds, both passed in.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nolocod.errors import ProtocolError
from nolocod.events import PeerLost, PeerSeen
from nolocod.identity import PeerId
from nolocod.p2p.addresses import dialable
from nolocod.proto.envelope import MAX_NUMBER, open_envelope, peek, readable, standing_from_wire
from nolocod.terms import Member, Standing

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from nolocod.events import Reach
    from nolocod.proto import nolocod_pb2 as pb

_STATE = re.compile(r"[a-z]{1,16}")
"""What a state looks like. One that we do not know is a later release's: such a member is shown, and not chosen."""
MAX_HEARTBEAT = 4096
"""Bytes of one sealed heartbeat."""
_MAX_ADDRESSES = 8
_BACK_OFF = 10.0
_LONGEST_BACK_OFF = 300.0


@dataclass
class _Entry:
    """What is known of one member; `heard` is the time of its last accepted heartbeat."""

    raw: bytes
    count: int
    standing: Standing
    state: str
    addresses: tuple[str, ...]
    version: str
    offset: float
    heard: float
    lead: int


@dataclass
class _Suspicion:
    """A member that could not be reached: not chosen until `until` and until it is heard again."""

    until: float
    failures: int
    heard_again: bool = False


@dataclass
class Membership:
    """The members of run `run_id` as node `own` knows them; `own` itself is never in it.

    `live_seconds` is how long a member lives without a new heartbeat; at most `capacity` are kept.
    """

    own: PeerId
    run_id: str
    live_seconds: float = 20.0
    capacity: int = 4096
    _entries: dict[PeerId, _Entry] = field(default_factory=dict)
    _counts: dict[PeerId, int] = field(default_factory=dict)  # of those that are gone, so that echoes do not revive them
    _suspicions: dict[PeerId, _Suspicion] = field(default_factory=dict)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._entries

    # --- what comes in ----------------------------------------------------------------------------

    def heard(self, raw: bytes, now: float, wall: float, own_round: int = 0) -> PeerSeen | PeerLost | None:
        """Take in a sealed heartbeat, at our round `own_round`; return what it changed, None for an echo.

        Raises ProtocolError (size, content), SignatureError, OtherRunError or PeerVersionError.
        """
        if len(raw) > MAX_HEARTBEAT:
            raise ProtocolError(f"a heartbeat of {len(raw)} bytes is above the limit of {MAX_HEARTBEAT}.")
        if self._is_echo(raw):
            return None
        body = open_envelope(raw, run_id=self.run_id, receiver="")
        if body.WhichOneof("content") != "heartbeat":
            raise ProtocolError("gossip carries something that is no heartbeat.")
        peer, entry = PeerId(body.sender), _entry(raw, body.heartbeat, (now, wall), own_round)
        if peer == self.own:
            return None
        if entry.state == "leaving":
            known = self._drop(peer)
            self._remember(peer, entry.count)
            return PeerLost(peer, "it left") if known else None
        return self._admit(peer, entry, now)

    def _is_echo(self, raw: bytes) -> bool:
        """Tell cheaply, without a look at the signature, that a heartbeat is no newer than what we have."""
        try:
            body = peek(raw)
        except ProtocolError:
            return False  # open_envelope says it better
        peer = PeerId(body.sender)
        entry = self._entries.get(peer)
        last = entry.count if entry else self._counts.get(peer, -1)
        return body.HasField("heartbeat") and body.heartbeat.count <= last

    def _admit(self, peer: PeerId, entry: _Entry, now: float) -> PeerSeen | None:
        before = self._entries.get(peer)
        if before is None and len(self._entries) >= self.capacity:
            stalest = min(self._entries, key=lambda other: self._entries[other].heard)
            if now - self._entries[stalest].heard < self.live_seconds / 2:
                return None  # all of them are fresh: the newcomer has to wait
            self._drop(stalest)
        self._entries[peer] = entry
        self._counts.pop(peer, None)
        if (suspicion := self._suspicions.get(peer)) is not None:
            suspicion.heard_again = True
        if before is not None and (before.standing, before.state) == (entry.standing, entry.state):
            return None
        standing = entry.standing
        return PeerSeen(peer, standing.round, standing.tokens, standing.loss, entry.state)

    def expire(self, now: float) -> list[PeerLost]:
        """Drop the members that are silent for too long."""
        silent = [peer for peer, entry in self._entries.items() if now - entry.heard > self.live_seconds]
        for peer in silent:
            self._drop(peer)
        return [PeerLost(peer, f"silent for {self.live_seconds:.0f} s") for peer in silent]

    def _drop(self, peer: PeerId) -> bool:
        entry = self._entries.pop(peer, None)
        self._suspicions.pop(peer, None)
        if entry is None:
            return False
        self._remember(peer, entry.count)
        return True

    def _remember(self, peer: PeerId, count: int) -> None:
        self._counts.pop(peer, None)
        self._counts[peer] = count
        while len(self._counts) > self.capacity:
            del self._counts[next(iter(self._counts))]

    # --- who can be reached -----------------------------------------------------------------------

    def suspect(self, peer: PeerId, now: float, seconds: float = _BACK_OFF) -> None:
        """`peer` could not be reached: no partner for `seconds`, doubled with every failure in a row."""
        if peer not in self._entries:
            return
        failures = self._suspicions[peer].failures + 1 if peer in self._suspicions else 0
        pause = min(seconds * 2.0 ** min(failures, 16), _LONGEST_BACK_OFF)
        self._suspicions[peer] = _Suspicion(now + pause, failures)

    def trust(self, peer: PeerId) -> None:
        """`peer` was reached: all is forgiven."""
        self._suspicions.pop(peer, None)

    def suspected(self, now: float) -> set[PeerId]:
        """Members that are not to be chosen now."""
        return {peer for peer, doubt in self._suspicions.items() if now < doubt.until or not doubt.heard_again}

    # --- what is asked ----------------------------------------------------------------------------

    def live(self, now: float, reach: Mapping[PeerId, Reach] | None = None) -> list[Member]:
        """All live members, in the order in which they were learned; `reach` says who is connected how."""
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
            )
            for peer, entry in self._entries.items()
            if now - entry.heard <= self.live_seconds
        ]

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        entry = self._entries.get(peer)
        return entry.addresses if entry else ()

    def sample(self, rng: random.Random, count: int, now: float) -> list[PeerId]:
        """Up to `count` live members, uniformly at random; suspected ones too, or they would never be cleared."""
        peers = [member.peer_id for member in self.live(now)]
        return rng.sample(peers, min(count, len(peers)))

    def encode_view(self, rng: random.Random, limit: int) -> list[bytes]:
        """Up to `limit` sealed heartbeats for others: half of them the freshest, half drawn from the rest."""
        entries = sorted(self._entries.values(), key=lambda entry: -entry.heard)
        if len(entries) <= limit:
            return [entry.raw for entry in entries]
        half = (limit + 1) // 2
        chosen = entries[:half] + rng.sample(entries[half:], limit - half)
        return [entry.raw for entry in chosen]

    def clock_offset(self) -> float:
        """The median of the members' clocks minus ours, in seconds; 0 without members."""
        offsets = [entry.offset for entry in self._entries.values()]
        return statistics.median(offsets) if offsets else 0.0


def _entry(raw: bytes, heartbeat: pb.Heartbeat, times: tuple[float, float], own_round: int) -> _Entry:
    """Check a heartbeat's content; ProtocolError for what no honest node sends."""
    now, wall = times
    standing = standing_from_wire(heartbeat.standing)
    if not _STATE.fullmatch(heartbeat.state):
        raise ProtocolError(f"a heartbeat tells of a state {readable(heartbeat.state, 20)!r}.")
    if max(heartbeat.count, heartbeat.time_ms) >= MAX_NUMBER:
        raise ProtocolError("a heartbeat's numbers are beyond all measure.")
    if len(heartbeat.addresses) > _MAX_ADDRESSES or len(heartbeat.version) > 32:
        raise ProtocolError("a heartbeat has too many addresses or too long a version.")
    addresses = tuple(address for address in heartbeat.addresses if dialable(address))
    return _Entry(
        raw=raw,
        count=heartbeat.count,
        standing=standing,
        state=heartbeat.state,
        addresses=addresses,
        version=readable(heartbeat.version),
        offset=heartbeat.time_ms / 1000 - wall,
        heard=now,
        lead=standing.round - own_round,
    )
