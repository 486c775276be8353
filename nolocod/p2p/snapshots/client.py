"""Weights for newcomers, the newcomer's side: ask for chunks, check each, go on where it broke off.

The rule: the newcomer drives. What it has verified of a snapshot stays verified; a broken stream costs
a redial, a donor that fails costs a look at the next one. The file appears under its name only when it
is whole and on the disk.
"""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from nolocod.disk import disk_errors, sync_folder
from nolocod.errors import (
    DiskFullError,
    NoDonorError,
    PeerBusyError,
    PeerTooSlowError,
    PeerUnavailableError,
    ProtocolError,
    RefusedError,
    RemoteError,
)
from nolocod.identity import short
from nolocod.observe.events import Emit, Event, WeightsFetched
from nolocod.p2p.exchange.context import redial_pauses
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import check_chunk, describe_from_wire
from nolocod.proto.envelope import Dialogue, readable, standing_from_wire
from nolocod.proto.snapshot_states import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.transport.stream import Dial
    from nolocod.proto.types import Description, Standing

_SOONEST = 0.25
"""Seconds for which a busy donor is left alone, at least."""


class GoneError(RefusedError):
    """The donor no longer keeps the snapshot that we have a part of."""


@dataclass(frozen=True)
class Fetched:
    """A whole, verified snapshot at `path`, as `donor` described it."""

    path: Path
    standing: Standing
    donor: PeerId
    size: int
    seconds: float


class DonorStream:
    """One stream to a donor, over which a newcomer asks."""

    def __init__(self, context: Context, channel: Channel) -> None:
        self._context = context
        self._channel = channel
        self._dialogue = Dialogue(context.identity, context.run_id, channel.remote, context.rng.randbytes(16))
        self._service = Service("newcomer", channel.remote)

    async def describe(self) -> tuple[Standing, Description]:
        """What the donor has and signs for. Raises PeerBusyError or RefusedError if it gives nothing."""
        limits = self._context.limits
        await self._ask("snapshot_request", pb.Body(snapshot_request=pb.SnapshotRequest()))
        with deadline(limits.offer_seconds, "a snapshot"):
            while (body := self._take(await self._channel.receive_envelope())).HasField("working"):
                pass
        if not body.HasField("snapshot_offer"):
            raise _declined(body, RefusedError)
        offer = body.snapshot_offer
        description = describe_from_wire(offer.content, limits)
        if offer.id != description.root:
            raise ProtocolError("a snapshot is not named by its content.")
        return standing_from_wire(offer.standing), description

    async def fetch(self, description: Description, first: int, count: int, file: FileIO) -> AsyncIterator[int]:
        """Ask for `count` chunks from `first` on; each is told once it is checked and in its place in `file`."""
        chunks, end = len(description.hashes), first + count
        request = pb.ChunkRequest(id=description.root, first=first, count=count)
        buffer = memoryview(bytearray(min(description.chunk_size, description.size)))
        await self._ask("chunk_request", pb.Body(chunk_request=request))
        for index in range(first, end):
            with deadline(self._context.limits.chunk_seconds, "a chunk"):
                content = await self._chunk(description, index, buffer)
                await self._context.aside(_store, description, index, content, file)
            self._service.step("<chunk")
            if index == end - 1:
                self._service.step("<last chunk of a request" if end < chunks else "<last chunk")
            yield index

    async def _chunk(self, description: Description, index: int, buffer: memoryview) -> memoryview:
        """Chunk `index`, which is due, not checked yet."""
        frame = await self._channel.receive()
        if isinstance(frame, bytes):
            raise _declined(self._take(frame), GoneError)
        _, length = description.span(index)
        if (frame.index, frame.length) != (index, length):
            raise ProtocolError(f"chunk {frame.index} of {frame.length} bytes came where {index} of {length} was due.")
        await self._channel.read_into(buffer[:length])
        return buffer[:length]

    async def _ask(self, name: str, body: pb.Body) -> None:
        self._service.step(f">{name}")
        await self._channel.send_envelope(self._dialogue.seal(body))

    def _take(self, raw: bytes) -> pb.Body:
        """ProtocolError unless this message may come now."""
        body = self._dialogue.open(raw)
        self._service.step(f"<{body.WhichOneof('content') or 'an unknown message'}")
        return body


@asynccontextmanager
async def open_donor_stream(context: Context, dial: Dial, donor: PeerId) -> AsyncIterator[DonorStream]:
    with deadline(context.limits.dial_seconds, "the dial"):
        channel = Channel(await dial(donor, SNAPSHOT), context.limits)
    try:
        yield DonorStream(context, channel)
        await channel.close()
    except BaseException:
        await channel.reset()
        raise


def _store(description: Description, index: int, content: memoryview, file: FileIO) -> None:
    check_chunk(description, index, content)
    start, _ = description.span(index)
    with disk_errors(Path(file.name)):
        while len(content):
            count = os.pwrite(file.fileno(), content, start)
            content, start = content[count:], start + count


def _declined(body: pb.Body, refused: type[RefusedError]) -> RemoteError:
    """A donor's Busy or Refuse as an error."""
    if body.HasField("busy"):
        return PeerBusyError(readable(body.busy.reason), retry_after=body.busy.retry_after_ms / 1000)
    return refused(readable(body.refuse.reason))


