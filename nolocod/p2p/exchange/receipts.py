"""The receipts of this node's exchanges, on disk.

The rule: one JSON line per receipt, appended and fsynced before anybody is told of the decision. A line
that a crash cut short is dropped when the file is next opened; what was told is always whole.
At `limit` bytes the file becomes `<name>.old`, in place of the one before. `<name>.doubts` has the votes of this node
of which it does not know the outcome: each is on the disk before it is told.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING

from nolocod.disk import disk_errors, make_folder, sync_folder, write_whole
from nolocod.errors import ProtocolError
from nolocod.proto.receipt import MAX_LINE, from_line, read_line, to_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.proto.receipt import Receipt

_DOUBTS = 16
"""Votes that are kept at most."""
_FRESH = 256
"""Receipts that wait to be counted."""


class ReceiptStore:
    """Append-only; safe to use from several threads. Raises DiskFullError or DataDirError."""

    def __init__(self, path: Path, limit: int = 16 << 20) -> None:
        self._path = path
        self._old = path.with_name(path.name + ".old")
        self._limit = limit
        self._lock = threading.Lock()
        self._fresh: deque[Receipt] = deque(maxlen=_FRESH)
        self._votes_path = path.with_name(path.name + ".doubts")
        for each in (self._path, self._votes_path):
            _drop_torn_tail(each)
        self._votes = self._read_votes()

    def add(self, receipt: Receipt) -> None:
        """Store `receipt` for good: on the disk when this returns. It settles this node's vote."""
        line = to_line(receipt)
        with self._lock, disk_errors(self._path):
            self._rotate()
            _append(self._path, line)
            self._forget(receipt.session)
        self._fresh.append(receipt)

    def fresh(self) -> list[Receipt]:
        """Those that were added since the last call, oldest first."""
        return [self._fresh.popleft() for _ in range(len(self._fresh))]

    def _rotate(self) -> None:
        """Before a receipt is added: a failure after that would deny one that is on the disk."""
        if self._path.exists() and self._path.stat().st_size > self._limit:
            self._path.replace(self._old)
            sync_folder(self._path.parent)

    # --- votes whose outcome is not known -----------------------------------------------------------

    def doubts(self) -> list[Receipt]:
        """The votes that were not settled, oldest first; those of earlier lives too."""
        return [*self._votes.values()]

    def vote(self, vote: Receipt) -> None:
        """Keep what this node, as the answerer, is about to say: on the disk when this returns."""
        with self._lock, disk_errors(self._votes_path):
            if len(self._votes) >= _DOUBTS:
                self._forget(next(iter(self._votes)))
            _append(self._votes_path, to_line(vote))
            self._votes[vote.session] = vote

    def settle(self, session: bytes) -> None:
        """The outcome is known. A crash may undo this: then the partner is asked again."""
        with self._lock, disk_errors(self._votes_path):
            self._forget(session)

    def _forget(self, session: bytes) -> None:
        if self._votes.pop(session, None) is None:
            return
        if self._votes:
            write_whole(self._votes_path, b"".join(map(to_line, self._votes.values())))
        else:
            os.truncate(self._votes_path, 0)

    def _read_votes(self) -> dict[bytes, Receipt]:
        with disk_errors(self._votes_path):
            lines = self._votes_path.read_bytes().splitlines() if self._votes_path.exists() else []
        votes = filter(None, (_from_line(line, read_line) for line in lines[-2 * _DOUBTS :]))
        return {vote.session: vote for vote in votes if self.find(vote.session) is None}

    def find(self, session: bytes) -> Receipt | None:
        """The receipt of a session, if it is kept and both signatures fit. Reads up to twice the limit."""
        name = session.hex().encode()
        for line in self._lines():
            if name in line and (receipt := _from_line(line)) is not None and receipt.session == session:
                return receipt
        return None

    def all(self, read: Callable[[bytes], Receipt] = from_line) -> Iterator[Receipt]:
        """Every kept receipt whose signatures fit, oldest first; of `read_line`, all that we kept."""
        for line in self._lines():
            if (receipt := _from_line(line, read)) is not None:
                yield receipt

    def since(self, own: PeerId, round_number: int) -> list[bytes]:
        """The sessions whose steps a checkpoint of that round does not hold (`sessions_since`)."""
        lines = reversed(list(self._lines()))
        return sessions_since(filter(None, map(_from_line, lines)), own, round_number)

    def _lines(self) -> Iterator[bytes]:
        with ExitStack() as stack, disk_errors(self._path):
            with self._lock:  # both at once: what `add` moves meanwhile would be missed
                files = [stack.enter_context(path.open("rb")) for path in (self._old, self._path) if path.exists()]
            for file in files:
                yield from file


def sessions_since(newest_first: Iterable[Receipt], own: PeerId, round_number: int) -> list[bytes]:
    """The sessions that `own` entered at `round_number` or later, of receipts in that order, up to an earlier one.

    A checkpoint of that round holds none of their steps.
    """
    sessions: list[bytes] = []
    for receipt in newest_first:
        side = next((side for side in receipt.parsed.sides if side.peer_id == own), None)
        if side is None or side.standing.round < round_number:
            break
        sessions.append(receipt.session)
    return sessions


def _drop_torn_tail(path: Path) -> None:
    with disk_errors(path):
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            return
        with file:
            base = file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
            file.truncate(base + file.read().rfind(b"\n") + 1)


def _append(path: Path, line: bytes) -> None:
    """Add `line` to the file, for good, or not at all."""
    make_folder(path.parent)
    new = not path.exists()
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
            if new:
                sync_folder(path.parent)
        except OSError:
            file.truncate(start)  # half a line must not spoil the next
            raise


def _from_line(line: bytes, read: Callable[[bytes], Receipt] = from_line) -> Receipt | None:
    """None for a line that a fault of the disk has changed."""
    try:
        return read(line)
    except ProtocolError:
        return None
