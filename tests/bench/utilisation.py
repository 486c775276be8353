"""`python -m tests.bench utilisation`: what is left of training while exchanges cross a slow and long way.

The rule: the path is as much slower than 100 Mbit/s as the model is smaller than 125 M parameters, so that an exchange
takes as long as that model's would; the partner's daemon and both network processes have no part of the measured
trainer's core. For the rate without exchanges the partner trains beside it in a run of its own. What an outer step
takes of the time for inner steps here, times the ratio of the sizes, gives the modelled figure.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nolocod.run import presets
from tests.bench import wan
from tests.bench.base import Options, spread
from tests.bench.parties import enter, python, started
from tests.bench.training import INNER_STEPS, Cores, bound_to, parameters_of, run_of

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
    """Of each repetition: tokens/s as a ratio, the share of inner steps, and for how long training stood still."""

    parameters: int
    codec: str
    rate: float
    """Mbit/s."""
    ratios: list[float]
    """Tokens/s with exchanges over tokens/s without, of the same daemon, the partner training beside it in both."""
    computing: list[float]
    """The share of the time that went into inner steps, while it exchanged."""
    stalls: list[float]
    """Seconds per paired outer step in which no inner step was under way: at most so many are the exchange's."""
    busy: list[float]
    line: list[float]
    """Bytes that were sent, over what the line carries."""
    late: list[float]
    """Inner steps by which an exchange was merged late, in the median."""

    def modelled(self, step: float) -> float:
        """Utilisation at the full size, at least, with inner steps of `step` seconds and one outer step per phase."""
        stall = statistics.median(self.stalls) * _FULL_SIZE / self.parameters
        return 1 - stall / (stall + INNER_STEPS * step)

    def to_text(self) -> str:
        modelled = ", ".join(f"{self.modelled(step):.3f} at {step:g} s" for step in _STEP_SECONDS)
        return (
            f"two daemons, {self.parameters:,} parameters, {self.codec}, {self.rate:.2f} Mbit/s and 80 ms between them;\n"
            f"an exchange was under way {statistics.median(self.busy):.0%} of the time, "
            f"and merged {spread(self.late)} inner steps late; bytes sent over what the line carries: {spread(self.line)}\n"
            f"time in inner steps: {spread(self.computing)}; training stood still for {spread(self.stalls)} s per outer step\n"
            f"tokens/s over those without exchanges, on one core: {spread(self.ratios)}\n"
            f"modelled at {_FULL_SIZE // 1_000_000} M parameters, {_FULL_RATE:g} Mbit/s, with inner steps "
            f"that do not share a core with exchanges, by the time of one, at least: {modelled}"
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
    result = UtilisationResult(size, run.codec, rate, [], [], [], [], [], [])
    for number in range(1, options.pairs + 1):
        cores = Cores.of_machine()
        with ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="nolocod-bench-"))
            stack.enter_context(bound_to(cores.others))  # the path's forwarder too keeps off the measured core
            networks = stack.enter_context(wan.laid(wan.Way(rate), program))
            folder = Path(name)
            (folder / "run.toml").write_text(presets.to_toml(run), encoding="utf-8")
            commands = [
                [
                    *enter(network),
                    *python("tests.bench.utilisation_end", str(rank), host, name, str(options.seconds), str(min(cores.own))),
                ]
                for rank, (network, host) in enumerate(zip(networks, wan.HOSTS, strict=True))
            ]
            measured, partner = stack.enter_context(started(commands))
            for end in (measured, partner):
                end.tell("found")
            founded, _ = (end.hear(_WAIT_SECONDS) for end in (measured, partner))
            measured.tell("alone")
            alone = measured.hear(_WAIT_SECONDS)
            partner.tell("join", address=founded["address"])
            partner.hear(_WAIT_SECONDS)
            measured.tell("watch")
            seen = measured.hear(_WAIT_SECONDS)
        result.ratios.append(seen["tokens_per_second"] / alone["tokens_per_second"])
        result.computing.append(seen["computing"])
        result.stalls.append((1 - seen["computing"]) * seen["seconds"] / seen["paired"])
        result.busy.append(seen["busy"])
        result.line.append(seen["sent"] * 8 / 1e6 / seen["seconds"] / rate)
        result.late.append(seen["late"])
        outer_steps = f"{seen['paired']} outer steps in {seen['seconds']:.0f} s"
        shares = f"{seen['computing']:.3f} of the time in inner steps ({alone['computing']:.3f} without exchanges)"
        say(f"{number}: {shares}, {outer_steps}; tokens/s {result.ratios[-1]:.3f}")
    return result
