"""A node's data directory: made, locked against a second daemon, and told apart from a copy.

SO_REUSEPORT lets a second instance bind the same port without a word (py-libp2p sets it), so the lock
file is what keeps two daemons from sharing one identity.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nolocod.disk import disk_errors, write_whole
from nolocod.errors import DataDirError, DataDirInUseError, ManifestError, NotRunningError, WrongRunError
from nolocod.identity import load_or_create
from nolocod.run.manifest import MAX_MANIFEST_BYTES, read_run_file, seal, stored_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nolocod.run.manifest import Sealed
    from nolocod.run.paths import DataDir


@dataclass(frozen=True)
class Running:
    """What a running daemon tells about itself in its data directory."""

    pid: int
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
    try:
        lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DataDirError(f"{paths.lock}: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
            raise DataDirInUseError(f"{paths.root} is held by process {holder}.") from error
        _prepare(paths, lock)
        yield
    finally:
        os.close(lock)


def _prepare(paths: DataDir, lock: int) -> None:
    with disk_errors(paths.root):
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        for leftover in (paths.incoming, paths.serving):
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in (paths.incoming, paths.serving, paths.cache, paths.checkpoints):
            folder.mkdir(exist_ok=True)


def make(paths: DataDir) -> None:
    """Make the directory with mode 0700, if it is not there."""
    try:
        paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataDirError(f"{paths.root}: {error.strerror}.") from error


def announce(paths: DataDir, running: Running) -> None:
    """Leave word for `nolocod status`."""
    write_whole(paths.daemon, json.dumps(asdict(running)).encode())


def find_running(paths: DataDir) -> Running:
    """Read what the daemon of this directory left; NotRunningError if none lives."""
    try:
        entry = json.loads(paths.daemon.read_bytes())
        running = Running(**{**entry, "addresses": tuple(entry["addresses"])})
        texts = (running.http, running.peer_id, running.run_id, *running.addresses)
        if not (isinstance(running.pid, int) and 0 < running.pid < 1 << 31 and all(isinstance(text, str) for text in texts)):
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise NotRunningError(f"{paths.root} has no running daemon.") from error
    if not _lives(running.pid):
        raise NotRunningError(f"the daemon of {paths.root} (process {running.pid}) has ended.")
    return running


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def found(paths: DataDir, run_file: Path) -> Sealed:
    """Check `run_file`, sign it as this directory's identity, and keep the manifest there.

    Raises RunFileError, or WrongRunError if the directory already belongs to another run.
    """
    manifest = read_run_file(run_file)
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
