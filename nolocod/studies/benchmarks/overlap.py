"""`nolocod bench overlap`: how much of its time a trainer trains, by the way in which the run overlaps exchanges.

Two daemons of one run on this machine, uploads limited such that a whole exchange takes about a third of a phase of inner
steps; the rest is as in `nolocod bench training`. A run that waits for its exchanges then trains three quarters of the time.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from nolocod.run import presets
from nolocod.run.manifest import CODEC_BYTES
from nolocod.studies.benchmarks.base import spread
from nolocod.studies.benchmarks.training import INNER_STEPS, Setting, alone, cores, paired_with, parameters_of, run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.run.manifest import Manifest
    from nolocod.studies.benchmarks.base import Options
    from nolocod.studies.benchmarks.training import Seen

_SHARE = 1 / 3
"""Of a phase, that an exchange of the whole model takes."""
WAYS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "overlapped, 4 fragments": {"fragments": 4},
    "blocking": {"blocking": True},
}


@dataclass(frozen=True)
class OverlapResult:
    """By way, and for each repetition: the share of the time in inner steps, and that with an exchange under way."""

    computing: dict[str, list[float]]
    busy: dict[str, list[float]]

    def to_text(self) -> str:
        lines = [
            "share of the time in inner steps (and with an exchange under way); a whole exchange takes a third of a phase:"
        ]
        lines += [f"  {way:<24} {spread(self.computing[way])} ({spread(self.busy[way])})" for way in self.computing]
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def overlap(options: Options, say: Callable[[str], None]) -> OverlapResult:
    """Measure `options.pairs` repetitions. Raises BenchError if one of the processes does not run."""
    run = run_of(options)
    runs = {way: replace(run, outer=replace(run.outer, **outer)) for way, outer in WAYS.items()}
    result = OverlapResult({way: [] for way in WAYS}, {way: [] for way in WAYS})
    for number, way, seen in in_turn(options, runs):
        result.computing[way].append(seen.computing)
        result.busy[way].append(seen.busy)
        say(f"{number}: {way}: {seen.computing:.3f}, {seen.paired} paired outer steps in {seen.seconds:.0f} s")
    return result


def in_turn(options: Options, runs: dict[str, Manifest], after: int = 1) -> Iterator[tuple[int, str, Seen]]:
    """Two daemons of each of `runs`, which have one model: the repetition, the run's name, and what was seen after their
    first `after` outer steps with each other."""
    first = next(iter(runs.values()))
    size = parameters_of(first) * CODEC_BYTES[first.codec]
    with tempfile.TemporaryDirectory(prefix="nolocod-bench-") as name:
        folder = Path(name)
        settings: dict[str, Setting] = {}
        for index, (way, run) in enumerate(runs.items()):
            settings[way] = Setting(folder / f"run-{index}.toml", folder, options.seconds, *cores())
            settings[way].run_file.write_text(presets.to_toml(run), encoding="utf-8")
        phase = INNER_STEPS * first.inner.tokens_per_step / alone(next(iter(settings.values())), 0)
        for number in range(1, options.pairs + 1):
            for index, (way, setting) in enumerate(settings.items()):
                yield number, way, paired_with(setting, number * len(runs) + index, size / (_SHARE * phase), after)
