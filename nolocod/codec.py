"""How a tensor becomes bytes for the wire, and back.

The rule: both partners of an exchange apply what the bytes say, the sender too: it reads its own message
back. With rounding in between, anything else would leave the two with different means of delta.

"float32" is exact. "bfloat16" rounds stochastically: random low 16 bits are added and cut off, so that the
expectation of the rounded value is the value itself. Little-endian; works in pieces, so that the temporaries
stay small whatever the model's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Generator, Tensor

Codec = Literal["float32", "bfloat16"]

PIECE = 1 << 20
"""Elements worked on at once: 4 MiB of float32, which a core's caches hold about."""

_WIDTH: dict[Codec, int] = {"float32": 4, "bfloat16": 2}
_LOW = 1 << 16


def encoded_size(n: int, codec: Codec) -> int:
    """Bytes that `n` elements take."""
    return n * _WIDTH[codec]


def pieces(n: int) -> Iterator[slice]:
    """Cut n elements into slices of at most PIECE."""
    for start in range(0, n, PIECE):
        yield slice(start, min(start + PIECE, n))


def encode(flat: Tensor, out: Tensor, codec: Codec, generator: Generator | None = None) -> None:
    """Write `flat` (float32, 1-D, CPU) into `out` (uint8, 1-D, `encoded_size` long).

    `generator` draws the rounding of bfloat16; torch's default one if not given. Values that are not
    finite stay so.
    """
    if codec == "float32":
        out.view(torch.float32).copy_(flat)
        return
    target = out.view(torch.int16)
    for piece in pieces(flat.numel()):
        value = flat[piece]
        noise = torch.randint(0, _LOW, value.shape, dtype=torch.int32, generator=generator)
        rounded = (value.view(torch.int32) + noise) >> 16
        # The carry could turn a NaN into a number (or another NaN's sign); such values are cut, not rounded.
        cut = torch.where(value.isnan(), torch.full_like(rounded, 0x7FC0), value.view(torch.int32) >> 16)
        target[piece].copy_(torch.where(value.isfinite(), rounded, cut))


def bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a 1-D tensor on the CPU, without a copy."""
    array: Any = flat.detach().numpy()  # numpy's own stubs do not call an array a buffer
    return memoryview(array).cast("B")


def decode(encoded: Tensor, codec: Codec, out: Tensor | None = None) -> Tensor:
    """Return the float32 tensor in `encoded` (uint8, 1-D), in `out` if given.

    Without `out`, "float32" is a view of `encoded` and nothing is copied.
    """
    stored = encoded.view(torch.float32 if codec == "float32" else torch.bfloat16)
    if out is not None:
        return out.copy_(stored)
    return stored.to(torch.float32)
