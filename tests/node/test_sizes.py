"""Every deadline, limit and buffer that could cut an honest node, against models of 125 M to 7 B parameters, inner steps of
0.1 to 300 s, and home lines: computed, with the product's own figures.

The honest node here: a message of one, two or four bytes per parameter, sent on a line that it shares with two uploads of
weights; a trainer that is asked at the beginning of a step that takes half as long again as its steps did; a disk of 20 MB/s,
memory of 500 MB/s.
"""

from __future__ import annotations

import itertools

import pytest

from nolocod.p2p.host import HostLimits
from nolocod.p2p.snapshots.cross_check import CHUNKS
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport import yamux_stream
from nolocod.p2p.transport.yamux_frames import MOST_WINDOW
from nolocod.proto.content import HASH_SIZE
from nolocod.proto.limits import FIRST, Limits, most_bytes
from nolocod.proto.types import CHUNK_SIZE
from nolocod.run.manifest import CODEC_BYTES, Evaluation
from nolocod.trainer import pipe
from nolocod.trainer.patience import CHECKPOINT_BYTES, LOAD, Patience

PARAMETERS = (125_000_000, 1_300_000_000, 7_000_000_000)
STEPS = (0.1, 1.0, 30.0, 200.0, 300.0)
LINES = ((20e6 / 8, 5e6 / 8), (100e6 / 8, 20e6 / 8))
"""Bytes per second down, up."""
SHARED = 3
"""By an exchange and two uploads."""
OVERHEAD = 1.1
"""Of Noise, yamux, TCP and IP, repeated segments included."""
DISK, MEMORY = 20e6, 500e6
LATE = 1.5
"""A step may take so many times as long as those before it."""
PHASES = (1, 25, 100)
"""Inner steps between outer steps; of the median machine."""
MOST_UNLIKE = 8
"""Machines that are slower than that beside the median one give up rounds."""
LIMITS = Limits()
HALVES = 2.0
"""Seconds of its line that a stream's window holds at most: half of one lasted `_QUICK` at least when it grew last."""

bytes_of_each = pytest.mark.parametrize("each", sorted(CODEC_BYTES.values()))
sizes = pytest.mark.parametrize("parameters", PARAMETERS)
lines = pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line[0] * 8 / 1e6:.0f}/{line[1] * 8 / 1e6:.0f}")
steps = pytest.mark.parametrize("step", STEPS)


def slow(line: tuple[float, float]) -> float:
    """Bytes of a message or of weights a second, on the slow way of a line that is shared."""
    return line[1] / SHARED / OVERHEAD


def window(line: tuple[float, float]) -> float:
    """Bytes that are on the way on one stream: its window grew while it had the line alone."""
    return min(max(yamux_stream._SMALL, HALVES * 2 * yamux_stream._QUICK * line[0]), MOST_WINDOW)


@sizes
@bytes_of_each
@lines
def test_no_exchange_is_cut_for_its_line(parameters: int, each: float, line: tuple[float, float]) -> None:
    message, rate = each * parameters, slow(line)
    assert message / rate <= LIMITS.whole(message)
    for limits in (LIMITS, LIMITS.paced(1.0, message, wary=True)):
        piece = 512 << 10  # what moves is told in such pieces, ours and the partner's
        assert rate * limits.stall_seconds - piece >= limits.least(message)
    assert LIMITS.resume(message) >= 120.0, "a cut of two minutes"
    hashes = message // CHUNK_SIZE * (HASH_SIZE + 2) + FIRST
    assert hashes / rate < LIMITS.accept_seconds, "a Describe, behind which the first chunk waits"
    assert LIMITS.chunk_bytes >= CHUNK_SIZE
    assert LIMITS.skipped_bytes >= parameters / (64 << 10) / 8


