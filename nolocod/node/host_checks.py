"""What a node looks at on its own machine: the disk, its clock beside others', and how late its event loop is.

The rule: it only looks and tells. That a disk is full is an error where somebody needs it; a clock that is off ends nobody.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import trio

from nolocod.errors import ClockError
from nolocod.observe.events import HostChecked, Troubled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.observe.events import Emit

_EVERY = 15.0
"""Seconds: as often as Prometheus mostly scrapes."""
_TICK = 0.05
"""Seconds between two looks at how late the event loop is."""
_CLOCK_LIMIT = 600.0
"""Seconds by which this clock may differ from the verified members' median until that is told."""


async def check_host(folder: Path, clock_offset: Callable[[], float], emit: Emit) -> None:
    """Emit HostChecked at once and every 15 s, until cancelled. `clock_offset` is in seconds, others' minus ours; that it is
    large is told once."""
    told = False
    while True:
        # in a thread: a network file system that hangs must not hold up the node, nor its end
        free = await trio.to_thread.run_sync(_free, folder, abandon_on_cancel=True)  # type: ignore[call-arg]  # stubs of an older trio
        offset = clock_offset()
        emit(HostChecked(offset, free))
        if abs(offset) > _CLOCK_LIMIT and not told:
            cause = f"this clock differs from the median of the verified members' by {offset:.0f} s."
            emit(Troubled(ClockError.entry.code, f"{cause} {ClockError.entry.remedy}"))
        told = abs(offset) > _CLOCK_LIMIT
        await trio.sleep(_EVERY)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


async def watch_loop(tell: Callable[[float], None]) -> None:
    """Tell by how many seconds the event loop woke this task too late, until cancelled."""
    while True:
        due = trio.current_time() + _TICK
        await trio.sleep_until(due)
        tell(max(0.0, trio.current_time() - due))
