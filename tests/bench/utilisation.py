"""`python -m tests.bench.utilisation`: what is left of training while exchanges cross a slow and long way.

The rule: the path is as much slower than 100 Mbit/s as the model is smaller than 125 M parameters, so that an exchange
takes as long as that model's would; the partner's daemon and both network processes have no part of the measured
trainer's core. What an outer step costs the trainer here, times the ratio of the sizes, gives the modelled figure.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nolocod import presets
from nolocod.benchmarks.base import Options, spread
from nolocod.benchmarks.parties import enter, python, started
from nolocod.benchmarks.training import INNER_STEPS, parameters_of, run_of
from nolocod.errors import NolocodError
from tests.bench import wan

if TYPE_CHECKING:
    from collections.abc import Callable

_FULL_SIZE = 125_000_000
_FULL_RATE = 100.0
"""Mbit/s up."""
_STEP_SECONDS = (0.5, 1.0, 2.0)
"""Inner steps for which the full size is modelled."""
_WAIT_SECONDS = 400.0


@dataclass(frozen=True)
class UtilisationResult:
    """One ratio per repetition, and what each paired outer step cost the trainer, in seconds."""

    parameters: int
    codec: str
    rate: float
    """Mbit/s."""
    ratios: list[float]
    """Tokens/s with a partner over tokens/s alone, of the same daemon."""
    costs: list[float]
    busy: list[float]

    def modelled(self, step: float) -> float:
        """Utilisation at the full size with inner steps of `step` seconds, one outer step per phase."""
        cost = max(0.0, statistics.median(self.costs)) * _FULL_SIZE / self.parameters
        return 1 - cost / (cost + INNER_STEPS * step)

    def to_text(self) -> str:
        modelled = ", ".join(f"{self.modelled(step):.3f} at {step:g} s" for step in _STEP_SECONDS)
        return (
            f"tokens/s of a daemon whose partner is {self.rate:.2f} Mbit/s and 80 ms away, over its own alone\n"
            f"({self.parameters:,} parameters, {self.codec}): {spread(self.ratios)}; an exchange was under way "
            f"{statistics.median(self.busy):.0%} of the time\n"
            f"an outer step cost the trainer {spread(self.costs)} s; modelled at {_FULL_SIZE // 1_000_000} M parameters, "
            f"{_FULL_RATE:g} Mbit/s, by the time of an inner step: {modelled}"
        )

    def to_table(self) -> dict[str, Any]:
        return {"text": self.to_text(), "figures": asdict(self)}


def measure(options: Options, say: Callable[[str], None]) -> UtilisationResult:
    """Measure `options.pairs` times. Raises BenchError where the path cannot be had, or a daemon does not run."""
    program = wan.compiled()
    run = run_of(options)
    # the founder's rounds go on while the partner fetches its weights, which takes as long as an exchange
    run = msgspec.structs.replace(run, outer=msgspec.structs.replace(run.outer, staleness=1_000_000))
    size = parameters_of(run)
    rate = _FULL_RATE * size / _FULL_SIZE
    result = UtilisationResult(size, run.codec, rate, [], [], [])
    for number in range(1, options.pairs + 1):
        with tempfile.TemporaryDirectory(prefix="nolocod-bench-") as name, wan.laid(wan.Way(rate), program) as networks:
            folder = Path(name)
            (folder / "run.toml").write_text(presets.to_toml(run), encoding="utf-8")
            commands = [
                [*enter(network), *python("tests.bench.utilisation_end", str(rank), host, name, str(options.seconds))]
                for rank, (network, host) in enumerate(zip(networks, wan.HOSTS, strict=True))
            ]
            with started(commands) as (measured, partner):
                measured.tell("found")
                founded = measured.hear(_WAIT_SECONDS)
                partner.tell("join", address=founded["address"])
                partner.hear(_WAIT_SECONDS)
                measured.tell("watch")
                seen = measured.hear(_WAIT_SECONDS)
        result.ratios.append(seen["tokens"] / founded["alone"])
        result.costs.append((1 - result.ratios[-1]) * seen["seconds"] / seen["paired"])
        result.busy.append(seen["busy"])
        say(f"{number}: {result.ratios[-1]:.3f} over {seen['paired']} outer steps in {seen['seconds']:.0f} s")
    return result


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process stays behind
    rounds, model, codec = (*sys.argv[1:], *("3", "10m", "bfloat16")[len(sys.argv) - 1 :])
    try:
        sys.stdout.write(measure(Options(model=model, pairs=int(rounds), codec=codec), wan.say).to_text() + "\n")
    except NolocodError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
