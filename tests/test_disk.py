"""Files that are whole or not there, also after a power cut: what order the disk is told to keep."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.disk import write_whole

if TYPE_CHECKING:
    import pytest


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
