"""Files that are whole or not there, also after a power cut: what order the disk is told to keep."""

from __future__ import annotations

import errno
import io
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nolocod import disk
from nolocod.disk import large_written_whole, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, done = tmp_path / "file", []
    target.write_bytes(b"old")
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        what = os.readlink(f"/proc/self/fd/{handle}")
        done.append(("folder",) if what == str(tmp_path) else ("file", Path(what).read_bytes()))
        fsync(handle)

    def renamed(path: Path, to: Path) -> Path:
        done.append(("renamed",))
        return rename(path, to)

    monkeypatch.setattr("nolocod.disk.os.fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write_whole(target, b"new")
    assert done == [("file", b"new"), ("renamed",), ("folder",)]
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("size", [0, 1, disk._BLOCK, 2 * disk._BLOCK + 4097])
def test_a_large_file_has_what_was_written_in_whatever_pieces(tmp_path: Path, size: int) -> None:
    rng, at = random.Random(0), 0
    content = rng.randbytes(size)
    with large_written_whole(tmp_path / "file") as file:
        while at < size:
            end = at + rng.choice((1, 4096, 100_000, 3 << 20))
            file.write(memoryview(content)[at:end])
            at = end
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_system_that_cannot_write_directly_or_takes_a_part_gets_it_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: Callable[..., int] = io.FileIO.write

    class Refusing(io.FileIO):
        calls = 0

        def write(self, data: memoryview) -> int:  # type: ignore[override] # what is called
            Refusing.calls += 1
            if Refusing.calls == 1:
                return wrote(self, data[:4096])
            if Refusing.calls == 2:
                raise OSError(errno.EINVAL, "no")
            return wrote(self, data)

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: Refusing(path, mode))
    content = random.Random(0).randbytes(disk._BLOCK + 5)
    with large_written_whole(tmp_path / "file") as file:
        file.write(content)
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == content
