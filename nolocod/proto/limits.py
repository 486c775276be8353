"""The bounds of exchanges and snapshots: what a peer may send, hold or delay. Sizes in bytes, times in seconds.

The rule: a size is compared with the limit of the messages that may come before anything is read of them, and no
wait on a peer is without one of these times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nolocod.proto.types import AHEAD_CHUNKS
from nolocod.units import SLOWEST_RATE

_IN_FLIGHT = 4 << 20
"""Bytes that were sent and have not arrived, on a slow line."""
SLOWEST_STEP = 300.0
"""Seconds of an inner step for which a partner's word is taken."""
_STEPS = 3.0
"""A trainer may be at the beginning of a step, have a command before this one, and take half as long again as it did."""
SLOWEST_DISK = 5_000_000
"""Bytes per second, of writing or reading."""

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST = 4 << 10
"""Bytes of the first envelope on a stream, and of every other one that is not named in `_MORE`."""
_REASON = 16 << 10
_SKIPPED = 64 << 10
_MORE = {
    **dict.fromkeys(("busy", "refuse", "abort"), _REASON),
    **dict.fromkeys(("confirm", "commit"), _SKIPPED + FIRST),
    "gossip": 80 << 10,  # heartbeats, and all that the run's owner has revoked (64 KiB)
    "runs_request": 24 << 10,
    "runs": 32 << 10,
    "info": (16 << 20) + FIRST,  # a manifest with its tokenizer
    "snapshot_offer": 4 << 20,  # the hashes of 120 000 chunks: 240 GB
}


def most_bytes(names: Iterable[str]) -> int:
    """Bytes of the largest envelope among messages of these names (fields of `Body`); a Describe's follow from the run."""
    return max((_MORE.get(name, FIRST) for name in names), default=FIRST)


@dataclass(frozen=True)
class Limits:
    """The defaults are the daemon's; tests make them small."""

    chunk_bytes: int = 4 << 20
    snapshot_bytes: int = 256 << 30
    """The largest snapshot that a newcomer fetches."""
    chunks_per_request: int = 256
    ahead_chunks: int = AHEAD_CHUNKS
    skipped_bytes: int = _SKIPPED
    """The bit map of a message of 34 G elements in blocks of 64 Ki."""
    resumes: int = 5
    """Broken streams in a row, with no chunk gained, after which a transfer is given up."""

    dial_seconds: float = 30.0
    accept_seconds: float = 10.0
    offer_seconds: float = 120.0
    """How long a newcomer waits for a donor's snapshot, steps and disk aside: see `written`."""
    snapshot_seconds: float = 120.0
    """How long the partner may take to write its tensor, where neither size nor steps ask for more: see `paced`."""
    settle_seconds: float = 120.0
    """How long it may inspect ours."""
    stall_seconds: float = 60.0
    """The window in which `least` bytes move while chunks are due."""
    stall_rate: float = SLOWEST_RATE / 4
    """An owner's limit of `SLOWEST_RATE` may be shared by an exchange, two uploads and all else."""
    acknowledge_seconds: float = 10.0
    resume_seconds: float = 20.0
    """How long a broken exchange waits to be resumed: a small one."""
    longest_resume_seconds: float = 180.0
    """A large one: see `resume`."""
    redial_seconds: float = 2.0
    """How long a side in doubt leaves the redial to its partner before it asks itself."""
    doubt_seconds: float = 20.0
    abort_seconds: float = 1.0
    working_seconds: float = 5.0
    """A silent side says Working this often; well below any stream's progress deadline."""
    sample_seconds: float = 120.0
    """What a newcomer gives another donor to give some chunks to compare with: see `sample`."""
    chunk_seconds: float = 180.0
    """The slowest chunk: a reader that trickles is dropped."""
    busy_seconds: float = 600.0
    """How long a newcomer goes on asking donors that are all busy, at least: see `busy`."""
    turn_seconds: float = 60.0
    """What weights may take for nothing: see `turn`."""
    exchange_seconds: float = 600.0
    """For the chunks of a small exchange, both ways: see `whole`."""
    slowest_rate: float = 125_000.0
    """Bytes per second: a line of 5 Mbit/s that an exchange shares with two uploads, heartbeats, and others of its house."""
    bytes_per_second: float = float(1 << 20)
    """Of weights that are given well."""

    def paced(
        self, phase: float, size: int, steps: tuple[float, float] = (0.0, 0.0), credit: float = 1.0, *, wary: bool = False
    ) -> Limits:
        """For a partner of a node whose inner phase takes `phase` seconds, with the `Standing.step_seconds` of both in
        `steps`, ours first; for its word it is waited for `credit` phases at most.

        In half of the phase, or in 20 s and what `SLOWEST_DISK` takes, any trainer with short steps ends its step, and writes
        or inspects `size` bytes, also one ten times as slow; one with long steps may take as long as some of them, and takes
        several in a phase, as all do. Who has less credit than a phase has half of it. Where we are `wary` each part has a
        quarter of the 20 s, or two steps like ours: enough for a trainer like ours, and for a line that stands still."""
        own, told = steps
        long, share = max(_STEPS * own, min(_STEPS * min(told, SLOWEST_STEP), credit * phase)), 1.0 if credit >= 1 else 0.5
        if wary:
            phase, long, share = 0.0, 2 * own, 0.25
        snapshot, settle = (
            max(share * max(20.0 + size / SLOWEST_DISK, min(phase / 2, most)), long)
            for most in (self.snapshot_seconds, self.settle_seconds)
        )
        stall, accept = share * self.stall_seconds, share * self.accept_seconds
        return replace(self, snapshot_seconds=snapshot, settle_seconds=settle, stall_seconds=stall, accept_seconds=accept)

    def whole(self, size: int) -> float:
        """Seconds for the chunks of an exchange of `size` bytes each way, at the least rate of honest lines."""
        return max(self.exchange_seconds, size / self.slowest_rate)

    def resume(self, size: int) -> float:
        """Seconds for which a broken exchange of `size` bytes each way is worth waiting: less than all of it again takes."""
        return max(self.resume_seconds, min(self.longest_resume_seconds, size / self.slowest_rate))

    def written(self, size: int) -> float:
        """Seconds for a donor's snapshot of `size` bytes: its trainer ends a step, writes it to a disk, and hashes it."""
        return self.offer_seconds + _STEPS * SLOWEST_STEP + 2 * size / SLOWEST_DISK

    def sample(self, fetched: float, step: float) -> float:
        """Seconds for some chunks of another donor's weights, where all of the first one's took `fetched`, what its trainer
        and disk took included, and inner steps take up to `step`."""
        return self.sample_seconds + fetched + _STEPS * min(step, SLOWEST_STEP)

    def turn(self, size: int) -> float:
        """Seconds for weights of `size` bytes that cost nobody else anything: for longer only while nobody else waits for
        the slot, or no other donor would be quicker."""
        return self.turn_seconds + size / self.bytes_per_second

    def busy(self, size: int) -> float:
        """Seconds for which donors of weights of `size` bytes may all be busy: whoever has a slot has its turn."""
        return max(self.busy_seconds, 1.5 * self.turn(size))

    def pace(self, size: int) -> float:
        """The rate that goes with it."""
        return size / self.turn(size)

    def settle(self, size: int) -> float:
        """The wait for the partner's verdict on `size` bytes: the last arrive, and it inspects them."""
        return self.settle_seconds + min(size, _IN_FLIGHT) / SLOWEST_RATE

    def least(self, size: int) -> float:
        """Bytes that move in `stall_seconds` of an exchange of `size` each way."""
        return self.stall_seconds * min(self.stall_rate, size / self.whole(size))
