"""What came of a donor's weights, kept over broken streams, other donors' tries, and restarts of this node.

The rule: one file per donor, for replicas differ, with the donor's offer beside it. What an earlier process left counts as far
as it has the offer's hashes. When a fetch ends without weights, that of one donor stays, the furthest; a whole one needs none.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from nolocod.disk import PARTIAL, disk_errors, sync_folder, write_whole
from nolocod.errors import AlteredBytesError, ProtocolError
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import check_chunk, describe_from_wire, describe_to_wire
from nolocod.proto.envelope import standing_from_wire, standing_to_wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.context import Aside
    from nolocod.proto.limits import Limits
    from nolocod.proto.types import Description, Standing

    Offer = tuple[Standing, Description]

_OFFER = ".offer"


class Partial:
    """The part that is there of the weights that `donor` offers for the file `into`."""

    def __init__(self, into: Path, donor: PeerId) -> None:
        self.path = into.with_name(f"{into.name}.{donor}{PARTIAL}")
        self._offer = self.path.with_suffix(_OFFER)
        self._into = into

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self._offer.exists() and self.path.exists() else 0

    @contextmanager
    def opened(self) -> Iterator[FileIO]:
        with disk_errors(self.path):
            file = FileIO(self.path, "r+", opener=private)
        with file:
            yield file

    async def find(self, file: FileIO, limits: Limits, aside: Aside) -> tuple[Offer, int] | None:
        """The offer that its content goes with, and how many chunks are there and right; None if there is none."""
        try:
            wire = pb.SnapshotOffer.FromString(self._offer.read_bytes())
            offer = standing_from_wire(wire.standing), describe_from_wire(wire.content, limits)
        except (OSError, DecodeError, ProtocolError):
            return None
        description, chunks = offer[1], 0
        try:
            for chunk in range(min(self.size // description.chunk_size, len(description.hashes))):
                await aside(_check, file, description, chunk)
                chunks = chunk + 1
        except AlteredBytesError:
            pass  # it was not on the disk when the machine went down
        return offer, chunks

    def begin(self, file: FileIO, standing: Standing, description: Description) -> None:
        """Chunks of this offer follow, from the first on."""
        wire = pb.SnapshotOffer(standing=standing_to_wire(standing), content=describe_to_wire(description))
        with disk_errors(self.path):
            self._offer.unlink(missing_ok=True)
            file.truncate(0)
        write_whole(self._offer, wire.SerializeToString())

    def remove(self) -> None:
        for one in (self.path, self._offer):
            one.unlink(missing_ok=True)

    def finish(self) -> None:
        """It is whole."""
        finish(self.path, self._into)


def finish(partial: Path, into: Path) -> None:
    """On the disk first, under its name second."""
    with disk_errors(into):
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(into)
        sync_folder(into.parent)


def store(file: FileIO, description: Description, index: int, content: memoryview) -> None:
    """Put chunk `index` in its place, if it has its hash: AlteredBytesError."""
    check_chunk(description, index, content)
    start, _ = description.span(index)
    with disk_errors(Path(file.name)):
        while len(content):
            count = os.pwrite(file.fileno(), content, start)
            content, start = content[count:], start + count


def furthest(into: Path) -> int:
    """Bytes of the largest part that is there for `into`."""
    return max((path.stat().st_size for path in _parts(into)), default=0)


def keep_furthest(into: Path) -> None:
    """Remove the others."""
    for path in sorted(_parts(into), key=lambda path: path.stat().st_size)[:-1]:
        _remove(path)


def forget(into: Path) -> None:
    """Remove all parts."""
    for end in (PARTIAL, _OFFER):
        for path in into.parent.glob(f"{into.name}.*{end}"):
            path.unlink(missing_ok=True)


def _parts(into: Path) -> list[Path]:
    return list(into.parent.glob(f"{into.name}.*{PARTIAL}"))


def _remove(path: Path) -> None:
    for one in (path, path.with_suffix(_OFFER)):
        one.unlink(missing_ok=True)


def _check(file: FileIO, description: Description, index: int) -> None:
    start, length = description.span(index)
    check_chunk(description, index, memoryview(os.pread(file.fileno(), length, start)))


def private(path: str, flags: int) -> int:
    """Open a file that is made if it is not there, for this user alone."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
