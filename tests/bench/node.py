"""`python -m tests.bench node`: two daemons; the way of the second one from its start to its first inner step, and what its
network process takes of memory and processor after paired outer steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nolocod.studies.daemons import Daemon, folder
from nolocod.studies.testnet import Options as TestnetOptions
from nolocod.studies.testnet import Testnet
from tests.bench.base import BenchError, Options

if TYPE_CHECKING:
    from collections.abc import Callable

_PAIR_SECONDS = 2400.0
"""For the two to pair, on whatever machine."""
_INNER_STEPS = 53
"""A prime number makes one turn: there is time without an exchange."""
_LOOKS = 20


@dataclass(frozen=True)
class NodeResult:
    """One joining node. Seconds, bytes, and a share of one core."""

    join_seconds: float
    resident: int
    resident_peak: int
    idle_cpu: float
    paired: int

    def to_text(self) -> str:
        return (
            f"network process: {self.resident / 1e6:.0f} MB resident, {self.resident_peak / 1e6:.0f} MB at most; "
            f"{self.idle_cpu:.1%} of a core between exchanges, after {self.paired} paired outer steps; "
            f"first inner step {self.join_seconds:.1f} s after the start of `nolocod join`"
        )


def node(options: Options, say: Callable[[str], None]) -> NodeResult:
    """Join a lone node, let the two pair twice, and then watch the joined one's network process."""
    asked = TestnetOptions(nodes=1, outer_steps=1_000_000, inner_steps=_INNER_STEPS, model=options.model, threads=1)
    with folder() as root:
        pair = Testnet(asked, root)
        try:
            pair.start()
            pair.nodes[0].wait("its first inner step", _PAIR_SECONDS, lambda report: report.inner_steps > 0)
            began = time.monotonic()
            joined = pair.join()
            joined.wait("its first inner step", _PAIR_SECONDS, lambda report: report.inner_steps > 0)
            joining = time.monotonic() - began
            say(f"joined in {joining:.1f} s")
            joined.wait("its second exchange", _PAIR_SECONDS, lambda report: report.outer_paired >= 2)
            return _footprint(joined, options.seconds, joining)
        finally:
            pair.stop()


def _footprint(joined: Daemon, seconds: float, joining: float) -> NodeResult:
    """Watch the network process for `seconds` without an exchange; BenchError if there never are so many."""
    process = psutil.Process(joined.running.pid)
    for _ in range(_LOOKS):
        before, cpu, began = joined.poll(), sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(seconds)
        cpu, took = sum(process.cpu_times()[:2]) - cpu, time.monotonic() - began
        after = joined.poll()
        if before is not None and after is not None and before.outer_paired == after.outer_paired:
            peak = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line)
            return NodeResult(joining, process.memory_info().rss, int(peak.split()[1]) * 1024, cpu / took, after.outer_paired)
    raise BenchError(f"no {seconds:g} s went by without an exchange; give fewer --seconds.")
