"""`nolocod bench relay`: bulk through a relay of ours, beside the same bulk straight from end to end.

Three processes. What passes a relay is sealed twice and opened twice at its ends, and opened and sealed once more in
between: three times the work of a straight connection, so that the ratio follows from the cores there are.
"""

from __future__ import annotations

import json
import os
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nolocod.studies.benchmarks.base import spread
from nolocod.studies.benchmarks.parties import pair
from nolocod.studies.benchmarks.transport import commands, connect, rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.studies.benchmarks.base import Options

_WARM_UP = 32 << 20


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

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"ratio": self.ratio})


def relay(options: Options, say: Callable[[str], None]) -> RelayResult:
    """Measure both `options.pairs` times, `options.megabytes` each."""
    size = options.megabytes << 20
    result = RelayResult(len(os.sched_getaffinity(0)), [], [])
    with ExitStack() as stack:
        direct, relayed = (stack.enter_context(pair(commands(carrier))) for carrier in ("ours", "relayed"))
        for ends in (direct, relayed):
            connect(ends)
            rate(ends, [_WARM_UP, _WARM_UP])
        for number in range(1, options.pairs + 1):
            result.direct.append(rate(direct, [0, size]))
            result.relayed.append(rate(relayed, [0, size]))
            say(f"{number}: direct {result.direct[-1]:,.0f}, through a relay {result.relayed[-1]:,.0f} MB/s")
    return result
