"""Shared memory between the network process and the trainer: one outbox, one inbox, in one piece of memory.

The rule: an anonymous file that the child inherits by descriptor, sized by the child once the model's size
is known, mapped by both. It has no name, so it cannot outlive the two processes, and no registry or tracker
of a third process is needed. The network process drops pages that it has worked on, so that its resident
memory stays small whatever the model's size.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile

from nolocod.proto.types import AHEAD_CHUNKS, CHUNK_SIZE

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux; Python has no name for it."""


def anonymous_file(name: str) -> int:
    """Open an empty file without a name and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"nolocod-{name}", os.MFD_CLOEXEC)
    handle, path = tempfile.mkstemp(prefix="nolocod-")  # platforms without memfd
    os.unlink(path)
    return handle


def outbox_offset(size: int) -> int:
    """Where the outbox lies in the file that begins with the inbox; both of `size` bytes.

    Only as far behind the inbox's beginning as a partner may be ahead: by the time its later chunks come, it holds what
    they are laid over.
    """
    return min(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, AHEAD_CHUNKS * CHUNK_SIZE)


class SharedBox:
    """A `proto.types.Box`: `size` bytes (> 0) of the anonymous file `descriptor`, from `offset` on (a multiple of the page)."""

    def __init__(self, descriptor: int, size: int, offset: int = 0) -> None:
        self._map = mmap.mmap(descriptor, size, offset=offset)
        self._whole = memoryview(self._map)

    @property
    def size(self) -> int:
        return len(self._whole)

    def view(self, start: int, length: int) -> memoryview:
        """Bytes [start, start + length) of the shared memory itself, writable."""
        return self._whole[start : start + length]

    def place(self, start: int, length: int) -> memoryview:
        """The same, with its pages mapped at one go: a fault for each of them would take twice the time."""
        if sys.platform == "linux":
            first = start - start % mmap.PAGESIZE
            with contextlib.suppress(OSError):  # before 5.14: they are mapped one by one
                self._map.madvise(_POPULATE_WRITE, first, min(start + length, self.size) - first)
        return self.view(start, length)

    def release(self, start: int, length: int) -> None:
        """Unmap these pages here; the other process and later views still see their content."""
        first = start - start % mmap.PAGESIZE
        end = min(start + length, self.size)
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
