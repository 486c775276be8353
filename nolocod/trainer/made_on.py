"""Where messages are made and read: on the processor, or on a GPU, where more blocks go at one go.

The rule: phi and delta stay in main memory, and the arithmetic is one (outer/codec): what partners decode is the same to the
last bit, wherever each of them computes. On a GPU it has a stream of its own, so nothing there may be made outside of `open`:
memory that training gave back may still be in use on its own stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.base import CPU
from nolocod.trainer.bus import Staging, on, stream_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


@dataclass(frozen=True)
class MadeOn:
    """A device, and how many blocks go at one go there. `compiled`: by loops of our own."""

    device: torch.device
    at_once: int
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.device} (compiled)" if self.compiled else str(self.device)

    @cached_property
    def is_far(self) -> bool:
        """Whether it has memory of its own."""
        return self.device != CPU

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        return stream_of(self.device)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self.device)

    def open(self) -> AbstractContextManager[object]:
        """To work there: what follows waits for nothing that training has asked for."""
        return on(self._stream)

    def take(self, flat: Tensor, shape: tuple[int, int]) -> Tensor:
        """What lies in main memory, in rows: the tensor itself on the processor, else a copy."""
        if not self.is_far:
            return flat.view(shape)
        there = torch.empty(shape, dtype=flat.dtype, device=self.device)
        self._staging.send(flat, there.view(-1))
        return there

    def put(self, rows: Tensor, flat: Tensor) -> None:
        """Bring back what was taken."""
        if self.is_far:
            flat.view(rows.shape).copy_(rows)


PROCESSOR = MadeOn(CPU, 4)
"""Fewer, and a call takes a quarter of the time that its work does; more, and they fill a core's caches."""
COMPILED = MadeOn(CPU, 4, compiled=True)
"""Where the codec has such loops (outer/codec/fused.py)."""
AT_ONCE = 32
"""On a GPU, where a call takes as long as the work on one block: 8 MiB of float32, and 70 MiB of scratch."""
