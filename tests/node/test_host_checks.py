"""What a node looks at on its own machine, on the virtual clock."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.node.host_checks import check_host, watch_loop
from nolocod.observe.events import Event, HostChecked, Troubled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def _threads_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual clock does not wait for threads."""

    async def run_sync(function: Callable[..., object], *args: object, abandon_on_cancel: bool) -> object:
        await trio.lowlevel.checkpoint()
        assert abandon_on_cancel
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


async def test_a_file_system_that_hangs_holds_up_neither_the_node_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ready = threading.Event(), threading.Event()

    def hangs(_folder: Path) -> None:
        asked.set()
        ready.wait(60)

    monkeypatch.setattr("nolocod.node.host_checks._free", hangs)
    try:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(check_host, tmp_path, lambda: 0.0, lambda _: None)
                while not asked.is_set():  # noqa: ASYNC110  # a thread sets it
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        assert not ready.is_set()
    finally:
        ready.set()


@pytest.mark.usefixtures("_threads_inline")
async def test_it_looks_at_once_and_every_15_seconds(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    offsets = iter([0.5, -2.0, 3.0])
    told: list[Event] = []
    with trio.move_on_after(31):
        await check_host(tmp_path, lambda: next(offsets), told.append)
    assert [one.clock_offset for one in told if isinstance(one, HostChecked)] == [0.5, -2.0, 3.0]
    assert all(isinstance(one, HostChecked) and (one.disk_free or 0) > 0 for one in told)


@pytest.mark.usefixtures("_threads_inline")
async def test_a_clock_that_is_off_is_told_once_each_time(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    offsets = iter([0.0, -601.0, -601.0, 600.0, 3600.0])
    told: list[Event] = []
    with trio.move_on_after(61):
        await check_host(tmp_path, lambda: next(offsets), told.append)
    causes = [event.message for event in told if isinstance(event, Troubled)]
    assert [cause.partition(" s.")[0].rpartition(" ")[2] for cause in causes] == ["-601", "3600"]


@pytest.mark.usefixtures("_threads_inline")
async def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    told: list[Event] = []
    with trio.move_on_after(1):
        await check_host(tmp_path / "gone", lambda: 0.0, told.append)
    assert told == [HostChecked(0.0, None)]


async def test_a_loop_that_is_held_up_is_told(autojump_clock: trio.testing.MockClock) -> None:
    late: list[float] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_loop, late.append)
        await trio.sleep(0.075)
        autojump_clock.jump(0.3)  # something that took so long
        await trio.sleep(0.06)
        nursery.cancel_scope.cancel()
    assert late == pytest.approx([0.0, 0.275, 0.0])
