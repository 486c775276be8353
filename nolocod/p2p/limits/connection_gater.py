"""Whom a handshake lets through: those with our network key, and of them those on the allow list.

The rule: what is decided here costs a stranger its connection before it can open a stream. The network key is mixed
into the handshake itself, so that without it nothing more can be read or said; the list is asked once the peer has
proved its id. libp2p's own private networks (pnet) put a second cipher over every byte instead; a key in the
handshake keeps strangers out as well, and costs nothing afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.errors import UsageError
from nolocod.observe.events import Emit, Troubled
from nolocod.run.credentials import prologue, read_allow_list

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from nolocod.identity import PeerId

_REREAD = 2.0
"""Seconds between two looks at the allow list's file."""


@dataclass
class ConnectionGater:
    """`prologue` is what both sides mix into the handshake, None for an open network; `allowed` None lets all in."""

    prologue: bytes | None = None
    allowed: frozenset[PeerId] | None = None
    _seen: _Stamp | None = None
    """Of the list's file, before it was read."""

    @classmethod
    def of(cls, network_key: bytes | None, allow: Path | None) -> ConnectionGater:
        """Raises UsageError for an allow list that is none."""
        if allow is None:
            return cls(prologue(network_key))
        seen = _stamp(allow)
        return cls(prologue(network_key), read_allow_list(allow), seen)

    def lets(self, peer: PeerId) -> bool:
        return self.allowed is None or peer in self.allowed

    async def follow(self, allow: Path, drop: Callable[[], Awaitable[None]], emit: Emit) -> None:
        """Read the list again whenever its file changes, and have those who are on it no more dropped: at every look, since
        one of them may have been half-way in when the list changed.

        A file that cannot be read leaves the list as it was, and is told once.
        """
        while True:
            if (stamp := _stamp(allow)) != self._seen:
                self._seen = stamp
                try:
                    self.allowed = await trio.to_thread.run_sync(read_allow_list, allow)
                except UsageError as error:
                    emit(Troubled(error.code, f"{error.cause} The list stays as it was."))
            await drop()
            await trio.sleep(_REREAD)


_Stamp = tuple[int, int, int]


def _stamp(path: Path) -> _Stamp | None:
    """What changes when a file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
