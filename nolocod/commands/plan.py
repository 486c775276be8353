"""What `nolocod create --plan` shows: a run's needs, beside what this machine does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from nolocod.observe.words import amount, duration

if TYPE_CHECKING:
    from nolocod.run.manifest import Manifest
    from nolocod.trainer.estimate import Estimate


def plan_table(manifest: Manifest, needs: Estimate, speed: float, device: str, rate: int) -> Table:
    """`speed`: floating-point operations per second of `device`; `rate`: bytes per second of the line, each way."""
    step, phase, exchange = needs.step_seconds(speed), needs.round_seconds(speed), needs.exchange_seconds(rate)
    table = Table.grid(padding=(0, 2))
    table.add_row("model", f"{needs.parameters:,} parameters")
    table.add_row(
        "inner step", f"{needs.tokens_per_step:,} tokens, about {_short(step)} on this {device} ({speed / 1e12:.2f} TFLOP/s)"
    )
    table.add_row("outer step", f"every {needs.inner_steps} inner steps, about {_short(phase)}")
    table.add_row(
        "an exchange", f"{amount(needs.message)} each way at most ({manifest.codec}), {_short(exchange)} at {amount(rate)}/s"
    )
    table.add_row("the line is busy", _share(exchange, phase))
    table.add_row(
        "inner steps",
        f"{needs.fewest_steps(speed, rate)} or more leave the line free half of the time; fewer of them learn better",
    )
    table.add_row(f"memory on {device}", f"{amount(needs.on_device)}, and about {amount(needs.activations)} for activations")
    table.add_row("main memory", f"{amount(needs.on_host)}, and about 0.5 GB for the two processes")
    table.add_row("checkpoint", f"{amount(20 * needs.parameters)} on disk, two are kept")
    if needs.rounds:
        tokens = needs.rounds * needs.inner_steps * needs.tokens_per_step
        per_node = (
            f"{tokens:,} tokens per node ({tokens / needs.parameters:.1f} per parameter), {duration(needs.rounds * phase)}"
        )
        table.add_row("the whole run", f"{needs.rounds} outer steps, {per_node}")
    return table


def _share(exchange: float, phase: float) -> str:
    """Training goes on during an exchange, unless it takes longer than a phase."""
    if exchange <= phase:
        return f"{exchange / phase:.0%} of the time; training goes on meanwhile"
    return (
        f"all the time: an exchange takes {exchange / phase:.1f} times as long as the inner steps before it. More inner steps, "
        "a smaller codec or fragments help"
    )


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else duration(seconds)
