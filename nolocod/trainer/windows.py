"""Which tokens a node trains on, in which order, and which nobody trains on.

The rule: no coordinator. What is held out is known by its own hash (data.py), or in runs without `data.documents` by the hash
of its place, so that all nodes with the same text agree; the rest is one list of windows, which every node walks in a
pseudo-random order of its own, drawn from the run's seed and its peer id. A position is (epoch, index): it needs no memory
of what was seen, and resumes exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import blake3
import msgspec
import numpy as np

from nolocod.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_TOKENS = 65_536
_LEAST_BLOCKS = 128
"""A short text is cut finer, so that even a small share of it holds out a block."""
_AHEAD = 1024
"""Indices drawn at once: drawing them one by one would cost more than a small training step may."""


class Position(msgspec.Struct, frozen=True):
    """Where in the data a node is: how often it went through, and how far it is now."""

    epoch: int = 0
    index: int = 0
    carry: tuple[int, ...] = ()
    """Tokens read but not yet trained on (streams only)."""
    file: int = 0
    """How many files are done in this epoch, how many groups of the next, and with `index` documents of the next group
    (streams only)."""
    group: int = 0
    parts: tuple[Position, ...] = ()
    """Of each data set of a mixture, of which `index` windows were taken."""


class Source(Protocol):
    """A node's training text as windows of `sequence` + 1 tokens."""

    def take(self, count: int) -> NDArray[np.int64]:
        """The next `count` windows to train on (count x (sequence + 1))."""
        ...

    def held_out(self, count: int) -> NDArray[np.int64]:
        """At most `count` windows that nobody trains on, always the same ones."""
        ...

    @property
    def position(self) -> Position: ...

    def seek(self, position: Position) -> None: ...


def permuted(indices: NDArray[np.uint64], size: int, key: bytes) -> NDArray[np.int64]:
    """Map indices below `size` to a pseudo-random permutation of range(size), without a table.

    A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway, 2002).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    rounds = np.frombuffer(blake3.blake3(key).digest(32), dtype="<u8")
    multiplier, fold = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
    out = indices.astype(np.uint64)
    outside = np.ones(len(out), dtype=bool)
    while outside.any():
        left, right = out[outside] >> shift, out[outside] & mask
        for word in rounds:
            mixed = (right + word) * multiplier
            mixed = (mixed ^ (mixed >> fold)) * multiplier
            left, right = right, left ^ ((mixed >> np.uint64(33)) & mask)
        out[outside] = (left << shift) | right
        outside = out >= np.uint64(size)
    return out.astype(np.int64)


class Windows:
    """The windows of one tokenised text, split into those trained on and those held out."""

    def __init__(self, tokens: NDArray[Any], sequence: int, share: float) -> None:
        """`share` of the blocks is held out, one at least. DataError if the text is too short."""
        self._tokens = tokens
        self._length = sequence + 1
        self._per_block = max(1, min(_BLOCK_TOKENS // sequence, len(tokens) // (sequence * _LEAST_BLOCKS)))
        self._stride = self._per_block * sequence + 1
        blocks = len(tokens) // self._stride
        if blocks < 2:
            raise DataError(
                f"{len(tokens)} tokens are too few for windows of {sequence}; {2 * self._length} are needed at least."
            )
        digests = [blake3.blake3(index.to_bytes(8, "big")).digest() for index in range(blocks)]
        ranked = sorted(range(blocks), key=digests.__getitem__)
        held = min(blocks - 1, max(1, round(share * blocks)))
        self._held = np.sort(np.array(ranked[:held], dtype=np.int64))
        self._train = np.sort(np.array(ranked[held:], dtype=np.int64))
        self._offsets = np.arange(self._length)

    @property
    def training(self) -> int:
        """How many windows are trained on."""
        return len(self._train) * self._per_block

    def train(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The training windows with these indices (below `training`)."""
        return self._gather(self._train, indices)

    def held_out(self, count: int) -> NDArray[np.int64]:
        """At most `count` held-out windows, spread evenly over them."""
        total = len(self._held) * self._per_block
        return self._gather(self._held, np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)))

    def _gather(self, blocks: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = blocks[indices // self._per_block] * self._stride + indices % self._per_block * (self._length - 1)
        found: NDArray[np.int64] = self._tokens[starts[:, None] + self._offsets].astype(np.int64)
        return found


class Parts:
    """The windows of a text whose held-out part `held` lies apart. DataError if either is too short."""

    def __init__(self, train: NDArray[Any], held: NDArray[Any], sequence: int, *, share_ends: bool = True) -> None:
        """`share_ends`: a window's last token is the next one's first."""
        self._train, self._held = train, held
        self._stride = sequence if share_ends else sequence + 1
        self._offsets = np.arange(sequence + 1)
        self.training = self._count(train)
        if not (self.training and self._count(held)):
            raise DataError(f"{len(train)} tokens, and {len(held)} that are held out, are too few for windows of {sequence}.")

    def _count(self, tokens: NDArray[Any]) -> int:
        return max(0, (len(tokens) - len(self._offsets)) // self._stride + 1)

    def train(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The training windows with these indices (below `training`)."""
        return self._gather(self._train, indices)

    def held_out(self, count: int) -> NDArray[np.int64]:
        """At most `count` held-out windows, spread evenly over them."""
        total = self._count(self._held)
        return self._gather(self._held, np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)))

    def _gather(self, tokens: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = tokens[indices[:, None] * self._stride + self._offsets].astype(np.int64)
        return found


class Shard:
    """One node's way through `windows` (a Source)."""

    def __init__(self, windows: Windows | Parts, seed: int, peer_id: str) -> None:
        self._windows = windows
        self._key = f"{seed} {peer_id}".encode()
        self._ahead = np.empty(0, dtype=np.int64)
        self._epoch = self._index = 0

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._index)

    def seek(self, position: Position) -> None:
        if position.index > self._windows.training:
            raise DataError("the training text is shorter than when the checkpoint was written.")
        self._epoch, self._index = position.epoch, position.index
        self._ahead = np.empty(0, dtype=np.int64)

    def held_out(self, count: int) -> NDArray[np.int64]:
        return self._windows.held_out(count)

    def take(self, count: int) -> NDArray[np.int64]:
        found = self._ahead[:0]
        while len(found) < count:
            if self._index == self._windows.training:  # an epoch ended
                self._epoch, self._index = self._epoch + 1, 0
            if not len(self._ahead):
                order = np.arange(self._index, min(self._index + _AHEAD, self._windows.training), dtype=np.uint64)
                self._ahead = permuted(order, self._windows.training, self._key + b" %d" % self._epoch)
            drawn, self._ahead = np.split(self._ahead, [count - len(found)])
            self._index += len(drawn)
            found = np.concatenate([found, drawn])
        return self._windows.train(found)
