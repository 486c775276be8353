"""The log of a simulation: one JSON line per event, and one digest that stands for all of it.

The rule: what is in it follows from the seed alone, in the order in which it happened. Two logs are the same if their
digests are.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import blake3
import msgspec

if TYPE_CHECKING:
    from nolocod.observe.events import Event


class Journal:
    """Takes events in; writes them to `file` if there is one."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self.lines = 0
        self._file = file
        self._digest = blake3.blake3()
        self._encode = msgspec.json.Encoder().encode

    def note(self, now: float, node: int, event: Event) -> None:
        """`event` happened at node number `node`, `now` seconds after the beginning."""
        line = b'{"t":%.6f,"node":%d,"event":"%s","is":%s}\n' % (now, node, type(event).__name__.encode(), self._encode(event))
        self.lines += 1
        self._digest.update(line)
        if self._file is not None:
            self._file.write(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()
