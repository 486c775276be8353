"""What a tree of processes takes of memory and processor, and what crosses a loopback device.

The rule: memory that processes share is counted once, and shared memory that nobody has mapped at the moment is
counted too: it lies in main memory all the same. Linux only, from /proc.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.bench.base import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLOCK = 512
"""Bytes per st_blocks."""


def processes(root: int) -> list[psutil.Process]:
    """`root` and all below it that still live."""
    try:
        first = psutil.Process(root)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory(root: int) -> int:
    """Bytes of main memory that the processes at and below `root` hold."""
    total = mapped = 0
    files: dict[int, int] = {}
    for process in processes(root):
        with suppress(OSError):  # it ended meanwhile
            rollup = _rollup(process.pid)
            total += rollup["Pss_Anon"] + rollup["Pss_File"]
            mapped += rollup["Pss_Shmem"]
            files |= _shared_files(process.pid)
    return total + max(mapped, sum(files.values()))


def boxes(root: int) -> int:
    """Those of them that are shared memory without a name: what is left there of the exchange before."""
    files: dict[int, int] = {}
    for process in processes(root):
        files |= _shared_files(process.pid)
    return sum(files.values())


def _rollup(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in (line.split() for line in lines)}


def _shared_files(pid: int) -> dict[int, int]:
    """Bytes held by each open file that lies in memory, by inode."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(link.readlink()).startswith(("/memfd:", "/dev/shm/")):
                stat = link.stat()
                found[stat.st_ino] = stat.st_blocks * _BLOCK
    return found


def cpu(root: int) -> dict[str, float]:
    """Seconds of processor that the network's process, `root`, and the trainer's below it have used."""
    used: dict[str, float] = {}
    for process in processes(root):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            role = "network" if process.pid == root else "trainer"
            used[role] = used.get(role, 0.0) + times.user + times.system
    return used


@dataclass
class Peak:
    """The most memory seen, in bytes."""

    highest: int = 0
    samples: int = field(default=0)


@contextmanager
def watched(root: int, every: float = 0.02) -> Iterator[Peak]:
    """Look at the memory of `root`'s tree again and again while the block runs.

    Reading it holds up the processes that are read: nothing that is timed belongs in the block.
    """
    peak, over = Peak(), threading.Event()

    def look() -> None:
        while True:  # at least once, however short the block
            peak.highest = max(peak.highest, memory(root))
            peak.samples += 1
            if over.wait(every):
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def carried(network: int | None) -> int:
    """Bytes that the loopback device of `network` (a process in it; None for our own) has carried, headers included."""
    for line in Path(f"/proc/{network or 'self'}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise BenchError("this machine has no loopback device.")
