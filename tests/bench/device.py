"""`python -m tests.bench.device RUN_FILE --device cuda`: the product's trainer beside a bare PyTorch loop, on one device.

The rule: the bare loop, the trainer alone, and the trainer while it exchanges all the time are timed in turn, again and
again; what counts is the middle of the ratios. The run's layers, batch, turns and codec; AdamW, which the bare loop has;
text by bytes, Python's own library unless --data names some. The partner does not train and lies in main memory, and no
line is between the two: what is added is exchanges, and the partner's part of them on the same processors. On a GPU it is
an error if exchanging leaves less than 0.98 of the bare loop's rate, or takes more than a hundredth of a phase. A processor
will do: to try it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from nolocod.errors import LocalError
from nolocod.identity import Identity
from nolocod.observe.events import DevicesChosen, InnerSteps
from nolocod.run import presets
from nolocod.run.data import Data
from nolocod.run.manifest import seal
from nolocod.run.run_file import read_run_file
from nolocod.trainer.pipe import Setup
from nolocod.trainer.process import open_trainer
from tests.bench.base import BenchError, spread
from tests.bench.parties import python
from tests.support.trainer_parts import trade

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.observe.events import Event
    from nolocod.run.manifest import Manifest, Sealed
    from nolocod.trainer.process import TrainerProcess

_WARM_UP = 3
"""Reports of the trainer that do not count: torch is still choosing its kernels."""


_KEPT, _COST = 0.98, 0.01
"""Of a bare loop's tokens per second, and of a phase's time: what must be on a GPU."""


@dataclass
class Pace:
    """What a trainer tells of its inner steps."""

    tokens: list[tuple[float, int]] = field(default_factory=list)
    """When it told, and of how many."""
    mfu: list[float] = field(default_factory=list)
    device: str = ""
    made_on: str = ""
    told: trio.Event = field(default_factory=trio.Event)
    """Replaced each time."""

    def hear(self, event: Event) -> None:
        match event:
            case InnerSteps():
                self.tokens.append((trio.current_time(), event.tokens))
                self.mfu += [] if event.mfu is None else [event.mfu]
                self.told, told = trio.Event(), self.told
                told.set()
            case DevicesChosen():
                self.device, self.made_on = ", ".join(event.devices), event.made_on

    async def until(self, count: int) -> None:
        """It has told so often."""
        while len(self.tokens) < count:
            await self.told.wait()

    async def over(self, seconds: float) -> float:
        """Tokens per second in so many seconds from now, from one report to another."""
        first = len(self.tokens) + 1
        await trio.sleep(seconds)
        await self.until(first + 2)
        (began, _), *others = self.tokens[first:]
        return sum(tokens for _, tokens in others) / (others[-1][0] - began)


@dataclass(frozen=True)
class Figures:
    """Tokens per second, and outer steps in the last of them."""

    bare: float
    alone: float
    exchanging: float
    outer_steps: int
    seconds: float
    mfu: float | None
    device: str
    made_on: str

    def to_text(self) -> str:
        mfu = "" if self.mfu is None else f"; MFU {self.mfu:.1%}"
        return (
            f"{self.device}, messages made on {self.made_on}: bare {self.bare:,.0f}, alone {self.alone:,.0f}, "
            f"exchanging {self.exchanging:,.0f} tokens/s "
            f"({self.outer_steps} outer steps in {self.seconds:.0f} s){mfu}"
        )


async def measure(manifest: Manifest, options: argparse.Namespace, bare: float, folder: Path) -> Figures:
    sealed, pace = seal(manifest, Identity.generate()), Pace()
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(open_trainer(pace.hear))
        partner = await stack.enter_async_context(open_trainer(lambda event: None))
        for trainer, device, name in ((ours, options.device, "ours"), (partner, "cpu", "partner")):
            await trainer.load(_setup(sealed, options, device, folder / name))
        await ours.train()
        await pace.until(_WARM_UP)
        alone, taken = await pace.over(options.seconds), 0
        async with trio.open_nursery() as nursery:

            async def exchange_all_the_time() -> None:
                nonlocal taken
                while True:
                    await take_outer_step(ours, partner, manifest)
                    taken += 1

            nursery.start_soon(exchange_all_the_time)
            began = trio.current_time()
            exchanging = await pace.over(options.seconds)
            took = trio.current_time() - began
            nursery.cancel_scope.cancel()
    mfu = statistics.median(pace.mfu) if pace.mfu else None
    if not taken:
        raise BenchError(f"no outer step ended within {took:.0f} s.")
    return Figures(bare, alone, exchanging, taken, took, mfu, pace.device, pace.made_on)


async def take_outer_step(ours: TrainerProcess, partner: TrainerProcess, manifest: Manifest) -> None:
    """A paired one, when its turn has come; nothing is between the two but memory."""
    turn = manifest.inner.steps / manifest.outer.turns
    seen, partners = await trade(ours, partner, ours.subject(1), round(turn))
    for trainer, other in ((ours, partners), (partner, seen)):
        await trainer.apply(ours.standing.round + 1, other.skipped)


def _setup(sealed: Sealed, options: argparse.Namespace, device: str, folder: Path) -> Setup:
    return Setup(
        manifest=sealed.to_bytes(), peer_id=folder.name, data=options.data, devices=device, threads=options.threads,
        checkpoints=folder / "checkpoints", cache=folder / "cache",
    )  # fmt: skip


def run_of(run_file: Path, data: Path | None) -> Manifest:
    manifest = read_run_file(run_file)
    text = Data(source="stdlib" if data is None else "text")
    return replace(manifest, data=text, inner=replace(manifest.inner, optimizer="adamw"))


def bare_rate(manifest: Manifest, options: argparse.Namespace, steps: int, folder: Path) -> float:
    path = folder / "bare.toml"
    path.write_text(presets.to_toml(manifest), encoding="utf-8")
    given = ("--device", options.device, "--threads", str(options.threads), "--steps", str(steps))
    text = () if options.data is None else ("--data", str(options.data))
    command = python("tests.bench.bare_loop", str(path), *given, *text)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the bare loop ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.device", description=__doc__)
    parser.add_argument("run_file", type=Path, help="as docs/runs/125m.toml")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, help="a text")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the trainer alone, and of it exchanging")
    parser.add_argument("--steps", type=int, default=40, help="of the bare loop")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args(arguments)
    ratios: list[tuple[float, float, float]] = []
    try:
        manifest = run_of(options.run_file, options.data)
        for _ in range(options.times):
            with tempfile.TemporaryDirectory() as name:
                bare = bare_rate(manifest, options, options.steps, Path(name))
                found = trio.run(measure, manifest, options, bare, Path(name))
            say(found.to_text())
            ratios.append((found.alone / bare, found.exchanging / bare, 1 - found.exchanging / found.alone))
    except LocalError as error:
        sys.exit(str(error))
    alone, exchanging, lost = zip(*ratios, strict=True)
    over = f"over bare: alone {spread(alone)}, exchanging {spread(exchanging)}"
    say(f"{over}; lost to exchanges, of a phase's time: {spread(lost)}")
    too_slow = statistics.median(exchanging) < _KEPT or statistics.median(lost) > _COST
    return int(options.device.startswith("cuda") and too_slow)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
