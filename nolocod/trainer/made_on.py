"""Where messages are made and read: on the processor, a block at a time, or on a GPU, many at one go.

The rule: phi and delta stay in main memory, and the arithmetic is one (outer/codec): what partners decode is the same to the
last bit, wherever each of them computes. On a GPU it has a stream of its own, so nothing there may be made outside of `open`:
memory that training gave back may still be in use on its own stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from nolocod.outer.codec.base import CPU
from nolocod.outer.codec.blocks import BLOCK
from nolocod.trainer.devices import sent

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.outer.codec.blocks import Rows


@dataclass(frozen=True)
class MadeOn:
    """A device, and how many blocks go at one go there."""

    device: torch.device
    at_once: int

    @property
    def is_far(self) -> bool:
        """Whether it has memory of its own."""
        return self.device != CPU

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # torch leaves it untyped

    def open(self) -> AbstractContextManager[object]:
        """To work there: what follows waits for nothing that training has asked for."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def scratch(self) -> Tensor:
        """Memory for a value of each."""
        return torch.empty(self.at_once * BLOCK, device=self.device)

    def take(self, flat: Tensor, rows: Rows) -> Tensor:
        """What lies in main memory: the tensor itself on the processor, else a copy."""
        return sent(flat[rows.span], self.device).view(rows.shape)

    def put(self, values: Tensor, flat: Tensor, rows: Rows) -> None:
        """Bring back what was taken."""
        if self.is_far:
            flat[rows.span].view(rows.shape).copy_(values)


PROCESSOR = MadeOn(CPU, 1)
AT_ONCE = 32
"""Blocks at one go on a GPU, where a call takes as long as the work on one of them: 8 MiB of float32, and 70 MiB of scratch."""
