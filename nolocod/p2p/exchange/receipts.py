"""The receipts of this node's exchanges, on disk.

The rule: one JSON line per receipt, appended and fsynced before anybody is told of the decision. A line
that a crash cut short is dropped when the file is next opened; what was told is always whole.
At `limit` bytes the file becomes `<name>.old`, in place of the one before.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from nolocod.disk import disk_errors
from nolocod.errors import ProtocolError
from nolocod.proto.receipt import MAX_LINE, from_line, to_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import RawIOBase
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.proto.receipt import Receipt


class ReceiptStore:
    """Append-only; safe to use from several threads. Raises DiskFullError or DataDirError."""

    def __init__(self, path: Path, limit: int = 16 << 20) -> None:
        self._path = path
        self._old = path.with_name(path.name + ".old")
        self._limit = limit
        self._lock = threading.Lock()
        self._drop_torn_tail()

    def add(self, receipt: Receipt) -> None:
        """Store `receipt` for good: on the disk when this returns."""
        line = to_line(receipt)
        with self._lock, disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._rotate()
            with self._path.open("ab", buffering=0) as file:
                start = file.tell()
                try:
                    _append(file, line)
                except OSError:
                    file.truncate(start)  # half a line must not spoil the next
                    raise

    def _rotate(self) -> None:
        """Before a receipt is added: a failure after that would deny one that is on the disk."""
        if self._path.exists() and self._path.stat().st_size > self._limit:
            self._path.replace(self._old)

    def find(self, session: bytes) -> Receipt | None:
        """The receipt of a session, if it is kept and both signatures fit. Reads up to twice the limit."""
        name = session.hex().encode()
        for line in self._lines():
            if name in line and (receipt := _from_line(line)) is not None and receipt.session == session:
                return receipt
        return None

    def all(self) -> Iterator[Receipt]:
        """Every kept receipt whose signatures fit, oldest first."""
        for line in self._lines():
            receipt = _from_line(line)
            if receipt is not None:
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

    def _drop_torn_tail(self) -> None:
        with disk_errors(self._path):
            try:
                file = self._path.open("r+b")
            except FileNotFoundError:
                return
            with file:
                base = file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
                file.truncate(base + file.read().rfind(b"\n") + 1)


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


def _append(file: RawIOBase, line: bytes) -> None:
    if file.write(line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _from_line(line: bytes) -> Receipt | None:
    """None for a line that a fault of the disk has changed."""
    try:
        return from_line(line)
    except ProtocolError:
        return None
