"""What a node looks at on its own machine, on the virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from nolocod.events import Event, Surveyed
from nolocod.survey import survey

if TYPE_CHECKING:
    from pathlib import Path


async def test_it_looks_at_once_and_every_15_seconds(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    offsets = iter([0.5, -2.0, 3.0])
    told: list[Event] = []
    with trio.move_on_after(31):
        await survey(tmp_path, lambda: next(offsets), told.append)
    assert [one.clock_offset for one in told if isinstance(one, Surveyed)] == [0.5, -2.0, 3.0]
    assert all(isinstance(one, Surveyed) and (one.disk_free or 0) > 0 for one in told)


async def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    told: list[Event] = []
    with trio.move_on_after(1):
        await survey(tmp_path / "gone", lambda: 0.0, told.append)
    assert told == [Surveyed(0.0, None)]
