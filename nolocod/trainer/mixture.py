"""Several data sets of the hub as one, by weights.

The rule: every window is of one data set, drawn by the hash of the run's seed, the peer id and the window's number; so a
position needs no memory of what was drawn. Each data set is gone through in its own order, and holds out its own documents.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nolocod.errors import DataError
from nolocod.trainer.data import drawn as hashed
from nolocod.trainer.windows import Position, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Part(Source, Protocol):
    """What source.Stream is."""

    @property
    def facts(self) -> list[object]: ...


class Mixture:
    """One node's way through `parts`. Raises hub.failures, and goes on where it was when asked again."""

    def __init__(self, parts: Sequence[Part], weights: Sequence[float], key: str) -> None:
        self._parts = parts
        self._ends = [end / sum(weights) for end in accumulate(weights)]  # of their shares, one behind another
        self._key = key
        self._index = 0
        self._positions: list[Position | None] = [None] * len(parts)  # as long as they hold: a position is dear
        self._taken: list[NDArray[np.int64]] = []  # of a call that failed

    @property
    def facts(self) -> list[object]:
        """What its tokens depend on, beside the run."""
        return [part.facts for part in self._parts]

    @property
    def position(self) -> Position:
        self._positions = [known or part.position for known, part in zip(self._positions, self._parts, strict=True)]
        parts = tuple(known for known in self._positions if known is not None)
        return Position(min(part.epoch for part in parts), self._index, parts=parts)

    def seek(self, position: Position) -> None:
        if len(position.parts) != len(self._parts):
            raise DataError("the checkpoint is of another mixture of data sets.")
        self._index, self._taken = position.index, []
        self._positions = [*position.parts]
        for part, its in zip(self._parts, position.parts, strict=True):
            part.seek(its)

    def take(self, count: int) -> NDArray[np.int64]:
        """The next `count` windows to train on."""
        while len(self._taken) < count:
            drawn = self._draw(self._index + len(self._taken))
            self._positions[drawn] = None
            self._taken.append(self._parts[drawn].take(1))
        found, self._taken = np.concatenate(self._taken[:count]), self._taken[count:]
        self._index += count
        return found

    def held_out(self, count: int) -> NDArray[np.int64]:
        """At most `count` windows that nobody trains on: one of each data set, and the rest by their shares."""
        left = max(0, count - len(self._parts))
        ends = [0, *(round(left * end) for end in self._ends)]
        counts = [1 + end - begin for begin, end in pairwise(ends)]
        return np.concatenate([part.held_out(its) for part, its in zip(self._parts, counts, strict=True)])[:count]

    def _draw(self, index: int) -> int:
        """Which data set the window with this number is of."""
        return bisect(self._ends[:-1], hashed(f"{self._key} mixture {index}"))
