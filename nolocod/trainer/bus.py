"""How tensors cross from main memory to a card: by pinned memory, while we go on.

The rule: what is pinned stays until the card has read it. Pinned memory that is freed is not to be had again before all is done
that training had to do then (torch's host allocator), so what crosses often has pieces of its own.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.blocks import PIECE, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from nolocod.trainer.prefetch import Lay


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which is in main memory, on `device`: a GPU gets it while we go on, by a pinned copy unless it is pinned."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def lay_for(device: torch.device | None) -> Lay | None:
    """What lays windows where `device` reads them by itself; None if that is where they are. They must stay until it has: no
    queue of the card knows of a part of them."""
    return None if device is None or device.type != "cuda" else partial(_pinned, device)


def _pinned(device: torch.device, windows: NDArray[np.int64]) -> NDArray[np.int64]:
    with suppress(RuntimeError), at(device):  # there is no more: `sent` tells where it is needed
        windows = torch.from_numpy(windows).pin_memory().numpy()
    return windows


def at(device: torch.device) -> AbstractContextManager[object]:
    """What is asked of torch there is asked of that card: a thread begins with the first, and takes memory there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own there; None where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # torch leaves it untyped


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Ask a card in that stream; None: nothing. Torch alone would go back to the first card."""
    if stream is None:
        yield
        return
    with at(stream.device), torch.cuda.stream(stream):
        yield


def event() -> torch.cuda.Event:
    """One for which a processor that waits does nothing."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch leaves it untyped


class Staging:
    """Two pinned pieces, through which `device` gets what is not pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[tuple[Tensor, torch.cuda.Event]] = []

    def send(self, near: Tensor, far: Tensor) -> None:
        """Copy `near`, of main memory, to `far`, of the device, in the stream that is asked: values of four bytes at most."""
        if self._device.type != "cuda" or near.is_pinned():
            far.copy_(near, non_blocking=True)
            return
        if not self._pieces:
            self._pieces = [(torch.empty(PIECE, pin_memory=True), event()) for _ in range(2)]
        for turn, piece in enumerate(pieces(len(near))):
            room, done = self._pieces[turn % 2]
            done.synchronize()
            part = room.view(near.dtype)[: piece.stop - piece.start].copy_(near[piece])
            far[piece].copy_(part, non_blocking=True)
            done.record(torch.cuda.current_stream(self._device))
