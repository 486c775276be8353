"""Files that are written whole or not at all.

The rule: everything goes to a temporary name beside the target, is synced, and is renamed; a crash leaves
the old file, and at most a `.partial` that the next start removes. A full disk is a DiskFullError here, the
one place where that is told from other errors; node/training_session.py goes on without checkpoints until there is room.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from nolocod.errors import DataDirError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARTIAL = ".partial"
_REPLACED = ".old" + PARTIAL
"""A folder that is about to be replaced."""

_LEAST, _RESTS = 60.0, 50
"""Seconds, and times as long as the state took to write, for which it is not written again: what writing costs is at most two
percent."""
_DAILY = 300e9
"""Bytes of it per day: a solid-state disk of 1 TB, made for 600 TB, is worn in five years."""
USUAL_RATE = 200e6
"""Bytes per second that a disk is taken to write where nothing was measured: an old solid-state disk, or a good hard disk."""
_BLOCK = 4 << 20
"""Bytes that go to the disk at once, where the system is to keep none of them."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Map an OSError about `path`: DiskFullError, or DataDirError for all else."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(f"{path} could not be written: {error.strerror}.") from error
        raise DataDirError(f"{path}: {error.strerror or error}.") from error


def check_room(folder: Path, size: int) -> None:
    """DiskFullError if the disk of `folder` has no room for `size` bytes, before any is written."""
    with disk_errors(folder):
        make_folder(folder)
        free = shutil.disk_usage(folder).free
    if free < size:
        raise DiskFullError(f"{folder} has {free / 1e9:.2f} GB left, and {size / 1e9:.2f} GB are to be written.")


def rest_after(size: int, seconds: float) -> float:
    """How many seconds to write nothing like it after `size` bytes that took so many `seconds`."""
    return max(_LEAST, _RESTS * seconds, size / _DAILY * 86_400)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make `folder`, and those above it, durable too."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


@contextmanager
def written_whole(target: Path, *, buffered: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that appears as `target` only if the block ends without an error."""
    partial = target.with_name(f"{target.name}.{os.getpid()}{PARTIAL}")
    with disk_errors(target):
        make_folder(target.parent)
        try:
            with partial.open("wb", buffering=-1 if buffered else 0) as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            partial.rename(target)
            sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def large_written_whole(target: Path) -> Iterator[LargeFile]:
    """As `written_whole`, for what is large, and read by nobody soon."""
    with written_whole(target, buffered=False) as handle:
        file = LargeFile(handle)
        yield file
        file.end()


class LargeFile:
    """Writes in blocks that go from here to the disk, where a file system can (O_DIRECT). To copy them to pages first, and
    those to the disk, takes several times as much of the processor, which training may need."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._block = memoryview(mmap.mmap(-1, _BLOCK))  # it begins where a page does, as a disk wants it
        self._filled = 0
        self._go_directly(True)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            end = min(_BLOCK, self._filled + len(rest))
            self._block[self._filled : end], rest = rest[: end - self._filled], rest[end - self._filled :]
            self._filled = end
            if end == _BLOCK:
                self._put()

    def end(self) -> None:
        """What is left is no whole block."""
        self._go_directly(False)
        self._put()

    def _put(self) -> None:
        left, self._filled = self._block[: self._filled], 0
        while len(left):
            try:
                left = left[self._handle.write(left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._directly:
                    raise
                self._go_directly(False)  # this file system cannot, or took a part of a page

    def _go_directly(self, directly: bool) -> None:
        self._directly = False
        if sys.platform == "linux":
            import fcntl

            with suppress(OSError):
                flags = fcntl.fcntl(self._handle.fileno(), fcntl.F_GETFL) & ~os.O_DIRECT
                fcntl.fcntl(self._handle.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT if directly else flags)
                self._directly = directly


def write_private(target: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    with written_whole(target) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)


@contextmanager
def folder_written_whole(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` only if the block ends without an error."""
    partial = target.with_name(target.name + PARTIAL)
    old = target.with_name(target.name + _REPLACED)
    try:
        with disk_errors(target):
            shutil.rmtree(partial, ignore_errors=True)
            make_folder(target.parent)
            partial.mkdir()
            yield partial
            sync_folder(partial)
            if target.exists():  # moved away, not removed: the gap without it is one rename
                target.rename(old)
            partial.rename(target)
            sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def restore_folders(parent: Path) -> None:
    """Bring back the folders of `parent` that a crash caught between the two renames of `folder_written_whole`."""
    for old in parent.glob(f"*{_REPLACED}"):
        if not (target := old.with_name(old.name.removesuffix(_REPLACED))).exists():
            old.rename(target)


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: a reader, or a crash, sees the old file or the new one, never a part."""
    with written_whole(path) as file:
        file.write(content)
