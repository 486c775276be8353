"""A dict that remembers so many entries and no more, for what peers make us remember."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(dict[K, V]):
    """At most `most` entries: the one set longest ago makes room for one more, but never `kept`."""

    def __init__(self, most: int, kept: K | None = None) -> None:
        super().__init__()
        self._most = most
        self._kept = kept

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len([*self]) > self._most:  # a subclass may tell another length
            del self[next(other for other in self if other != self._kept)]
