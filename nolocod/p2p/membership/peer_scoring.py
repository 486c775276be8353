"""Peer scoring: what this node thinks of each peer by its conduct, and whom it bans for a while (mesh.py tells the others).

The rule: only what a peer must have done itself counts against it. All that reaches us is signed, so a false signature or
an altered byte is its sender's doing; a line that breaks or is slow may be nobody's, and bans nobody. A score is a moving
average between 0 and 1; below `_THRESHOLD` follows a ban, which ends by itself, and is twice as long the next time. No
clock and no disk but in `Records`: `now` is the time of day in seconds, as bans outlive this process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from nolocod import errors
from nolocod.disk import written_whole
from nolocod.identity import PeerId, short
from nolocod.observe.events import PeerBanned, PeerJudged, Troubled
from nolocod.p2p.limits.newest import Newest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.errors import RemoteError
    from nolocod.observe.events import Emit
    from nolocod.proto.types import Ended

_UNKNOWN = 0.5
"""What is thought of a peer of which nothing is known."""
_THRESHOLD = 0.2
_PAROLE = 0.35
"""After a ban: less than a newcomer has, so that one more fault or two ban again."""
_FIRST_BAN = 600.0
_LONGEST_BAN = 86_400.0
_KEPT = 1024
"""Peers that are kept in mind, for some 200 bytes each."""
_MAX_BYTES = 1 << 20
_NEIGHBOURS = 3
"""Bans of one address group, running at once, that keep out whoever comes from it and has committed no exchange."""


class Conduct(Enum):
    """What a peer did: what it is worth (0 or 1), how much it weighs in the average, its name, and the seconds of a first ban.

    A false tensor bans a stranger at once, and for an hour: no honest node makes one, and each costs an inner step or two.
    """

    COMMITTED = (1.0, 0.1, "an exchange was committed")
    FALSE_TENSOR = (0.0, 0.65, "its tensor was none of this run, or not finite", 6 * _FIRST_BAN)
    REJECTED = (0.0, 0.2, "its tensor was rejected")
    BROKE_PROTOCOL = (0.0, 0.25, "it broke the protocol")
    FALSE_SIGNATURE = (0.0, 0.5, "a signature was false")
    ALTERED_BYTES = (0.0, 0.5, "bytes did not fit what it had signed")
    FALSE_WEIGHTS = (0.0, 0.5, "the weights that it gave were not what others have")
    FALSE_NEWS = (0.0, 0.1, "it passed on heartbeats that are not valid")
    WITHHELD = (0.0, 0.08, "it accepted, and then gave nothing")
    FLOODED = (0.0, 0.02, "it asked for more than anybody needs")

    def __init__(self, worth: float, weight: float, words: str, first_ban: float = _FIRST_BAN) -> None:
        self.worth = worth
        self.weight = weight
        self.words = words
        self.first_ban = first_ban


def conduct_of(error: RemoteError) -> Conduct | None:
    """What a peer did that caused `error` here; None if it may be no fault of its own."""
    match error:
        case errors.SignatureError():
            return Conduct.FALSE_SIGNATURE
        case errors.AlteredBytesError():
            return Conduct.ALTERED_BYTES
        case errors.ProtocolError():
            return Conduct.BROKE_PROTOCOL
        case errors.HarmfulTensorError():
            return Conduct.REJECTED
        case errors.RejectedTensorError():
            return Conduct.FALSE_TENSOR
    return None


def conduct_in(ended: Ended, failure: RemoteError | None, size: int) -> Conduct | None:
    """What a partner did in an exchange whose messages may have `size` bytes; `failure` is what we found wrong ourselves.

    What it says of us in an Abort is no failure of its own. A partner that is in time with nothing, or gives all and
    never the verdict, withholds; one of whose bytes a part has come may have a slow line.
    """
    if ended.outcome == "committed":
        return Conduct.COMMITTED
    if ended.outcome == "in_doubt":
        return Conduct.WITHHELD
    if isinstance(failure, errors.PeerTooSlowError):
        return None if 0 < ended.received < size else Conduct.WITHHELD
    return conduct_of(failure) if failure is not None else None


class Record(msgspec.Struct):
    """One peer. Times are times of day in seconds."""

    peer_id: Annotated[str, Meta(max_length=64)]
    score: Annotated[float, Meta(ge=0, le=1)] = _UNKNOWN
    accepted: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    """Exchanges with it that were committed, less half for each thing to its blame."""
    bans: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    until: float = 0.0
    """When its ban ends."""
    seen: float = 0.0

    def banned(self, now: float) -> float:
        """Seconds that its ban still lasts: from any moment on never more than the longest, however clocks are set."""
        self.until = min(self.until, now + _LONGEST_BAN)
        return max(self.until - now, 0.0)


@dataclass
class Reputation:
    """All that is known of peers. Without `judging` (manifest: `trust.reputation`) conduct is counted, and nobody is banned.

    `newcomers` is the number of committed exchanges until a peer is none (`trust.probation`).
    """

    emit: Emit
    newcomers: int = 0
    judging: bool = True
    dirty: bool = False
    """Something changed since `dirty` was last set to False."""
    group_of: Callable[[PeerId], str | None] = lambda _: None
    """The address group of a connected peer (address_groups)."""
    _records: dict[PeerId, Record] = field(default_factory=dict)
    _banned_at: Newest[PeerId, str] = field(default_factory=lambda: Newest(_KEPT))

    def __len__(self) -> int:
        return len(self._records)

    def judge(self, peer: PeerId, conduct: Conduct, now: float) -> None:
        """Take note of what `peer` did. What it does while it is banned changes nothing."""
        record = self._records.get(peer) or Record(peer)
        if record.banned(now):
            return
        before = record.score
        record.accepted = record.accepted + 1 if conduct is Conduct.COMMITTED else record.accepted // 2
        record.score += conduct.weight * (conduct.worth - record.score)
        record.seen = now
        self._keep(peer, record, now)
        if not self.judging:
            return
        banned = record.score < _THRESHOLD
        if banned or round(before, 2) != round(record.score, 2):
            self.emit(PeerJudged(peer, 0.0 if banned else record.score, conduct.words))
        if banned:
            seconds = min(conduct.first_ban * 2.0 ** min(record.bans, 16), _LONGEST_BAN)
            record.bans += 1
            record.until = now + seconds
            record.score = _PAROLE
            record.accepted = 0  # a newcomer once more
            if group := self.group_of(peer):
                self._banned_at[peer] = group
            self.emit(PeerBanned(peer, seconds, conduct.words))

    def committed(self, peer: PeerId) -> int:
        """Exchanges with `peer` that were committed since its last ban; each thing to its blame halved them."""
        record = self._records.get(peer)
        return record.accepted if record else 0

    def probation(self, peer: PeerId) -> bool:
        """Whether too few exchanges with `peer` were committed for it to count like others."""
        return self.committed(peer) < self.newcomers

    def influence(self, peer: PeerId) -> float:
        """What `peer` weighs beside others, from 1 / (1 + probation) for a stranger to 1 after probation."""
        return (1 + min(self.committed(peer), self.newcomers)) / (1 + self.newcomers)

    def banned(self, peer: PeerId, now: float) -> float:
        """Seconds for which nothing is asked of `peer` and given to it; 0 if it is not banned."""
        record = self._records.get(peer)
        left = record.banned(now) if record is not None and self.judging else 0.0
        if left or not self._banned_at or not self.judging or self.committed(peer) or not (group := self.group_of(peer)):
            return left
        theirs = [self._records.get(one) for one, at in self._banned_at.items() if at == group]
        running = sorted((one.banned(now) for one in theirs if one is not None), reverse=True)
        return running[_NEIGHBOURS - 1] if len(running) >= _NEIGHBOURS else 0.0

    def objection(self, peer: PeerId, now: float) -> errors.BannedError | None:
        """The ban of `peer` as an error, while it lasts."""
        left = self.banned(peer, now)
        return errors.BannedError(f"{short(peer)} is banned here for {math.ceil(left)} s more.") if left else None

    def shunned(self, now: float) -> set[PeerId]:
        """All that are banned now."""
        return {peer for peer, record in self._records.items() if record.until and self.banned(peer, now)}

    def _keep(self, peer: PeerId, record: Record, now: float) -> None:
        self.dirty = True
        if peer not in self._records and len(self._records) >= _KEPT:
            del self._records[min(self._records, key=lambda other: _worth_keeping(self._records[other], now))]
        self._records[peer] = record

    # --- over restarts ------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """All records, for `load`."""
        return msgspec.json.encode(list(self._records.values()))

    def load(self, raw: bytes, now: float) -> None:
        """Take over what `dump` gave, and tell who is banned still. Raises msgspec.DecodeError."""
        for record in msgspec.json.decode(raw, type=list[Record])[:_KEPT]:
            peer = PeerId(record.peer_id)
            self._records[peer] = record
            if left := self.banned(peer, now):
                self.emit(PeerBanned(peer, left, "its conduct before this node's last start"))


def _worth_keeping(record: Record, now: float) -> tuple[bool, float, int, float, float]:
    """Greater for what would be missed more: running bans first, of those the longest; then past bans and committed
    exchanges; then scores far from a newcomer's, and those seen last."""
    left = record.banned(now)
    return left > 0, left, record.bans + record.accepted, abs(record.score - _UNKNOWN), record.seen


class Records:
    """A Reputation and the file in which it outlives this process: written whole, and a damaged one told and forgotten."""

    def __init__(self, path: Path, reputation: Reputation, now: float) -> None:
        self._path = path
        self._reputation = reputation
        try:
            with path.open("rb") as file:
                reputation.load(file.read(_MAX_BYTES), now)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            cause = f"{path} is damaged, and what is thought of peers begins anew ({error})."
            reputation.emit(Troubled(errors.DataDirError.entry.code, cause))

    def save(self) -> None:
        """Write the file if anything changed. Blocks on the disk; raises DiskFullError or DataDirError."""
        if not self._reputation.dirty:
            return
        self._reputation.dirty = False
        try:
            with written_whole(self._path) as file:
                file.write(self._reputation.dump())
        except errors.LocalError:
            self._reputation.dirty = True  # the next save tries again
            raise
