"""modulo8 and modulo4 on the processor by compiled loops: one pass over memory where torch takes ten.

The rule: they are for blocks of which a byte, or half of one, travels both ways; for all others modulo.py is here. Numba
compiles the loops (kernels.py) as they are first used, which takes seconds, and keeps them in a file.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from nolocod.outer.codec import kernels
from nolocod.outer.codec.base import ALIGN, Seen, Shared, padded
from nolocod.outer.codec.blocks import BLOCK
from nolocod.outer.codec.modulo import MODULO, RECORD, SMALLEST, Modulo, Modulo4, Modulo8, digest, read_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray
    from torch import Tensor

    from nolocod.outer.codec.base import Records
    from nolocod.outer.codec.blocks import Rows
    from nolocod.run.manifest import Codec

    Array = NDArray[Any]


class Fused(Modulo):
    """What Modulo does; s differs from its by a rounding."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        outer = shared.settings
        self._beta, self._gamma, self._alpha = np.float32(outer.beta), np.float32(outer.gamma), np.float32(outer.alpha)
        self._memory, self._share = np.empty(BLOCK, np.float32), np.float32(0.5 / self._steps)
        self._left_out = np.empty(shared.at_once * BLOCK, np.int16)

    @abstractmethod
    def _made(self, records: Array, size: int) -> Array:
        """Where `size` values of each record are put, in a byte each."""

    @abstractmethod
    def _put(self, made: Array, records: Array) -> None:
        """Bring them into the records."""

    @abstractmethod
    def _came(self, records: Array, size: int) -> Array:
        """Records whose `size` values have a byte each."""

    def exact(self, phi: Tensor, change: Tensor) -> Tensor:
        """As the loops have it: rounded twice, which torch does not do where it may."""
        s = torch.mul(phi, self.settings.gamma, out=self._exact.of(phi.shape))
        return s.add_(change if self.settings.beta == 1 else torch.mul(change, self.settings.beta, out=self._total.of(s.shape)))

    def encode(self, rows: Rows, phi: Tensor, kept: Tensor, out: Tensor) -> int:
        count, size = rows.shape
        if size < SMALLEST:
            return super().encode(rows, phi, kept, out)
        width = self._width(size)
        records = out[: count * (ALIGN + padded(width))].numpy().reshape(count, -1)
        known, bounds = self.MARGIN * self._distance[rows.indices].double().numpy(), np.empty(count, np.float32)
        given = phi.numpy(), _bits(kept), known, self._beta, self._gamma, self.OWN * np.float64(self._beta), self.BITS
        made = self._made(records, size)
        if not kernels.encode(*given, made, high := self._high_parts(rows), bounds, self._memory[:size]):
            return super().encode(rows, phi, kept, out)
        self._put(made, records)
        self._bounds[rows.indices] = told = bounds.tolist()
        records[:, ALIGN + width :] = 0
        for record, bound, left_out in zip(records, told, _digests(high), strict=True):
            RECORD.pack_into(record.data, 0, MODULO, bound, left_out)
        return records.size

    def compare(self, rows: Rows, phi: Tensor, kept: Tensor, records: Records) -> list[Seen | None]:
        numbers, told = self._numbers(rows, records)
        if numbers is None:
            return super().compare(rows, phi, kept, records)
        found, size = np.empty((len(numbers), 3)), rows.shape[1]
        came = self._came(_arrays(records), size)
        given = phi.numpy(), _bits(kept), came, self._beta, self._gamma, self._share, numbers
        kernels.compare(*given, high := self._high_parts(rows), found, self._memory[:size])
        seen = zip(found.tolist(), _digests(high), told, strict=True)
        return [Seen(*row) if left_out == wanted else None for row, left_out, wanted in seen]

    def step(
        self, rows: Rows, phi: Tensor, delta: Tensor, kept: Tensor, records: Records, paired: Sequence[bool], weight: float
    ) -> None:
        numbers, _ = self._numbers(rows, records)
        if numbers is None or not all(paired):
            super().step(rows, phi, delta, kept, records, paired, weight)
            return
        came = self._came(_arrays(records), rows.shape[1])
        given = phi.numpy(), delta.numpy(), _bits(kept), came, self._beta, self._gamma, self._alpha, self._share
        kernels.take_step(*given, numbers, np.float32(weight))

    def _numbers(self, rows: Rows, records: Records) -> tuple[Array | None, list[bytes]]:
        """What both messages are multiplied by, a row for each block: None unless the bits of each value travel both ways. And
        the digests that came."""
        own, heads = self._bounds[rows.indices], [read_record(records.box[one]) for one in records.where]
        told = [one for _, _, one in heads]
        if not all(own) or any(mode != MODULO for mode, _, _ in heads):
            return None, told
        each, steps = zip(own, heads, strict=True), self._steps
        numbers = [(steps / one, one / steps, 0.5 / bound, 2 * bound) for one, (_, bound, _) in each]
        return np.array(numbers, np.float32), told

    def _high_parts(self, rows: Rows) -> Array:
        count, size = rows.shape
        return self._left_out[: count * size].reshape(count, size)


class FusedModulo8(Fused, Modulo8):
    """A byte per parameter."""

    def _made(self, records: Array, size: int) -> Array:
        return records

    def _put(self, made: Array, records: Array) -> None:
        pass

    def _came(self, records: Array, size: int) -> Array:
        return records


class FusedModulo4(Fused, Modulo4):
    """Half of one."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._room = np.empty(shared.at_once * (ALIGN + BLOCK), np.uint8)

    def _made(self, records: Array, size: int) -> Array:
        return self._room[: len(records) * (ALIGN + size)].reshape(len(records), -1)

    def _put(self, made: Array, records: Array) -> None:
        kernels.pack(made, records)

    def _came(self, records: Array, size: int) -> Array:
        kernels.unpack(records, came := self._made(records, size))
        return came


KINDS: dict[Codec, type[Fused]] = {"modulo8": FusedModulo8, "modulo4": FusedModulo4}


def keep(theta: Tensor, phi: Tensor, noise: Tensor, kept: Tensor) -> bool:
    """Put theta - phi of a block into `kept`, which is bfloat16, rounded with `noise`. False if it is not finite."""
    return bool(kernels.keep(theta.numpy(), phi.numpy(), noise.numpy(), _bits(kept)))


def add(theta: Tensor, kept: Tensor) -> None:
    """Add what is kept of a block to theta."""
    kernels.add(theta.numpy(), _bits(kept))


def _bits(rows: Tensor) -> Array:
    """Of bfloat16."""
    array: Array = rows.view(torch.int16).numpy().view(np.uint16)
    return array


def _arrays(records: Records) -> Array:
    """Records of one length, a row for each."""
    array: Array = records.box[records.where[0].start : records.where[-1].stop].numpy().reshape(len(records.where), -1)
    return array


def _digests(high: Array) -> list[bytes]:
    return [digest(row.data.cast("B")) for row in high]
