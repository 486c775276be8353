"""A node's data directory: made, locked against a second daemon, and told apart from a copy.

SO_REUSEPORT lets a second instance bind the same port without a word (py-libp2p sets it), so the lock
file is what keeps two daemons from sharing one identity.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import psutil
from msgspec import Meta

from nolocod.disk import disk_errors, write_whole
from nolocod.errors import DataDirInUseError, ManifestError, NotRunningError, WrongRunError
from nolocod.identity import load_or_create
from nolocod.run.manifest import MAX_MANIFEST_BYTES, seal, stored_manifest
from nolocod.run.run_file import read_run_file
from nolocod.units import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nolocod.paths import DataDir
    from nolocod.run.manifest import Manifest, Sealed


class Running(msgspec.Struct, frozen=True):
    """What a running daemon tells about itself in its data directory."""

    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    http: str
    peer_id: str
    run_id: str
    addresses: tuple[str, ...]
    http_token: str = ""
    """The file with the token that its pages need; empty where they need none."""


@contextmanager
def hold(paths: DataDir) -> Iterator[None]:
    """Make the directory (mode 0700) and keep it locked; DataDirInUseError names the holder's process."""
    make(paths)
    with disk_errors(paths.lock):
        lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
            raise DataDirInUseError(f"{paths.root} is held by process {holder}.") from error
        with disk_errors(paths.root):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            shutil.rmtree(paths.serving, ignore_errors=True)  # what came in is gone on with
            for folder in (paths.incoming, paths.serving, paths.cache, paths.checkpoints):
                folder.mkdir(exist_ok=True)
        yield
    finally:
        os.close(lock)


def make(paths: DataDir) -> None:
    """Make the directory with mode 0700, if it is not there."""
    with disk_errors(paths.root):
        paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)


def announce(paths: DataDir, running: Running) -> None:
    """Leave word for `nolocod status`."""
    write_whole(paths.daemon, msgspec.json.encode(running))


def find_running(paths: DataDir) -> Running:
    """Read what the daemon of this directory left; NotRunningError if none lives."""
    try:
        running = msgspec.json.decode(paths.daemon.read_bytes(), type=Running)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotRunningError(f"{paths.root} has no running daemon.") from error
    if not psutil.pid_exists(running.pid):
        raise NotRunningError(f"the daemon of {paths.root} (process {running.pid}) has ended.")
    return running


def stop(paths: DataDir, within: float) -> bool:
    """End the daemon that holds this directory, in order, and wait for that; whether there was one. DataDirInUseError after so
    many seconds. The lock is asked, since a number that was left behind may be another program's by now."""
    deadline, told = time.monotonic() + within, False
    if not paths.lock.exists():
        return False
    with disk_errors(paths.lock), paths.lock.open("r+b", buffering=0) as lock:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return told
            holder = os.pread(lock.fileno(), 32, 0)
            if time.monotonic() > deadline:
                text = f"process {holder.decode('ascii', 'replace')} still holds {paths.root}."
                raise DataDirInUseError(text, remedy="Wait for its checkpoint, or give a longer --within.")
            if not told and holder.isdigit():  # a second signal would end it at once
                with suppress(ProcessLookupError):
                    os.kill(int(holder), signal.SIGTERM)
                told = True
            time.sleep(0.1)


def called(paths: DataDir, given: str = "") -> str:
    """What the owner called this node, empty for nothing; `given` is kept for later starts."""
    if given:
        write_whole(paths.name, given.encode())
        return given
    try:
        kept = paths.name.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return kept if NAME.fullmatch(kept) else ""


def found(paths: DataDir, run_file: Path) -> Sealed:
    """Sign what `run_file` says, as `keep` does. Raises RunFileError, and what `keep` raises."""
    return keep(paths, read_run_file(run_file))


def keep(paths: DataDir, manifest: Manifest) -> Sealed:
    """Sign `manifest` as this directory's identity, and keep it there.

    Raises WrongRunError if the directory already belongs to another run.
    """
    with hold(paths):
        sealed = seal(manifest, load_or_create(paths.identity))
        stored = stored_manifest(paths)
        if stored is not None and stored.run_id != sealed.run_id:
            raise WrongRunError(f"{paths.root} belongs to run {stored.manifest.name} ({stored.run_id[:12]}).")
        write_whole(paths.manifest, sealed.to_bytes())
    return sealed


def read_foreign(path: Path) -> bytes:
    """A sealed manifest from anywhere, not yet checked; ManifestError if it cannot be read, or is too large to be one."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}.", remedy="Name the manifest of a data directory.") from error