@sizes
@bytes_of_each
@pytest.mark.parametrize(("own", "partner"), itertools.product(STEPS, STEPS))
def test_no_partner_is_cut_for_its_trainer(parameters: int, each: float, own: float, partner: float) -> None:
    message, write = each * parameters, parameters / DISK  # no codec's pass is slower
    for phase in PHASES if own == partner else PHASES[1:]:
        lasts = phase * max(own, partner / MOST_UNLIKE)  # as the median machine's
        limits = LIMITS.paced(lasts, message, (own, partner))
        assert limits.snapshot_seconds >= LATE * partner + write, "capture"
        assert limits.settle_seconds >= LATE * partner + write, "inspection"
    alike = LIMITS.paced(own, message, (own, own), wary=True)
    assert min(alike.snapshot_seconds, alike.settle_seconds) >= LATE * own + message / MEMORY, "wary, of one like us"


@sizes
@bytes_of_each
@lines
@steps
def test_no_confirmation_is_cut(parameters: int, each: float, line: tuple[float, float], step: float) -> None:
    """Our last bytes arrive, the partner inspects them, and its verdict comes back."""
    message = each * parameters
    limits = LIMITS.paced(step, message, (step, step))
    verdict = FIRST + LIMITS.skipped_bytes
    due = min(window(line), message) / slow(line) + LATE * step + message / MEMORY + verdict / slow(line)
    assert limits.settle(message) >= due


@sizes
@lines
@steps
def test_no_fetch_is_cut(parameters: int, line: tuple[float, float], step: float) -> None:
    weights, rate = 4 * parameters, slow(line)
    written = LATE * step + weights / DISK + weights / DISK  # by the donor's trainer, and read to be hashed
    assert LIMITS.written(weights) >= written
    assert CHUNK_SIZE / rate <= LIMITS.chunk_seconds, "and nothing bounds the whole for a newcomer"
    assert weights / rate <= LIMITS.whole(weights), "a donor's slot, after which it would have to come again"
    sampled = written + (CHUNKS + 1) * CHUNK_SIZE / rate
    fetched = 2 * weights / DISK + weights / LINES[1][0]  # of a donor with a better line, whose step just ended
    assert LIMITS.sample(fetched, step) >= sampled
    assert LIMITS.busy(weights) >= LIMITS.turn(weights) + 10
    assert weights <= LIMITS.snapshot_bytes
    hashes = weights // CHUNK_SIZE * (HASH_SIZE + 2) + FIRST
    assert hashes <= most_bytes(["snapshot_offer"])
    assert hashes < pipe.MAX_MESSAGE, "as the trainer tells them"


@sizes
@steps
@pytest.mark.parametrize("measured", [False, True])
def test_no_trainer_is_taken_for_one_that_hangs(parameters: int, step: float, measured: bool) -> None:
    patience = Patience(parameters, step if measured else 0.0, measured=measured)
    waits, state = LATE * step, 8 * parameters / MEMORY
    assert patience.command >= waits + 3 * state, "capture, apply, solo"
    assert patience.files(CHECKPOINT_BYTES) >= waits + CHECKPOINT_BYTES * parameters / DISK
    assert patience.files(2 * 4) >= waits + 2 * 4 * parameters / DISK, "a dump, written and hashed"
    assert patience.files(4) >= 4 * parameters / DISK, "a donor's weights"
    batches = Evaluation().batches * step / 3  # forward only
    assert patience.evaluation >= waits + batches
    assert Patience(parameters).evaluation >= batches, "a donor's weights are tried before any step"
    kept = 2 * CHECKPOINT_BYTES * parameters
    assert LOAD + kept / 5e6 >= kept / DISK


@pytest.mark.parametrize("line", [*LINES, (4e6 / 8, 4e6 / 8)], ids=lambda line: f"{line[0] * 8 / 1e6:.0f}")
def test_heartbeats_flow_beside_bulk(line: tuple[float, float]) -> None:
    timing, windows = Timing(), max(2 * yamux_stream._QUICK * HALVES, window(line) / line[0])
    queued = windows * SHARED * OVERHEAD  # seconds; what is on the way of each stream was sent while the line was its own
    for members in (2, 6, 100, 512):
        assert timing.pace(members) + queued < timing.lasts(members)
    assert queued < timing.request
    updates = queued / 2  # a reader returns credit for half a window at once
    assert updates < min(timing.ping, HostLimits().progress), "so the sender of bulk hears it, and pings nobody"
    assert LIMITS.working_seconds + queued < HostLimits().progress
    assert most_bytes(["gossip"]) / slow(line) < timing.request
