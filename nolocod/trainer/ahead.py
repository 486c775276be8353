"""What an outer step reads of main memory, on the card before it is due; and the way back, behind training.

The rule: a stream of its own carries it, so that nothing need cross the bus between two inner steps (queued.py). Memory is
taken only where training left some; what there is none for crosses in training's own queue. What phi and delta were is not used
once they changed.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from nolocod.outer.codec.blocks import pieces
from nolocod.trainer.devices import sent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

_SPARE = 1 << 30
"""Bytes of a card that are left to training, whose needs change with the text."""


class Brought(NamedTuple):
    """Phi and delta of a span, on the card."""

    edition: int
    span: slice
    phi: Tensor
    delta: Tensor


class Ahead:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._granted = 0
        self._edition = 0  # of phi and delta; odd while they change
        self._brought: Brought | None = None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Phi or delta change meanwhile: what was brought of them is void."""
        self._edition += 1
        try:
            yield
        finally:
            self._edition += 1

    def bring(self, span: slice, phi: Tensor, delta: Tensor) -> None:
        """Have these, of main memory, there for whoever takes them. Beside training: it waits for the card."""
        self._brought, edition = None, self._edition
        if found := self.copies(phi, delta):
            self._brought = Brought(edition, span, *found)

    def take(self, span: slice) -> Brought | None:
        """What was brought of `span`, if it is still so. It is the caller's."""
        found, self._brought = self._brought, None
        return found if found is not None and (found.edition, found.span) == (self._edition, span) else None

    def copies(self, *near: Tensor) -> list[Tensor]:
        """Of these, which lie in main memory; none where the card has no room. Beside training: it waits for the card."""
        need = sum(one.nbytes for one in near)
        if not self._has_room(need):
            return []
        with suppress(RuntimeError), self._opened():  # memory ran out, or what will be told where nothing is brought
            found = [torch.empty_like(one, device=self._device) for one in near]
            for one, far in zip(near, found, strict=True):
                for piece in pieces(len(one)):
                    far[piece].copy_(sent(one[piece], self._device))
            if self._stream is not None:
                self._stream.synchronize()
                for far in found:  # training's memory may not be this before training is done with it
                    far.record_stream(torch.cuda.default_stream(self._device))
            self._granted = max(self._granted, need)
            return found
        return []

    def _has_room(self, need: int) -> bool:
        """Asked once for each size: afterwards it is torch's, which gives it back to training where nothing else is left."""
        if self._stream is None:
            return self._device.type == "cpu"  # in tests; elsewhere nothing is gained without streams
        return need <= self._granted or torch.cuda.mem_get_info(self._device)[0] >= need + _SPARE

    def _opened(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is asked for here comes after what training has asked for, and training does not wait for it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._opened():
            yield

    def join(self) -> None:
        """What training asks for from now on comes after all that was asked for here. The processor waits for nothing."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
