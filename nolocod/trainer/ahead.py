"""What an outer step reads of main memory, on the card before it is due; and the way back, behind training.

The rule: a stream of its own carries it, so that nothing need cross the bus between two inner steps (queued.py). The memory is
taken once, where training left some, and one capture has it at a time. Where training has none left it is given back for good,
and all crosses in training's own queue. What phi and delta were is not used once they changed.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nolocod.trainer.bus import Staging, event, on, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_SPARE = 1 << 30
"""Bytes of a card that are left to training, whose needs change with the text."""


@dataclass
class Brought:
    """Of a span, on the card; None is what is not there, or was given back."""

    edition: int
    span: slice
    phi: Tensor | None
    """In its place lies the kept change once that is made, ..."""
    delta: Tensor | None
    late: Tensor | None = None
    """... and in the end what theta is still to get."""

    def forget(self) -> None:
        self.phi = self.delta = self.late = None


class Ahead:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = stream_of(device)
        self._staging = Staging(device)
        self._lock = threading.Lock()  # what follows is the training thread's, and that of whoever works beside it
        self._room: Tensor | None = None  # two rows, of the largest capture
        self._is_over = False
        self._used: torch.cuda.Event | None = None  # when what lies here was read the last time
        self._edition = 0  # of phi and delta; odd while they change
        self._brought: Brought | None = None
        self._lent: Callable[[], Brought | None] = lambda: None  # what a capture has, as long as it has it

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Phi or delta change meanwhile: what was brought of them is void."""
        self._edition += 1
        try:
            yield
        finally:
            self._edition += 1

    def bring(self, span: slice, phi: Tensor, delta: Tensor) -> None:
        """Have these, of main memory, there for whoever takes them, if there is room. Beside training: it waits."""
        with self._lock:
            self._brought, edition = None, self._edition
            if self._lent() is not None:
                return
            with suppress(RuntimeError), self._opened():
                if (room := self._find_room(len(phi))) is not None:
                    for near, far in zip((phi, delta), room, strict=True):
                        self._staging.send(near, far)
                    self._finish()
                    self._brought = Brought(edition, span, *room)

    def take(self, span: slice) -> Brought | None:
        """What was brought of `span`, if it is still so. It is the caller's as long as it holds it."""
        if not self._lock.acquire(blocking=False):
            return None  # between two inner steps nobody waits
        try:
            found, self._brought = self._brought, None
            if found is None or (found.edition, found.span) != (self._edition, span):
                return None
            self._lent = weakref.ref(found)
            return found
        finally:
            self._lock.release()

    def bring_late(self, brought: Brought, kept: Tensor) -> None:
        """Have what theta is still to get, which `kept` holds now, in place of the change. Beside training, as `bring`."""
        with self._lock, suppress(RuntimeError), self._opened():
            if brought.phi is not None:
                late = brought.phi.view(kept.dtype)[: len(kept)]
                self._staging.send(kept, late)
                self._finish()
                brought.late = late

    def give_back(self) -> bool:
        """Training has no memory left: it has this too from now on. False if there is none."""
        with self._lock:
            self._is_over, had = True, self._room is not None
            if had and self._stream is not None:
                torch.cuda.synchronize(self._device)  # what is on its way back is needed then
            for one in (self._brought, self._lent()):
                if one is not None:
                    one.forget()
            self._room = self._brought = None
        if had and self._stream is not None:
            torch.cuda.empty_cache()
        return had

    def _find_room(self, size: int) -> Tensor | None:
        """For phi and delta of so many values."""
        if self._room is None or self._room.shape[1] < size:
            if self._is_over or not self._is_free(2 * size * torch.float32.itemsize):
                return None
            self._room = None
            self._room = torch.empty((2, size), device=self._device)
        return self._room[:, :size]

    def _is_free(self, need: int) -> bool:
        if self._stream is None:
            return self._device.type == "cpu"  # in tests; elsewhere nothing is gained without streams
        return torch.cuda.mem_get_info(self._device)[0] >= need + _SPARE

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Our own stream, behind whatever read what lies here. Who opens it leaves what fails: it is told where nothing is
        brought."""
        with on(self._stream):
            if self._stream is not None and self._used is not None:
                self._stream.wait_event(self._used)
            yield

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is asked for here comes after what training has asked for, and training does not wait for it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with on(self._stream):
            yield

    def join(self) -> None:
        """What training asks for from now on comes after all that was asked for here. The processor waits for nothing."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Here ends what was asked for so far of what lies here, in the stream that is asked; None without streams."""
        if self._stream is not None:
            self._used = event()
            self._used.record(torch.cuda.current_stream(self._device))
        return self._used
