"""The announcements that one node holds, and those that it has heard of and not yet looked into.

The rule: the latest version of each (run, owner) counts, whoever brings it; so all nodes come to the same set, in whatever
order they hear. An announcement is held, and told on, only once a node at one of its addresses has said the same: signatures
cost nothing, hosts do. Of one address group so many are held, and who is held keeps its place until it ends. No clock in here:
`now` is a monotonic time, `wall` the time of day, in seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nolocod.errors import ProtocolError, RemoteError, UsageError
from nolocod.p2p.limits.newest import Newest
from nolocod.p2p.transport.multiaddrs import split
from nolocod.proto import nolocod_pb2 as pb
from nolocod.run import announcements

if TYPE_CHECKING:
    from collections.abc import Collection

    from nolocod.identity import PeerId
    from nolocod.run.announcements import Announcement

CAPACITY = 128
"""Announcements that are held."""
PER_GROUP = 4
"""Held of those whose nodes answered from one address group."""
PENDING = 32
"""Announcements that wait to be looked into."""
PER_CARRIER = 8
"""Of these from one peer."""
PER_MESSAGE = 8
NEWS = 60.0
"""Seconds for which what is new is told to everybody who is asked."""
_AGAIN = 300.0
"""Seconds for which one that nobody confirmed is not looked into again."""
_REMEMBERED = 512

Key = tuple[str, "PeerId"]


def read(raw: bytes) -> Announcement:
    """`announcements.read`, and its addresses are such that can be dialled. ProtocolError or SignatureError."""
    said = announcements.read(raw)
    try:
        for address in said.addresses:
            split(address)
    except UsageError as error:
        raise ProtocolError(f"an announcement has an address that is none: {error.cause}") from error
    return said


@dataclass
class _Held:
    said: Announcement
    group: str
    since: float


@dataclass
class _Pending:
    said: Announcement
    carrier: PeerId


@dataclass
class Registry:
    """Of a node in run `run_id` of `owner`; both empty for one that is in none."""

    run_id: str = ""
    owner: str = ""
    _held: dict[Key, _Held] = field(default_factory=dict)
    _pending: dict[Key, _Pending] = field(default_factory=dict)
    _failed: Newest[bytes, float] = field(default_factory=lambda: Newest(_REMEMBERED))
    """Digests of those that nobody confirmed, and when."""

    @property
    def own(self) -> bytes:
        """What our own run's owner says of it; empty if nothing."""
        held = self._held.get((self.run_id, self.owner))  # type: ignore[arg-type]  # a peer id
        return held.said.raw if held else b""

    def hear(self, raw: bytes, carrier: PeerId, now: float, wall: float) -> Announcement | None:
        """Take in a sealed announcement; that one, if it is to be looked into. ProtocolError or SignatureError."""
        if (digest := announcements.digest(raw)) in self.digests or now - self._failed.get(digest, -_AGAIN) < _AGAIN:
            return None
        if any(pending.said.digest == digest for pending in self._pending.values()):
            return None
        if not (said := read(raw)).lasts(wall):
            return None
        held, pending = self._held.get(said.key), self._pending.get(said.key)
        if said.key == (self.run_id, self.owner):  # the manifest itself names its owner
            self._hold(said, "", now)
            return None
        if held is not None:  # the same owner's: its nodes were there when it came first
            self._hold(said, held.group, now)
            return None
        if pending is not None and said.version <= pending.said.version:
            return None
        of_carrier = sum(one.carrier == carrier for one in self._pending.values())
        if len(self._pending) >= PENDING or of_carrier >= PER_CARRIER:
            return None
        self._pending[said.key] = _Pending(said, carrier)
        return said

    def confirmed(self, said: Announcement, group: str, now: float) -> None:
        """A node at one of its addresses, in this address group, said the same."""
        self._pending.pop(said.key, None)
        groups = Counter(one.group for one in self._held.values())
        if len(self._held) < CAPACITY and ("/" not in group or groups[group] < PER_GROUP):
            self._hold(said, group, now)
        else:
            self._failed[said.digest] = now

    def failed(self, said: Announcement, now: float) -> None:
        """Nobody there said the same."""
        self._pending.pop(said.key, None)
        self._failed[said.digest] = now

    def _hold(self, said: Announcement, group: str, now: float) -> None:
        if (held := self._held.get(said.key)) is not None and held.said.version >= said.version:
            return
        self._held[said.key] = _Held(said, group, now)

    def expire(self, wall: float) -> None:
        self._held = {key: one for key, one in self._held.items() if wall < one.said.expires}

    @property
    def digests(self) -> frozenset[bytes]:
        return frozenset(one.said.digest for one in self._held.values())

    def runs(self) -> list[Announcement]:
        """All that are held and were not withdrawn."""
        return [one.said for one in self._held.values() if not one.said.withdrawn]

    # --- messages -----------------------------------------------------------------------------------

    def question(self, now: float) -> pb.RunsRequest:
        """What we hold, and what is new of it."""
        news = [one.said.raw for one in self._held.values() if now - one.since < NEWS]
        return pb.RunsRequest(digests=sorted(self.digests), records=news[-PER_MESSAGE:])

    def answer(self, known: Collection[bytes]) -> pb.Runs:
        """What the other does not hold, of whose digests `known` are; the freshest, if it is much."""
        others = [one.said for one in self._held.values() if one.said.digest not in known]
        return pb.Runs(records=[said.raw for said in others[-PER_MESSAGE:]], own=self.own)

    def learn(self, records: Collection[bytes], carrier: PeerId, now: float, wall: float) -> tuple[list[Announcement], int]:
        """Take in what `carrier` told: those that are to be looked into, and how many were not valid. ProtocolError for more
        than anybody tells."""
        if len(records) > PER_MESSAGE:
            raise ProtocolError(f"a peer tells more than {PER_MESSAGE} announcements at once.")
        found, faults = [], 0
        for raw in records:
            try:
                said = self.hear(raw, carrier, now, wall)
            except RemoteError:
                faults += 1
            else:
                found += [said] if said is not None else []
        return found, faults
