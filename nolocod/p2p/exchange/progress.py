"""Whether a partner does its part of an exchange in time.

The rule: bytes count, not words. That a partner says Working keeps its stream, and no more: its snapshot and its
inspection have a bound each, and while chunks are due so many bytes move in any `stall_seconds`, its own and those of
ours that it takes. An honest line is many times faster, however slow; what we hold up ourselves is not asked for, and while
no stream is up, the wait for the next one has its own bound. All chunks together have a time in which any honest line
carries them (`Limits.whole`); who needs more is left without blame.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NoReturn

import trio

from nolocod.errors import PeerTooSlowError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.proto.limits import Limits

_LOOKS = 6
"""In each window."""
_LOOK = 1.0
"""Seconds between two looks whether a stream is up."""


class StalledError(PeerTooSlowError):
    """The stream lives, but the partner's part does not come: a new stream would not help."""


class Pace:
    """Of one exchange of `size` bytes each way, over all its streams. `due`: whether chunks of either side are; `up`: whether
    a stream is."""

    def __init__(self, limits: Limits, size: int, due: Callable[[], bool], up: Callable[[], bool] = lambda: True) -> None:
        self._limits = limits
        self._size = size
        self._least = limits.least(size)
        self._due = due
        self._up = up
        self._moved = 0
        self.described = trio.Event()
        """The partner's snapshot is done."""

    def move(self, count: int) -> None:
        """So many bytes of chunks came, or went."""
        self._moved += count

    async def watch(self, prepared: trio.Event) -> NoReturn:
        """StalledError once the partner is too slow, PeerTooSlowError if its line is; `prepared` is set when our own
        snapshot is done."""
        limits, counts = self._limits, deque[int](maxlen=_LOOKS + 1)
        await self._wait_described()
        await prepared.wait()  # it may wait for our bytes
        until = trio.current_time() + limits.whole(self._size)
        while True:
            if self._due():
                counts.append(self._moved)
                if trio.current_time() > until:
                    raise PeerTooSlowError(f"{self._moved} bytes moved in {limits.whole(self._size):.0f} s.")
            else:
                counts.clear()
            if len(counts) > _LOOKS and counts[-1] - counts[0] < self._least:
                raise StalledError(f"{counts[-1] - counts[0]} bytes moved in {limits.stall_seconds:.0f} s.")
            await trio.sleep(limits.stall_seconds / _LOOKS)

    async def _wait_described(self) -> None:
        """For the snapshot while a stream is up; while none is, as long in all as one broken stream is waited for."""
        left = seconds = self._limits.snapshot_seconds + self._limits.accept_seconds
        broken = self._limits.resume(self._size)
        while not self.described.is_set():
            if left <= 0 or broken <= 0:
                raise StalledError(f"the partner's snapshot took more than {seconds:.0f} s.")
            up, began = self._up(), trio.current_time()
            with trio.move_on_after(look := min(_LOOK, left if up else broken)):
                await self.described.wait()
            spent = max(look, trio.current_time() - began)  # of a rest below the clock's grain it says nothing
            left, broken = (left - spent, broken) if up else (left, broken - spent)
