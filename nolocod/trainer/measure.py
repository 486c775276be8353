"""What this machine does with a run: its model is trained for a moment (`nolocod create --plan --measure`).

The rule: a node's own trainer process, asked as the daemon asks it, takes inner steps, an outer step with itself for its
partner, and writes a checkpoint, in a folder that goes. Raises what the trainer raises where this machine cannot.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import trio

from nolocod.disk import disk_errors
from nolocod.identity import Identity
from nolocod.observe.events import DevicesChosen, InnerSteps, MemoryTaken
from nolocod.proto.types import CHUNK_SIZE
from nolocod.run.manifest import seal
from nolocod.trainer.process import Setup, open_trainer

if TYPE_CHECKING:
    from nolocod.observe.events import Checkpointed, Event
    from nolocod.run.manifest import Manifest
    from nolocod.trainer.process import TrainerProcess

_LEAST, _SECONDS = 4, 10.0
"""Inner steps that are timed, and for how long at least. The first one of a trainer is none of them."""
_SAVES = 3
"""Checkpoints at most, of which the mean counts: one after another as long as these seconds have not gone by."""
_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Measured:
    """Seconds, bytes, and bytes per second. Memory is that of all processes of the trainer, at most."""

    step: float
    memory: int
    saving_memory: int
    """While a checkpoint was written."""
    saving: float
    checkpoint: int
    stopped: float
    """For which training stood still for that."""
    device_memory: int | None
    """Of the leader's GPU, at most; None on a processor, where it is of that memory."""

    @property
    def disk(self) -> float:
        return self.checkpoint / self.saving


class _Watch:
    """Follows a trainer's memory, and how long its inner steps take."""

    def __init__(self) -> None:
        self.peak = 0
        self.steps: list[InnerSteps] = []
        self.device_memory: int | None = None
        self._is_on_cpu = True

    def emit(self, event: Event) -> None:
        match event:
            case InnerSteps():
                self.steps.append(event)
            case DevicesChosen():
                self._is_on_cpu = event.devices[0].startswith("cpu")
            case MemoryTaken() if not self._is_on_cpu:
                self.device_memory = event.peak

    async def look(self) -> None:
        children = psutil.Process().children(recursive=True)
        while True:
            self.peak = max(self.peak, sum(child.memory_info().rss for child in children if child.is_running()))
            await trio.sleep(_LOOK_SECONDS)

    async def step(self, trainer: TrainerProcess) -> float:
        """Seconds of an inner step."""
        await trainer.train()
        began = trio.current_time()
        while trio.current_time() < began + _SECONDS or sum(told.steps for told in self.steps[1:]) < _LEAST:
            await trainer.wait_steps(trainer.steps_since_outer + 1)
        timed = self.steps[1:]
        return sum(told.seconds for told in timed) / sum(told.steps for told in timed)


async def measure(manifest: Manifest, devices: str, data: Path | None, base: Path | None, disk: Path) -> Measured:
    """Train the run's model on `devices` of this machine for a moment; `disk`: where a node's folder is, or is to be."""
    own, watch = Identity.generate(), _Watch()
    with _folder(disk) as name:
        folder = Path(name)
        setup = Setup(
            manifest=seal(manifest, own).to_bytes(), peer_id=own.peer_id, data=data, devices=devices, threads=0,
            checkpoints=folder / "checkpoints", cache=folder / "cache", base=base,
        )  # fmt: skip
        async with open_trainer(watch.emit) as trainer, trio.open_nursery() as nursery:
            await trainer.load(setup)
            nursery.start_soon(trainer.wait_dead)
            nursery.start_soon(watch.look)
            step = await watch.step(trainer)
            await _outer_step(trainer)
            memory, watch.peak = watch.peak, 0
            saved = await _checkpoints(trainer)
            nursery.cancel_scope.cancel()
    seconds, stopped = (statistics.fmean(times) for times in zip(*((one.seconds, one.stopped) for one in saved), strict=True))
    return Measured(step, memory, watch.peak, seconds, saved[-1].size, stopped, watch.device_memory)


async def _checkpoints(trainer: TrainerProcess) -> list[Checkpointed]:
    saved, began = [await trainer.checkpoint()], trio.current_time()
    while len(saved) < _SAVES and trio.current_time() < began + _SECONDS:
        saved.append(await trainer.checkpoint())
    return saved


def _folder(disk: Path) -> tempfile.TemporaryDirectory[str]:
    there = next(folder for folder in (disk.absolute(), *disk.absolute().parents) if folder.exists())
    with disk_errors(there):
        return tempfile.TemporaryDirectory(dir=there, prefix="nolocod-measured-")


async def _outer_step(trainer: TrainerProcess) -> None:
    """One with itself: the message that it wrote is what comes from the partner."""
    size = (await trainer.capture(trainer.subject(1))).size
    for start in range(0, size, CHUNK_SIZE):
        length = min(CHUNK_SIZE, size - start)
        trainer.inbox.place(start, length)[:] = trainer.outbox.view(start, length)
    await trainer.inspect(probation=False)
    await trainer.apply(0, b"")
