"""`nolocod bench defences`: what judging partners adds to the time of an exchange.

Two daemons of one run on this machine, uploads limited such that a whole exchange takes about a third of a phase of inner
steps, as in `nolocod bench overlap`. With the defences of `[trust]` as they are by default, and with all of them on, beside
none; what they cost learning is told by `nolocod lab attacks`. What is measured begins when the two know each other: every
newcomer is tried on its first exchanges, and on one in several of all later ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from nolocod.run import presets
from nolocod.run.manifest import Trust
from nolocod.studies.benchmarks.base import spread
from nolocod.studies.benchmarks.overlap import in_turn
from nolocod.studies.benchmarks.training import run_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.studies.benchmarks.base import Options

SETTINGS = {"none": presets.UNDEFENDED, "as by default": Trust(), "everything": presets.ALL_DEFENCES}


@dataclass(frozen=True)
class DefencesResult:
    """By defences, and for each repetition: the mean seconds of an exchange, and the share of the time in inner steps."""

    exchange: dict[str, list[float]]
    computing: dict[str, list[float]]

    def to_text(self) -> str:
        lines = ["seconds of an exchange, over those without defences; share of the time in inner steps:"]
        for name, seconds in self.exchange.items():
            over = [one / other for one, other in zip(seconds, self.exchange["none"], strict=True)]
            lines.append(f"  {name:<14} {spread(seconds)}  {spread(over)}  {spread(self.computing[name])}")
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def defences(options: Options, say: Callable[[str], None]) -> DefencesResult:
    """Measure `options.pairs` repetitions. Raises BenchError if one of the processes does not run."""
    run = run_of(options)
    result = DefencesResult({name: [] for name in SETTINGS}, {name: [] for name in SETTINGS})
    runs = {name: replace(run, trust=trust) for name, trust in SETTINGS.items()}
    for number, name, seen in in_turn(options, runs, after=Trust().probation + 1):
        result.exchange[name].append(seen.exchange)
        result.computing[name].append(seen.computing)
        say(f"{number}: {name}: {seen.exchange:.3f} s an exchange, {seen.paired} in {seen.seconds:.0f} s")
    return result
