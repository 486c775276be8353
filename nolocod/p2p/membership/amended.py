"""The run as its owners amended it, as far as this node knows: learnt from peers, or from the owners' commands.

The rule: the document that counts is told to everybody, and lies in the data directory. What is in force here is not taken
back: a document that says otherwise of it is told once, and not followed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from nolocod.disk import write_whole
from nolocod.errors import AmendmentError, DataDirError, NolocodError, UsageError
from nolocod.observe.events import Amended, Troubled
from nolocod.p2p.membership.left_by_commands import keep_looking
from nolocod.p2p.transport.multiaddrs import split
from nolocod.run import amendments
from nolocod.run.amendments import Amendments

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.run.manifest import Sealed


class AmendedRun:
    """`sealed` is the run with all changes, `known` the document that has them. `number` tells our round.

    Raises DataDirError for a file that is damaged.
    """

    def __init__(self, sealed: Sealed, path: Path | None, number: Callable[[], int], emit: Emit) -> None:
        """`path`: the file in the data directory; None for an observer, which has none."""
        self.known, self.sealed = Amendments(), sealed
        self._path, self._number, self._emit = path, number, emit
        self._refused = b""
        if stored := self._stored():
            self._take(stored)

    @property
    def raw(self) -> bytes:
        """What we tell others; empty while nothing is changed."""
        return self.known.raw

    @property
    def contacts(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Where else the run is found, by its owners' word."""
        found: list[tuple[PeerId, tuple[str, ...]]] = []
        for address in (address for change in self.known.changes for address in change.bootstrap):
            with suppress(UsageError):
                found.append((split(address)[0], (address,)))
        return found

    def learn(self, raw: bytes) -> None:
        """Take in what a peer told. ProtocolError or SignatureError if it is not valid."""
        if raw not in (b"", self.known.raw, self._refused):
            self._take(amendments.read(raw, self.sealed))

    def _take(self, told: Amendments) -> None:
        """Follow `told` if it is later and says the same of what is in force."""
        if not self.known.before(told, self.sealed.manifest.owner):
            return
        force = self.known.in_force(self._number() // self.sealed.manifest.outer.turns)
        if force != told.changes[: len(force)]:
            self._refused = told.raw
            cause = f"version {told.version} of the amendments says otherwise of what is in force here: it is not followed."
            self._emit(Troubled(AmendmentError.entry.code, cause))
            return
        new = [change for change in told.changes if change not in self.known.changes]
        self.known, self.sealed = told, amendments.amended(self.sealed, told)
        for change in new:
            self._emit(Amended(change.at, change.words))

    def _stored(self) -> Amendments | None:
        """What lies in the data directory. DataDirError if it is damaged."""
        try:
            raw = self._path.read_bytes() if self._path is not None else b""
            return amendments.read(raw, self.sealed) if raw else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataDirError(f"{self._path}: {error.strerror}.") from error
        except NolocodError as error:
            raise DataDirError(f"{self._path}: {error.cause}", remedy="Remove it: peers send it again.") from error

    async def run(self) -> None:
        """Keep what is known the same as in the data directory, until cancelled. What goes wrong with that is told once."""
        if (path := self._path) is None:
            return

        async def look() -> None:
            if (stored := await trio.to_thread.run_sync(self._stored)) is not None:
                self._take(stored)
            if self.known.raw not in (b"", stored.raw if stored else b""):
                await trio.to_thread.run_sync(write_whole, path, self.known.raw)

        await keep_looking(look, self._emit)