def _untold(event: Event) -> None:
    """For callers that report what is `Fetched` themselves."""


async def fetch_snapshot(
    context: Context,
    dial: Dial,
    donors: Sequence[PeerId] | Callable[[], Sequence[PeerId]],
    into: Path,
    emit: Emit = _untold,
    blame: Callable[[PeerId, RemoteError], None] = lambda _, __: None,
) -> Fetched:
    """Fetch the snapshot of the first donor that gives one whole, best first, into the file `into`.

    A callable is asked for the present donors before each choice; `blame` is told why one was left.
    Raises NoDonorError with every donor's reason, DiskFullError if the weights of all of them are too large, or DataDirError.
    """
    too_large: set[PeerId] = set()
    failed: dict[PeerId, str] = {}
    busy_until: dict[PeerId, float] = {}
    give_up = trio.current_time() + context.limits.busy_seconds
    while True:
        known = donors() if callable(donors) else donors
        candidates = [donor for donor in known if donor not in failed]
        if not candidates:
            if failed and too_large == failed.keys():
                raise DiskFullError(next(iter(failed.values())))
            reasons = "; ".join(f"{short(donor)}: {reason}" for donor, reason in failed.items())
            raise NoDonorError(f"none of {len(failed)} peers with weights gave them ({reasons or 'no peer is known'}).")
        donor = min(candidates, key=lambda donor: busy_until.get(donor, 0.0))  # the first of equals: the best
        await trio.sleep_until(min(busy_until.get(donor, 0.0), give_up))
        try:
            fetched = await _Download(context, dial, donor, into).run()
        except PeerBusyError as error:
            if trio.current_time() >= give_up:
                failed[donor] = error.cause
            busy_until[donor] = trio.current_time() + max(error.retry_after, _SOONEST)
        except DiskFullError as error:  # the size is that donor's word: it must not stop us alone
            failed[donor] = error.cause
            too_large.add(donor)
        except RemoteError as error:
            failed[donor] = error.cause
            blame(donor, error)
        else:
            emit(WeightsFetched(donor, fetched.standing.round, fetched.size, fetched.seconds))
            return fetched


class _Download:
    """One donor's snapshot, over as many streams as it takes."""

    def __init__(self, context: Context, dial: Dial, donor: PeerId, into: Path) -> None:
        self._context = context
        self._limits = context.limits
        self._dial = dial
        self._donor = donor
        self._into = into
        self._partial = into.with_name(into.name + ".partial")
        self._offer: tuple[Standing, Description] | None = None
        self._next = 0
        self._scope = trio.CancelScope()  # has a deadline once the size is known

    async def run(self) -> Fetched:
        started = trio.current_time()
        with disk_errors(self._partial):
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(self._partial, "w", opener=_private)
        try:
            with self._scope:
                standing, description = await self._download(file)
            if self._scope.cancelled_caught:
                raise PeerTooSlowError(f"{short(self._donor)} sends too slowly.")
            await self._context.aside(self._finish, file)
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise
        finally:
            file.close()
        return Fetched(self._into, standing, self._donor, description.size, trio.current_time() - started)

    async def _download(self, file: FileIO) -> tuple[Standing, Description]:
        tries, pauses = 0, redial_pauses()
        while True:
            before = self._next
            try:
                return await self._one_stream(file)
            except (PeerUnavailableError, PeerTooSlowError, GoneError) as error:
                if self._next > before:
                    tries, pauses = 0, redial_pauses()
                tries += 1
                # with nothing gained yet, another donor may be the quicker way
                if tries > (self._limits.resumes if self._next else 1):
                    raise
                if isinstance(error, GoneError):
                    self._offer, self._next = None, 0
                await trio.sleep(next(pauses))
            except PeerBusyError as error:
                # our slot went to another newcomer while our stream was broken: the part is worth the wait
                tries += 1
                if self._offer is None or tries > self._limits.resumes:
                    raise
                await trio.sleep(error.retry_after)

    async def _one_stream(self, file: FileIO) -> tuple[Standing, Description]:
        async with open_donor_stream(self._context, self._dial, self._donor) as stream:
            if self._offer is None:
                self._offer = await stream.describe()
                self._check_room(self._offer[1].size)
            _, description = self._offer
            while left := len(description.hashes) - self._next:
                count = min(self._limits.chunks_per_request, left)
                async for index in stream.fetch(description, self._next, count, file):
                    self._next = index + 1
        return self._offer

    def _check_room(self, size: int) -> None:
        with disk_errors(self._partial):
            free = shutil.disk_usage(self._partial.parent).free
        if size > free:
            raise DiskFullError(f"{self._partial.parent} has {free} bytes free, the weights need {size}.")
        self._scope.deadline = trio.current_time() + self._limits.whole(size)

    def _finish(self, file: FileIO) -> None:
        """On the disk first, under its name second."""
        with disk_errors(self._into):
            os.fsync(file.fileno())
            self._partial.rename(self._into)
            sync_folder(self._into.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
