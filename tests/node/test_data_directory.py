from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nolocod.disk import write_whole
from nolocod.errors import (
    DataDirError,
    DataDirInUseError,
    DiskFullError,
    ManifestError,
    NotRunningError,
    RunFileError,
    WrongRunError,
)
from nolocod.node import data_directory
from nolocod.paths import DataDir
from nolocod.run.manifest import stored_manifest

if TYPE_CHECKING:
    from pathlib import Path

RUN = 'name = "one"\n[model]\nmodel_type = "llama"\n'


def test_a_directory_is_private_and_held_by_one_process(tmp_path: Path) -> None:
    paths = DataDir(tmp_path / "deep" / "node")
    with data_directory.hold(paths):
        assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700
        code = f"""
from pathlib import Path
from nolocod import errors
from nolocod.node import data_directory
from nolocod.paths import DataDir
try:
    with data_directory.hold(DataDir(Path({str(paths.root)!r}))):
        print("held twice")
except errors.DataDirInUseError as error:
    print(error.cause)
"""
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"is held by process {os.getpid()}" in said
    with data_directory.hold(paths):
        pass  # free again


HOLDER = """
import signal, sys, time
from pathlib import Path
from nolocod.node import data_directory
from nolocod.paths import DataDir
deaf = sys.argv[2] == "deaf"
signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: sys.exit(0))
with data_directory.hold(DataDir(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["hears", "deaf"])
def test_stopping_waits_for_who_holds_the_directory(tmp_path: Path, kind: str) -> None:
    paths = DataDir(tmp_path / "node")
    assert not data_directory.stop(paths, 0), "there is no such directory"
    line = [sys.executable, "-c", HOLDER, str(paths.root), kind]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            if kind == "hears":
                assert data_directory.stop(paths, 60)
                with data_directory.hold(paths):
                    pass
            else:
                with pytest.raises(DataDirInUseError, match=f"process {holder.pid} still holds"):
                    data_directory.stop(paths, 0.3)
        finally:
            holder.kill()


def test_a_number_left_behind_is_nobodys_to_stop(tmp_path: Path) -> None:
    paths = DataDir(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as other:
        paths.lock.write_text(str(other.pid))
        assert not data_directory.stop(paths, 5)
        assert other.poll() is None
        other.kill()


def test_a_second_hold_in_this_process_is_refused_too(tmp_path: Path) -> None:
    paths = DataDir(tmp_path)
    with data_directory.hold(paths), pytest.raises(DataDirInUseError), data_directory.hold(paths):
        pass


def test_holding_clears_what_a_killed_daemon_served_and_keeps_what_came_in(tmp_path: Path) -> None:
    paths = DataDir(tmp_path)
    with data_directory.hold(paths):
        (paths.incoming / "weights.partial").write_bytes(b"half")
        (paths.serving / "round-00000001.safetensors").write_bytes(b"whole")
        (paths.checkpoints / "round-00000001").mkdir()
    with data_directory.hold(paths):
        assert not any(paths.serving.iterdir())
        assert any(paths.incoming.iterdir())
        assert (paths.checkpoints / "round-00000001").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match="file"), data_directory.hold(DataDir(tmp_path / "file")):
        pass


def test_found_signs_once_and_keeps_other_runs_out(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN)
    paths = DataDir(tmp_path / "node")
    sealed = data_directory.found(paths, run_file)
    assert data_directory.found(paths, run_file).run_id == sealed.run_id
    stored = stored_manifest(paths)
    assert stored == sealed
    run_file.write_text(RUN.replace("one", "two"))
    with pytest.raises(WrongRunError, match="one"):
        data_directory.found(paths, run_file)
    assert stored_manifest(paths) == sealed


def test_a_wrong_run_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN + "steps = 3\n[inner]\nsteps = 0\n")
    with pytest.raises(RunFileError):
        data_directory.found(DataDir(tmp_path / "node"), tmp_path / "run.toml")
    assert not (tmp_path / "node").exists()


def test_an_altered_manifest_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    paths = DataDir(tmp_path / "node")
    data_directory.found(paths, tmp_path / "run.toml")
    raw = bytearray(paths.manifest.read_bytes())
    raw[-5] ^= 1
    paths.manifest.write_bytes(raw)
    with pytest.raises(ManifestError):
        stored_manifest(paths)


def test_running_is_told_and_forgotten_with_its_process(tmp_path: Path) -> None:
    paths = DataDir(tmp_path)
    with pytest.raises(NotRunningError):
        data_directory.find_running(paths)
    running = data_directory.Running(os.getpid(), "127.0.0.1:1", "peer", "run", ("/ip4/127.0.0.1/tcp/1",))
    data_directory.announce(paths, running)
    assert data_directory.find_running(paths) == running
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, timeout=60, check=True)
    data_directory.announce(paths, data_directory.Running(int(ended.stdout), "127.0.0.1:1", "peer", "run", ()))
    with pytest.raises(NotRunningError, match="has ended"):
        data_directory.find_running(paths)
    paths.daemon.write_text(json.dumps({"pid": "x"}))
    with pytest.raises(NotRunningError):
        data_directory.find_running(paths)


def test_a_full_disk_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_whole(target, b"old")
    code = f"""
import resource, signal
from pathlib import Path
from nolocod import disk, errors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    disk.write_whole(Path({str(target)!r}), b"x" * 100_000)
except errors.DiskFullError as error:
    print(error.code)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() == DiskFullError.entry.code
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_that_cannot_be_prepared_has_a_code(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder belongs")
    with pytest.raises(DataDirError), data_directory.hold(DataDir(tmp_path)):
        pass


def test_everything_in_the_data_directory_has_its_own_place(tmp_path: Path) -> None:
    paths = DataDir(tmp_path)
    places = [place for name, place in vars(paths).items() if name != "root"]
    assert len(set(places)) == len(places)
    assert {place.parent for place in places} == {tmp_path}
