"""What the commands show in a terminal, live where it is one and as plain lines where it is not."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from nolocod.identity import short
from nolocod.node import data_directory
from nolocod.node.config import FAREWELL, NodeConfig
from nolocod.observe.status import client
from nolocod.observe.status.terminal_table import Watched, loss_text, node_table, swarm_lines, swarm_table, table
from nolocod.observe.words import amount, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import RenderableType

    from nolocod.observe.status.report import StatusReport
    from nolocod.paths import DataDir
    from nolocod.run.manifest import Manifest
    from nolocod.studies.testnet import Summary
    from nolocod.trainer.estimate import Estimate, Machine, Needs
    from nolocod.trainer.measure import Measured

_LINES_EVERY = 5.0
"""Seconds between two blocks of lines where the output is no terminal."""


def show(what: RenderableType) -> None:
    """Print to standard output."""
    Console(highlight=False).print(what)


def show_status(paths: DataDir, *, watch: bool, as_json: bool) -> None:
    """Print a running node's report once, or every second until Ctrl-C."""
    console = Console(highlight=False)

    def read() -> StatusReport:
        return client.read(data_directory.find_running(paths))

    if watch and console.is_terminal and not as_json:
        with Live(Watched(read()), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(1)
                live.update(Watched(read()), refresh=True)
    while True:
        report = read()
        if as_json:
            raw = msgspec.json.encode(report)
            console.out((raw if watch else msgspec.json.format(raw, indent=2)).decode(), highlight=False)
        else:
            # a terminal breaks a long address itself, and copies it whole
            console.print(node_table(report), *([""] if watch else []), crop=False)
        if not watch:
            return
        time.sleep(1)


def show_limits(paths: DataDir, told: Mapping[str, str], *, as_json: bool) -> None:
    """Change a running node's limits, if anything is `told`, and print those that count."""
    running = data_directory.find_running(paths)
    found = client.change(running, paths.http_token, told) if told else client.read(running).allowance.limits
    console = Console(highlight=False)
    if as_json:
        console.out(msgspec.json.encode(found).decode(), highlight=False)
        return
    for key, text in found.items():
        console.print(f"{key} {text}", markup=False)
    if not found:
        console.print("no limits")


@contextmanager
def swarm_view(title: str) -> Iterator[Callable[[list[StatusReport | None]], None]]:
    """Give a function that shows the nodes' reports: a live table, or a block of lines now and then."""
    console = Console(highlight=False)
    console.print(title)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda reports: live.update(swarm_table(reports))
        return
    began = time.monotonic()
    last = began - _LINES_EVERY

    def print_lines(reports: list[StatusReport | None]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LINES_EVERY:
            last = now
            for line in swarm_lines(reports):
                console.out(f"{now - began:5.0f} s  {line}", highlight=False)

    yield print_lines


def summary_table(summary: Summary) -> RenderableType:
    """What a testnet came to."""
    rows = [
        (
            f"node-{index}",
            short(node.peer_id),
            *map(str, (node.inner_steps, node.outer_paired, node.outer_solo)),
            f"{node.tokens:,}",
            *map(loss_text, (node.val_loss_first, node.val_loss_last)),
            *map(amount, (node.bytes_sent, node.bytes_received)),
        )
        for index, node in enumerate(summary.nodes)
    ]
    nodes = table("<node <peer >steps >paired >solo >tokens >val. before >after >sent >received", rows)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("validation loss of the averaged model", loss_text(summary.averaged_val_loss))
    facts.add_row("of one node trained alone on as many tokens", loss_text(summary.alone_val_loss))
    spread = "-" if summary.weight_std is None else f"{summary.weight_std:.2e}"
    facts.add_row("standard deviation of weights across nodes", spread)
    facts.add_row("took", f"{summary.seconds:.0f} s" + (", interrupted" if summary.interrupted else ""))
    return Group("", nodes, "", facts)


def plan_table(manifest: Manifest, run: Estimate, machine: Machine, needs: Needs, measured: Measured | None) -> Table:
    """What a node of the run needs on this machine: `measured`, or else estimated."""
    rounds, batch = manifest.outer.rounds, manifest.inner.tokens_per_step
    about, here = ("", ", measured here") if measured else ("about ", "")
    trainer = (measured.memory, measured.saving_memory) if measured else (needs.trainer_memory, needs.saving_memory)
    device = (measured.device_memory if measured else None) or needs.device_memory
    tokens = rounds * run.inner_steps * batch
    per_node = (
        f"{tokens:,} tokens per node ({tokens / run.trained:.1f} per trained parameter), {duration(rounds * needs.phase)}"
    )
    down, up = (f"{rate * 8 / 1e6:g}" for rate in (machine.down, machine.up))
    within, wanted = NodeConfig.stop_within, math.ceil(needs.stop + FAREWELL)
    enough = "" if wanted <= within else f": the checkpoint needs --stop-within {wanted}"
    rows = {
        "model": f"{run.parameters:,} parameters",
        "adapter": f"{run.trained:,} parameters, which alone are trained and exchanged" if manifest.adapter else "",
        "inner step": f"{batch:,} tokens, {about}{_short(machine.step)}{here}",
        "outer step": f"every {run.inner_steps} inner steps of the median machine, {about}{_short(needs.phase)} on this one, "
        f"in {run.turns} turns",
        "an exchange": f"{amount(run.turn_message)} each way ({manifest.codec}), {_short(needs.exchange)} at {down}/{up} Mbit/s"
        f"; {amount(run.message)} at most",
        "the line is busy": _share(needs),
        "a merge comes": f"{needs.late:.1f} inner steps late",
        "inner steps": f"{needs.fewest_steps} or more leave the line free half of the time; fewer learn better",
        "a newcomer": f"fetches {amount(run.weights)}, {_short(needs.fetch)} from a member with such a line",
        "network process": f"{amount(needs.network_memory)} of memory",
        "trainer": f"{amount(trainer[0])} of memory, {amount(trainer[1])} while a checkpoint is written{here}",
        "each device": f"{amount(device)} of memory{here if measured and measured.device_memory else ''}" if device else "",
        "of that shared": f"{amount(run.boxes)} with the network process; "
        + (f"up to {amount(needs.locked)} is locked, for the GPU" if needs.locked else "no memory is locked"),
        "checkpoint": f"{amount(run.checkpoint)}, {about}{_short(needs.saving)} at {amount(machine.disk)}/s{here}; "
        f"every {duration(needs.saved_every)}: {amount(needs.written)} written a day",
        "disk": f"{amount(needs.disk)}: three checkpoints at the peak, two files of weights; and tokenised text",
        "a stop takes": f"up to {about}{_short(needs.stop)} and {FAREWELL:.0f} s for the farewell; "
        f"SIGTERM leaves {within:.0f} s{enough}",
        "the whole run": f"{rounds} outer steps, {per_node}" if rounds else "",
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            grid.add_row(name, value)
    return grid


def _share(needs: Needs) -> str:
    """Training goes on during an exchange; what does not fit behind inner steps is left for later."""
    if needs.busy <= 1:
        return f"{needs.busy:.0%} of the time; inner steps hide all of it"
    return (
        f"all the time: it would take {needs.busy:.1f} times as long as the inner steps, which hide {needs.hidden:.0%} of it. "
        "More inner steps or a smaller codec help"
    )


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else duration(seconds)
