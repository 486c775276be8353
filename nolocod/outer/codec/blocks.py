"""Fragments of the flat tensor, the blocks they consist of, and small helpers on bytes.

The rule: fragments are of equal size, and a block lies within one tensor; both follow from the tensors' sizes
alone, so that partners agree on them without a word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

BLOCK = 1 << 16
"""Most elements of a block: 256 KiB of float32, so that a handful of scratch blocks stays in a core's cache."""

PIECE = 1 << 20
"""Most elements that go at one go where they are not worked on in a core's cache."""


@dataclass(frozen=True)
class Block:
    """Elements [start, stop) of the flat tensor; `index` counts within the fragment, `local` starts there."""

    index: int
    start: int
    stop: int
    local: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> slice:
        """Where it lies in the flat tensor."""
        return slice(self.start, self.stop)

    @property
    def within(self) -> slice:
        """Where it lies in a tensor of the fragment's size."""
        return slice(self.local, self.local + self.stop - self.start)


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of the flat tensor and their blocks."""

    start: int
    stop: int
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)

    def spans(self, *, far: bool) -> list[slice]:
        """In which parts to go through it: its blocks, or larger ones where each is a way to a GPU and back."""
        if not far:
            return [block.span for block in self.blocks]
        return [slice(self.start + piece.start, self.start + piece.stop) for piece in pieces(self.size)]


@dataclass(frozen=True)
class Rows:
    """Blocks of one size that follow each other, to be worked on at one go, in tensors with a row for each."""

    blocks: tuple[Block, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.blocks[0].size

    @property
    def span(self) -> slice:
        """Where they lie in the flat tensor."""
        return slice(self.blocks[0].start, self.blocks[-1].stop)

    @property
    def within(self) -> slice:
        """Where they lie in a tensor of the fragment's size."""
        return slice(self.blocks[0].local, self.blocks[-1].within.stop)

    @property
    def indices(self) -> slice:
        return slice(self.blocks[0].index, self.blocks[-1].index + 1)


def rows_of(fragment: Fragment, most: int) -> tuple[Rows, ...]:
    """The fragment's blocks in order, `most` at one go."""
    found: list[Rows] = []
    for _, equal in groupby(fragment.blocks, key=lambda block: block.size):
        blocks = tuple(equal)
        found += [Rows(blocks[first : first + most]) for first in range(0, len(blocks), most)]
    return tuple(found)


def stretches(flags: Sequence[bool]) -> Iterator[tuple[slice, bool]]:
    """Where equal ones follow each other, and what they are."""
    start = 0
    for flag, equal in groupby(flags):
        stop = start + len(list(equal))
        yield slice(start, stop), flag
        start = stop


def fragments_of(sizes: Sequence[int], count: int) -> tuple[Fragment, ...]:
    """Cut tensors of `sizes` elements, one after another, into `count` fragments of equal size."""
    ends = [0, *accumulate(sizes)]
    cuts = [ends[-1] * number // count for number in range(count + 1)]
    return tuple(_fragment([start, *(end for end in ends if start < end < stop), stop]) for start, stop in pairwise(cuts))


def together(fragments: Sequence[Fragment]) -> Fragment:
    """Some that follow each other, as one."""
    start = fragments[0].start
    blocks = [block for fragment in fragments for block in fragment.blocks]
    moved = tuple(replace(block, index=index, local=block.start - start) for index, block in enumerate(blocks))
    return Fragment(start, fragments[-1].stop, moved)


def _fragment(ends: Sequence[int]) -> Fragment:
    blocks: list[Block] = []
    for start, stop in pairwise(ends):
        for first in range(start, stop, BLOCK):
            blocks.append(Block(len(blocks), first, min(first + BLOCK, stop), first - ends[0]))
    return Fragment(ends[0], ends[-1], tuple(blocks))


def pieces(n: int) -> Iterator[slice]:
    """Cut n elements into slices of at most a million, so that temporaries stay small."""
    for start in range(0, n, PIECE):
        yield slice(start, min(start + PIECE, n))


def bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a 1-D tensor on the CPU, without a copy."""
    array: Any = flat.detach().numpy()  # numpy's own stubs do not call an array a buffer
    return memoryview(array).cast("B")


def to_bitmap(indices: Iterable[int]) -> bytes:
    """A bit map with the bits `indices` set (bit i is bit i % 8 of byte i // 8), as short as can be."""
    number = 0
    for index in indices:
        number |= 1 << index
    return number.to_bytes((number.bit_length() + 7) // 8, "little")


def is_set(bitmap: bytes, index: int) -> bool:
    """Whether bit `index` is set; bits beyond the end are not."""
    return index // 8 < len(bitmap) and bool(bitmap[index // 8] >> (index % 8) & 1)
