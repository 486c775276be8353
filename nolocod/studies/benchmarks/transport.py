"""`nolocod bench transport`: bulk over one stream between two processes, beside what else there is.

Raw sockets and TLS 1.3 by trio, stock py-libp2p (noise and yamux), and ours, in turn, repetition by repetition;
one way, and both ways at once. Writes of 1 MiB.
"""

from __future__ import annotations

import json
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nolocod.studies.benchmarks.base import spread
from nolocod.studies.benchmarks.parties import Pair, pair, python

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.studies.benchmarks.base import Options

CARRIERS = ("raw", "tls", "stock", "ours")
_TITLES = {
    "raw": "raw sockets (trio)",
    "tls": "TLS 1.3 (trio)",
    "stock": "stock py-libp2p",
    "ours": "ours (noise, yamux)",
}
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
        for title, rates in (("one way", self.one_way), ("both ways", self.both_ways)):
            for carrier in CARRIERS:
                figure, ratio = spread(rates[carrier], digits=0), self.ratio(rates, carrier)
                lines.append(f"  {title:<10} {_TITLES[carrier]:<20} {figure:<22} {ratio:.2f}")
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def transport(options: Options, say: Callable[[str], None]) -> TransportResult:
    """Measure all carriers `options.pairs` times, `options.megabytes` in each direction that is used."""
    size = options.megabytes << 20
    result = TransportResult({carrier: [] for carrier in CARRIERS}, {carrier: [] for carrier in CARRIERS})
    with ExitStack() as stack:
        pairs = {carrier: stack.enter_context(pair(commands(carrier))) for carrier in CARRIERS}
        for ends in pairs.values():
            connect(ends)
            rate(ends, [min(_WARM_UP, size)] * 2)
        for number in range(1, options.pairs + 1):
            for carrier, ends in pairs.items():
                result.one_way[carrier].append(rate(ends, [0, size]))
                result.both_ways[carrier].append(rate(ends, [size, size]))
            ours, base = result.one_way["ours"][-1], result.one_way[_BASELINE][-1]
            say(f"{number}: ours {ours:,.0f}, TLS {base:,.0f} MB/s one way, ratio {ours / base:.2f}")
    return result


def commands(carrier: str, host: str = "127.0.0.1") -> list[list[str]]:
    """The command lines of both ends."""
    return [python("nolocod.studies.benchmarks.transport_end", carrier, str(rank), host) for rank in (0, 1)]


def connect(ends: Pair) -> None:
    addresses = [answer["address"] for answer in ends.ask("listen", _CONNECT_SECONDS)]
    ends.ask("connect", _CONNECT_SECONDS, addresses=addresses)


def rate(ends: Pair, sizes: list[int]) -> float:
    """MB/s while each end sends its share of `sizes` (bytes), summed over both directions."""
    answers = ends.ask("move", _MOVE_SECONDS, sizes=sizes)
    began = min(float(answer["began"]) for answer, size in zip(answers, sizes, strict=True) if size)
    ended = max(float(answer["ended"]) for answer, size in zip(answers, reversed(sizes), strict=True) if size)
    return sum(sizes) / 1e6 / (ended - began)
