"""The files of the model that a run starts from: had from a folder, the hub or peers, and given to other peers.

The rule: nothing counts but the manifest's hash. Files of a folder or of the hub's cache are linked to, not copied; what has
changed since is told by name, and had again.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import trio

from nolocod.disk import disk_errors, make_folder
from nolocod.errors import BaseModelError, DiskFullError, OtherBaseError, PeerBusyError
from nolocod.observe.events import StateChanged, Troubled
from nolocod.p2p.snapshots.server import ServedSnapshot
from nolocod.proto.types import Description, Standing
from nolocod.run.base import differs

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.node.peers import Peers
    from nolocod.observe.events import Emit
    from nolocod.run.base import Base, BaseFile
    from nolocod.trainer.process import TrainerProcess

_RETRY_SECONDS = 10.0
"""What a peer is told that asks for a file that is not here yet."""


class BaseFiles:
    """Those of one node, in the folder `folder` of its data directory; `given` is the folder that its owner named."""

    def __init__(self, base: Base, folder: Path, given: Path | None, emit: Emit) -> None:
        self._base = base
        self._folder = folder
        self._given = given
        self._emit = emit
        self._here: dict[bytes, ServedSnapshot] = {}

    def served(self, root: bytes) -> ServedSnapshot:
        """The file of that root hash. PeerBusyError while it is not here."""
        if (snapshot := self._here.get(root)) is None:
            raise PeerBusyError("this node has not got that file yet.", retry_after=_RETRY_SECONDS)
        return snapshot

    async def gather(self, trainer: TrainerProcess, peers: Peers) -> None:
        """Have all of them. Raises OtherBaseError, NoDonorError, DiskFullError or DataDirError."""
        missing = []
        for file in self._base.files:
            if bytes.fromhex(file.root) not in self._here and not await self._found(file):
                missing.append(file)
        if missing and (needed := sum(file.size for file in missing)) > (free := shutil.disk_usage(self._folder).free):
            raise DiskFullError(f"{self._folder} has {free} bytes free, the base model needs {needed}.")
        on_hub = bool(self._base.source)
        for file in missing:
            if not (on_hub := on_hub and await self._downloaded(file, trainer)):
                self._emit(StateChanged("fetching", f"{file.name} of the base model from peers"))
                path = self._folder / file.name
                self._keep(file, path, await peers.fetch_file(file, path))

    async def _found(self, file: BaseFile) -> bool:
        """Whether it is in the folder that the owner named, or was here before."""
        with disk_errors(self._folder):
            make_folder(self._folder)
        path = self._folder / file.name
        if self._given is not None:
            if isinstance(found := await trio.to_thread.run_sync(differs, self._given / file.name, file), str):
                raise OtherBaseError(found)
            _link(self._given / file.name, path)
        elif not path.exists() or isinstance(found := await trio.to_thread.run_sync(differs, path, file), str):
            if path.exists():
                self._emit(Troubled(OtherBaseError.entry.code, f"{found} It is had again."))
            with disk_errors(path):
                path.unlink(missing_ok=True)
            return False
        self._keep(file, path, found)
        return True

    async def _downloaded(self, file: BaseFile, trainer: TrainerProcess) -> bool:
        """Whether the hub gave it; what it gives otherwise is told."""
        self._emit(StateChanged("fetching", f"{file.name} of the base model from the hub"))
        try:
            path = await trainer.download(self._base.source, self._base.revision, (file.name, file.size))
        except BaseModelError as error:
            self._emit(Troubled(error.code, f"{error.cause} Peers are asked."))
            return False
        if isinstance(found := await trio.to_thread.run_sync(differs, path, file), str):
            self._emit(Troubled(OtherBaseError.entry.code, f"{found} Peers are asked."))
            return False
        _link(path, self._folder / file.name)
        self._keep(file, self._folder / file.name, found)
        return True

    def _keep(self, file: BaseFile, path: Path, description: Description) -> None:
        self._here[bytes.fromhex(file.root)] = ServedSnapshot(path, Standing(0, 0, 0.0), description)


def link_base(base: Base, source: Path, folder: Path) -> None:
    """Link to the files of `base` in `source`, where its founder has them, from `folder`."""
    with disk_errors(folder):
        make_folder(folder)
    for file in base.files:
        _link(source / file.name, folder / file.name)


def _link(source: Path, path: Path) -> None:
    if source.resolve() != path.resolve():
        with disk_errors(path):
            path.unlink(missing_ok=True)
            path.symlink_to(source.absolute())
