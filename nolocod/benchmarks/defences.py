"""`nolocod bench defences`: what judging partners adds to the time of an exchange.

Two daemons of one run on this machine, uploads limited such that a whole exchange takes about a third of a phase of inner
steps, as in `nolocod bench overlap`. With the defences of `[trust]` as they are by default, and with all of them on, beside
none; what they cost learning is told by `nolocod lab attacks`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nolocod import presets
from nolocod.benchmarks.base import spread
from nolocod.benchmarks.overlap import SHARE
from nolocod.benchmarks.training import BYTES, INNER_STEPS, Setting, alone, cores, paired_with, parameters_of, run_of
from nolocod.manifest import Trust

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.benchmarks.base import Options

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
    size = parameters_of(run) * BYTES[run.codec]
    with tempfile.TemporaryDirectory(prefix="nolocod-bench-") as name:
        folder = Path(name)
        setting = Setting(folder / "run.toml", folder, options.seconds, *cores())
        setting.run_file.write_text(presets.to_toml(run), encoding="utf-8")
        phase = INNER_STEPS * run.inner.tokens_per_step / alone(setting, 0)
        for number in range(1, options.pairs + 1):
            for index, (kind, trust) in enumerate(SETTINGS.items()):
                one = replace(setting, run_file=folder / f"run-{index}.toml")
                one.run_file.write_text(presets.to_toml(msgspec.structs.replace(run, trust=trust)), encoding="utf-8")
                seen = paired_with(one, number * len(SETTINGS) + index, size / (SHARE * phase))
                result.exchange[kind].append(seen.exchange)
                result.computing[kind].append(seen.computing)
                say(f"{number}: {kind}: {seen.exchange:.3f} s an exchange, {seen.paired} in {seen.seconds:.0f} s")
    return result
