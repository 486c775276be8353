"""Bulk over one stream between two processes: beside what else there is, and through a relay of ours.

Raw sockets and TLS 1.3 by trio, stock py-libp2p (noise and yamux), and ours, in turn, repetition by repetition; one way, and
both ways at once. Writes of 1 MiB. What passes a relay is sealed twice and opened twice at its ends, and opened and sealed
once more in between: three times the work of a straight connection, so that this ratio follows from the cores there are.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.bench.base import spread
from tests.bench.parties import Pair, pair, python

if TYPE_CHECKING:
    from collections.abc import Callable

CARRIERS = {
    "raw": "raw sockets (trio)",
    "tls": "TLS 1.3 (trio)",
    "stock": "stock py-libp2p",
    "ours": "ours (noise, yamux)",
}
MEGABYTES = 512
_BASELINE = "tls"
_CONNECT_SECONDS = 60.0
_MOVE_SECONDS = 320.0
_WARM_UP = 32 << 20


@dataclass(frozen=True)
class TransportResult:
    """MB/s of each repetition, by carrier; both ways is the sum of the two directions."""

    one_way: dict[str, list[float]]
    both_ways: dict[str, list[float]]

    def ratio(self, rates: dict[str, list[float]], carrier: str) -> float:
        """Median over repetitions of the carrier's rate over that of TLS in the same repetition."""
        return statistics.median(rate / base for rate, base in zip(rates[carrier], rates[_BASELINE], strict=True))

    def to_text(self) -> str:
        lines = [f"MB/s over one stream, medians of {len(self.one_way[_BASELINE])}, and over TLS in the same repetition:"]
        for way, rates in (("one way", self.one_way), ("both ways", self.both_ways)):
            for carrier, title in CARRIERS.items():
                figure, ratio = spread(rates[carrier], digits=0), self.ratio(rates, carrier)
                lines.append(f"  {way:<10} {title:<20} {figure:<22} {ratio:.2f}")
        return "\n".join(lines)

    def to_table(self) -> dict[str, Any]:
        return {"text": self.to_text(), "figures": asdict(self)}


@dataclass(frozen=True)
class RelayResult:
    """MB/s one way of each repetition."""

    cores: int
    direct: list[float]
    relayed: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(slow / fast for slow, fast in zip(self.relayed, self.direct, strict=True))

    def to_text(self) -> str:
        return (
            f"MB/s one way, three processes on {self.cores} cores, medians of {len(self.direct)}: "
            f"direct {spread(self.direct, digits=0)}, through a relay {spread(self.relayed, digits=0)}, ratio {self.ratio:.2f}"
        )

    def to_table(self) -> dict[str, Any]:
        return {"text": self.to_text(), "figures": asdict(self) | {"ratio": self.ratio}}


def transport(rounds: int, say: Callable[[str], None], megabytes: int = MEGABYTES) -> TransportResult:
    """Measure all carriers `rounds` times, `megabytes` in each direction that is used."""
    size = megabytes << 20
    result = TransportResult({carrier: [] for carrier in CARRIERS}, {carrier: [] for carrier in CARRIERS})
    with ExitStack() as stack:
        pairs = {carrier: _connected(carrier, size, stack) for carrier in CARRIERS}
        for number in range(1, rounds + 1):
            for carrier, ends in pairs.items():
                result.one_way[carrier].append(rate(ends, [0, size]))
                result.both_ways[carrier].append(rate(ends, [size, size]))
            ours, base = result.one_way["ours"][-1], result.one_way[_BASELINE][-1]
            say(f"{number}: ours {ours:,.0f}, TLS {base:,.0f} MB/s one way, ratio {ours / base:.2f}")
    return result


def relay(rounds: int, say: Callable[[str], None], megabytes: int = MEGABYTES) -> RelayResult:
    """Measure straight and relayed `rounds` times, `megabytes` each."""
    size = megabytes << 20
    result = RelayResult(len(os.sched_getaffinity(0)), [], [])
    with ExitStack() as stack:
        direct, relayed = (_connected(carrier, size, stack) for carrier in ("ours", "relayed"))
        for number in range(1, rounds + 1):
            result.direct.append(rate(direct, [0, size]))
            result.relayed.append(rate(relayed, [0, size]))
            say(f"{number}: direct {result.direct[-1]:,.0f}, through a relay {result.relayed[-1]:,.0f} MB/s")
    return result


def _connected(carrier: str, size: int, stack: ExitStack) -> Pair:
    """Both ends, warmed up."""
    ends = stack.enter_context(pair([end_command(carrier, rank) for rank in (0, 1)]))
    connect(ends)
    rate(ends, [min(_WARM_UP, size)] * 2)
    return ends


def end_command(carrier: str, rank: int, host: str = "127.0.0.1") -> list[str]:
    return python("tests.bench.transport_end", carrier, str(rank), host)


def connect(ends: Pair) -> None:
    addresses = [answer["address"] for answer in ends.ask("listen", _CONNECT_SECONDS)]
    ends.ask("connect", _CONNECT_SECONDS, addresses=addresses)


def rate(ends: Pair, sizes: list[int]) -> float:
    """MB/s while each end sends its share of `sizes` (bytes), summed over both directions."""
    answers = ends.ask("move", _MOVE_SECONDS, sizes=sizes)
    began = min(float(answer["began"]) for answer, size in zip(answers, sizes, strict=True) if size)
    ended = max(float(answer["ended"]) for answer, size in zip(answers, reversed(sizes), strict=True) if size)
    return sum(sizes) / 1e6 / (ended - began)
