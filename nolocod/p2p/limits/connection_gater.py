"""Whom a handshake lets through: those with our network key, and of them those on the allow list.

The rule: a peer that is refused loses its connection before it can open a stream. The network key is mixed into the
handshake itself (`prologue`), so that without it nothing more can be read or said; the list is asked once the peer has
proved its id. libp2p's own private networks (pnet) put a second cipher over every byte instead, which costs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.errors import UsageError
from nolocod.observe.events import Emit, Troubled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from nolocod.identity import PeerId

_REREAD = 2.0
"""Seconds between two looks at the allow list's file."""


@dataclass
class ConnectionGater:
    """`prologue` is what both sides mix into the handshake, None for an open network; `allowed` None lets all in."""

    prologue: bytes | None = None
    allowed: frozenset[PeerId] | None = None
    _path: Path | None = None
    _read: Callable[[Path], frozenset[PeerId]] = lambda _: frozenset()
    """Reads the allow list; UsageError."""
    _seen: tuple[int, ...] | None = None
    """What told the file from another one when it was last looked at."""
    banned: Callable[[PeerId], bool] = lambda _: False
    """Whether one that comes is banned, and came too often of late to be told so once more."""

    @classmethod
    def reading(cls, prologue: bytes | None, path: Path | None, read: Callable[[Path], frozenset[PeerId]]) -> ConnectionGater:
        """With the allow list that `read` finds in the file at `path`, if there is one. Raises what `read` raises."""
        if path is None:
            return cls(prologue)
        gater = cls(prologue, None, path, read)
        gater._changed(path)  # before it is read
        gater.allowed = read(path)
        return gater

    def allows(self, peer: PeerId) -> bool:
        return self.allowed is None or peer in self.allowed

    async def follow(
        self, peers: Callable[[], Iterable[PeerId]], disconnect: Callable[[PeerId], Awaitable[None]], emit: Emit
    ) -> None:
        """Read the list again whenever its file changes, and disconnect those of `peers` that are not on it: at every look,
        since one of them may have been half-way in when the list changed.

        A file that cannot be read leaves the list as it was, and is told once.
        """
        while self._path is not None:
            if self._changed(self._path):
                try:
                    self.allowed = await trio.to_thread.run_sync(self._read, self._path)
                except UsageError as error:
                    emit(Troubled(error.code, f"{error.cause} The list stays as it was."))
            for peer in list(peers()):
                if not self.allows(peer):
                    await disconnect(peer)
            await trio.sleep(_REREAD)

    def _changed(self, path: Path) -> bool:
        """Whether the file is another one than when this was last asked."""
        before = self._seen
        try:
            found = path.stat()
            self._seen = found.st_mtime_ns, found.st_size, found.st_ino
        except OSError:
            self._seen = None
        return self._seen != before
