"""`python slowed.py STEP DISK CLOCK NOLOCOD-ARGUMENTS`: a daemon on a slow machine: its inner steps take at least STEP seconds,
its disk writes and reads DISK bytes a second, and its time of day is wrong by the seconds in the file CLOCK, if there is one.

The rule: nothing of the product knows. What a slow machine would compute is slept, so that a test's other processes have the
cores; a held-out batch takes a third of a step, as its forward pass does. The daemon's trainer is this file again.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_WORKER = "nolocod.trainer.worker"


class _SlowFile:
    """A file that is written so many bytes a second."""

    def __init__(self, file: IO[bytes], rate: float) -> None:
        self._file, self._rate = file, rate

    def write(self, data: bytes) -> int:
        began = time.perf_counter()
        written = self._file.write(data)
        time.sleep(max(0.0, began + len(data) / self._rate - time.perf_counter()))
        return written

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def wrong_clock(by: Path) -> None:
    """The time of day, in this process, whenever it is asked for; not the clocks that no one sets."""
    right = time.time

    def told() -> float:
        try:
            return right() + float(by.read_text())
        except (OSError, ValueError):  # it is right, or being changed
            return right()

    time.time = told


def slow_disk(rate: float) -> None:
    """Before anything else of the product is imported."""
    from nolocod import disk

    quick = disk.written_whole

    @contextmanager
    def written_whole(target: Path, **how: bool) -> Iterator[IO[bytes]]:
        with quick(target, **how) as file:
            yield _SlowFile(file, rate)  # type: ignore[misc] # what the product calls of it

    disk.written_whole = written_whole
    from nolocod.p2p.snapshots import partial
    from nolocod.run import base

    base.described = _after(lambda path: path.stat().st_size / rate, base.described)
    partial.store = _after(lambda _, description, index, content: len(content) / rate, partial.store)


def slow_trainer(step: float, rate: float) -> None:
    from nolocod.trainer import checkpoint
    from nolocod.trainer.replica import Replica

    batches = {"step": lambda _: step, "evaluate": lambda replica: replica.manifest.evaluation.batches * step / 3}
    for name, seconds in batches.items():
        setattr(Replica, name, _after(seconds, getattr(Replica, name)))
    for name in ("check", "read_tensors"):
        size = _size_of if name == "check" else (lambda path: path.stat().st_size)
        setattr(checkpoint, name, _after(lambda path, *_, size=size: size(path) / rate, getattr(checkpoint, name)))


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _after(seconds: Callable[..., float], work: Callable[..., T]) -> Callable[..., T]:
    """`work`, which takes so long at least."""

    def slow(*given: object, **more: object) -> T:
        began = time.perf_counter()
        done = work(*given, **more)
        time.sleep(max(0.0, began + seconds(*given) - time.perf_counter()))
        return done

    return slow


def _open_slow_trainers(orders: list[str]) -> None:
    quick = trio.lowlevel.open_process

    async def open_process(command: list[str], **how: Any) -> trio.Process:  # noqa: ANN401 - as trio has it
        if _WORKER in command:
            command = [sys.executable, __file__, *orders, *command[command.index(_WORKER) :]]
        process: trio.Process = await quick(command, **how)
        return process

    trio.lowlevel.open_process = open_process  # type: ignore[assignment] # as the product calls it


def main() -> None:
    step, rate, clock = float(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    wrong_clock(clock)
    slow_disk(rate)
    if sys.argv[4] == _WORKER:
        from nolocod.trainer import worker

        del sys.argv[1:5]
        worker.quiet()
        slow_trainer(step, rate)
        worker.main()
        return
    _open_slow_trainers(sys.argv[1:4])
    from nolocod import cli

    cli.main(sys.argv[4:])


if __name__ == "__main__":
    main()
