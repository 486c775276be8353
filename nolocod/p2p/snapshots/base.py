"""A file that the run's manifest pins, from peers: several at once, chunk by chunk.

The rule: every chunk is checked against the manifest before it counts, so it does not matter who gives which. What came stays
on the disk, over restarts too; the file has its name once it is whole. Each donor is asked for a few chunks at a time, and
those that a slow one still owes at the end are asked of others too.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from io import FileIO
from typing import TYPE_CHECKING

import trio

from nolocod.disk import PARTIAL, disk_errors
from nolocod.errors import LocalError, NoDonorError, PeerBusyError, ProtocolError, RemoteError
from nolocod.identity import short
from nolocod.p2p.snapshots.client import open_donor_stream
from nolocod.p2p.snapshots.partial import finish, private
from nolocod.proto.content import check_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.snapshots.client import Blame
    from nolocod.p2p.transport.stream import Dial
    from nolocod.proto.types import Description
    from nolocod.run.base import BaseFile

_AT_ONCE = 4
"""Donors that give at the same time, at most."""
_CHUNKS = 16
"""Chunks that are asked for at once, at most."""
_LOOK_SECONDS = 1.0
"""Between two looks at who could give."""


async def fetch_file(
    context: Context, dial: Dial, donors: Callable[[], Sequence[PeerId]], wanted: tuple[BaseFile, Path], blame: Blame
) -> Description:
    """Fetch `wanted`, a pinned file and the path that it gets, from those that `donors` names at the time.

    Returns its description. `blame` is told why a donor was left. Raises NoDonorError once no chunk has come for
    `Limits.busy_seconds`, DiskFullError or DataDirError; what came stays for the next try.
    """
    return await _Fetch(context, dial, wanted, blame).run(donors)


class _Fetch:
    def __init__(self, context: Context, dial: Dial, wanted: tuple[BaseFile, Path], blame: Blame) -> None:
        self._context = context
        self._dial = dial
        self._wanted, self._into = wanted
        self._blame = blame
        self._partial = self._into.with_name(f"{self._into.name}{PARTIAL}")
        self._description: Description | None = None  # once a donor has told it, and it is the pinned one
        self._looking = trio.Lock()
        self._missing: set[int] = set()
        self._asked: dict[PeerId, set[int]] = {}  # of each that gives now: the chunks that are due
        self._due: dict[PeerId, float] = {}  # when each that gave up may be asked again
        self._failures: Counter[PeerId] = Counter()  # broken streams in a row, with no chunk gained
        self._left: dict[PeerId, str] = {}
        self._gained = trio.current_time()
        self._changed = trio.Event()
        self._failed: LocalError | None = None

    async def run(self, donors: Callable[[], Sequence[PeerId]]) -> Description:
        with disk_errors(self._partial):
            file = FileIO(self._partial, "r+", opener=private)
        with file:
            async with trio.open_nursery() as nursery:
                while (self._description is None or self._missing) and self._failed is None:
                    if trio.current_time() > self._gained + self._context.limits.busy_seconds:
                        reasons = "; ".join(f"{short(donor)}: {reason}" for donor, reason in self._left.items())
                        self._failed = NoDonorError(f"nobody gave {self._wanted.name} ({reasons or 'no peer has it'}).")
                        break
                    for donor in self._free(donors()):
                        self._asked[donor] = set()
                        nursery.start_soon(self._lane, donor, file)
                    self._changed = trio.Event()
                    with trio.move_on_after(_LOOK_SECONDS):
                        await self._changed.wait()
                nursery.cancel_scope.cancel()
            if self._failed is not None or self._description is None:
                raise self._failed or AssertionError("no description, and no failure")
            await self._context.aside(finish, self._partial, self._into)
        return self._description

    def _free(self, donors: Sequence[PeerId]) -> list[PeerId]:
        """Those that may be asked now."""
        now = trio.current_time()
        free = [one for one in donors if one not in self._asked and one not in self._left and self._due.get(one, 0.0) <= now]
        return free[: _AT_ONCE - len(self._asked)]

    async def _lane(self, donor: PeerId, file: FileIO) -> None:
        """Have `donor` give chunks for as long as any are missing."""
        try:
            async with open_donor_stream(self._context, self._dial, donor) as stream:
                _, description = await stream.describe(self._wanted.size, bytes.fromhex(self._wanted.root))
                async with self._looking:
                    if self._description is None:
                        self._missing = await self._context.aside(_missing, description, file, self._partial)
                        self._description, self._gained = description, trio.current_time()
                while span := self._next(donor):
                    async for index in stream.fetch(description, span.start, len(span), file):
                        self._missing.discard(index)
                        self._asked[donor].discard(index)
                        self._gained, self._failures[donor] = trio.current_time(), 0
        except PeerBusyError as error:
            self._due[donor] = trio.current_time() + error.retry_after
        except RemoteError as error:
            self._failures[donor] += 1
            self._due[donor] = trio.current_time() + self._failures[donor]
            if isinstance(error, ProtocolError) or self._failures[donor] > self._context.limits.resumes:
                self._left[donor] = error.cause
                self._blame(donor, error)
        except LocalError as error:
            self._failed = error  # raised outside the nursery, which would wrap it in a group
        finally:
            del self._asked[donor]
            self._changed.set()

    def _next(self, donor: PeerId) -> range:
        """The chunks to ask `donor` for: some that nobody was asked for, else the last that another still owes."""
        due = set().union(*self._asked.values())
        if free := self._missing - due:
            first = min(free)
            most = max(1, min(_CHUNKS, len(free) // (2 * len(self._asked))))
            span = range(first, next((end for end in range(first, first + most) if end not in free), first + most))
        elif owed := self._missing - self._asked[donor]:
            span = range(max(owed), max(owed) + 1)
        else:
            span = range(0)
        self._asked[donor] = set(span)
        return span


def _missing(description: Description, file: FileIO, partial: Path) -> set[int]:
    """The chunks that an earlier try did not leave in `file`."""
    missing = set(range(len(description.hashes)))
    buffer = bytearray(description.chunk_size)
    for index in range(-(-os.fstat(file.fileno()).st_size // description.chunk_size)):
        if index in missing:
            start, length = description.span(index)
            with memoryview(buffer)[:length] as content, suppress(ProtocolError), disk_errors(partial):
                if os.preadv(file.fileno(), [content], start) == length:
                    check_chunk(description, index, content)
                    missing.discard(index)
    return missing
