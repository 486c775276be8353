"""The address book: peers that were alive, kept on disk, so that a node finds its run again without a bootstrap.

The rule: a node works without the file. It is written whole or not at all, and a damaged one is told and forgotten.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

import msgspec
import trio
from msgspec import Meta

from nolocod.disk import written_whole
from nolocod.errors import DataDirError, LocalError
from nolocod.identity import PeerId
from nolocod.observe.events import Troubled
from nolocod.p2p.transport.multiaddrs import dialable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nolocod.observe.events import Emit

CAPACITY = 200
MAX_BYTES = 1 << 20
_ONE = trio.CapacityLimiter(1)


class Remembered(msgspec.Struct, frozen=True):
    """One peer: `seen` is the time of day, in seconds, at which it was last alive."""

    peer_id: Annotated[str, Meta(max_length=64)]
    addresses: Annotated[tuple[str, ...], Meta(max_length=16)]
    seen: float


class AddressBook:
    """Remembers up to `CAPACITY` peers in the file at `path`: half of them those seen last, half drawn from those before.

    So neither a busy hour nor somebody who shows us many peers of his own drives out all that we ever knew.
    """

    def __init__(self, path: Path, emit: Emit, rng: random.Random | None = None) -> None:
        self._path = path
        self._emit = emit
        self._rng = rng or random.Random()
        self._peers = {PeerId(remembered.peer_id): remembered for remembered in self._load()}
        self._dirty = False

    def _load(self) -> list[Remembered]:
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(MAX_BYTES), type=list[Remembered])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._emit(Troubled(DataDirError.entry.code, f"{self._path} is damaged and was ignored ({error})."))
            return []

    def remember(self, peer: PeerId, addresses: Sequence[str], wall: float) -> None:
        """Note that `peer` was alive at `wall` (time of day in seconds) at these addresses."""
        usable = tuple(address for address in addresses if dialable(address))[:16]
        if not usable:
            return
        self._peers[peer] = Remembered(peer, usable, wall)
        self._dirty = True
        if len(self._peers) > CAPACITY:
            older = [peer for peer, _ in self.recent()[CAPACITY // 2 :]]
            del self._peers[self._rng.choice(older)]

    def recent(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """(peer, addresses), those seen last first."""
        ordered = sorted(self._peers.values(), key=lambda remembered: -remembered.seen)
        return [(PeerId(remembered.peer_id), remembered.addresses) for remembered in ordered]

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        return self._peers[peer].addresses if peer in self._peers else ()

    def save(self) -> None:
        """Write the file if anything changed. Blocks on the disk; raises DiskFullError or DataDirError."""
        if not self._dirty:
            return
        self._dirty = False
        try:
            with written_whole(self._path) as file:
                file.write(msgspec.json.encode(list(self._peers.values())))
        except LocalError:
            self._dirty = True  # the next save tries again
            raise


async def save_aside(save: Callable[[], None], emit: Emit) -> None:
    """Write a file in a thread, one at a time: two would take its temporary name from each other. A failure is told here, not
    in the thread, where no event may be followed."""
    try:
        await trio.to_thread.run_sync(save, limiter=_ONE)
    except LocalError as error:
        emit(Troubled(error.code, error.cause))
