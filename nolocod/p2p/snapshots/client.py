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
from typing import TYPE_CHECKING

import trio

from nolocod.disk import disk_errors
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
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import check_chunk, describe_from_wire
from nolocod.proto.envelope import Dialogue, readable, standing_from_wire
from nolocod.proto.serving import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.transport.stream import Dial
    from nolocod.proto.limits import Limits
    from nolocod.proto.types import Description, Standing

_FIRST_PAUSE = 0.25
"""Seconds before the first redial; each pause is twice the one before."""


@dataclass(frozen=True)
class Fetched:
    """A whole, verified snapshot at `path`, as `donor` described it."""

    path: Path
    standing: Standing
    donor: PeerId
    size: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """One stream to a donor."""

    channel: Channel
    dialogue: Dialogue
    service: Service

    async def ask(self, **request: object) -> None:
        self.service.step(f">{next(iter(request))}")
        await self.channel.send_envelope(self.dialogue.seal(pb.Body(**request)))  # type: ignore[arg-type]  # one field by its own name

    def take(self, raw: bytes) -> pb.Body:
        """ProtocolError unless this message may come now."""
        body = self.dialogue.open(raw)
        self.service.step(f"<{body.WhichOneof('content') or 'an unknown message'}")
        return body

    async def described(self, limits: Limits) -> tuple[pb.SnapshotOffer, Description]:
        """What the donor has and signs for. Raises PeerBusyError or RefusedError if it gives nothing."""
        await self.ask(snapshot_request=pb.SnapshotRequest())
        with deadline(limits.offer_seconds, "a snapshot"):
            while (body := self.take(await self.channel.receive_envelope())).HasField("working"):
                pass
        if not body.HasField("snapshot_offer"):
            raise _no(body, RefusedError)
        offer = body.snapshot_offer
        description = describe_from_wire(offer.content, limits)
        if offer.id != description.root:
            raise ProtocolError("a snapshot is not named by its content.")
        standing_from_wire(offer.standing)  # raises for numbers beyond all measure
        return offer, description

    async def chunk(self, description: Description, index: int, buffer: bytearray) -> tuple[int, memoryview]:
        """Chunk `index`, which is due, into `buffer`, not checked yet; where it begins in the snapshot, and it."""
        frame = await self.channel.receive()
        if isinstance(frame, bytes):
            raise _no(self.take(frame), GoneError)
        start, length = description.span(index)
        if (frame.index, frame.length) != (index, length):
            raise ProtocolError(f"chunk {frame.index} of {frame.length} bytes came where {index} of {length} was due.")
        content = memoryview(buffer)[:length]
        await self.channel.read_into(content)
        return start, content


class GoneError(RefusedError):
    """The donor no longer keeps the snapshot that we have a part of."""


@asynccontextmanager
async def open_line(context: Context, dial: Dial, donor: PeerId) -> AsyncIterator[Line]:
    with deadline(context.limits.dial_seconds, "the dial"):
        channel = Channel(await dial(donor, SNAPSHOT), context.limits)
    try:
        dialogue = Dialogue(context.identity, context.run_id, donor, context.rng.randbytes(16))
        yield Line(channel, dialogue, Service("newcomer", donor))
        await channel.close()
    except BaseException:
        await channel.reset()
        raise


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
            raise NoDonorError(f"of {len(failed)} peers with weights none gave them ({reasons or 'none is known'}).")
        donor = min(candidates, key=lambda donor: busy_until.get(donor, 0.0))  # the first of equals: the best
        await trio.sleep_until(min(busy_until.get(donor, 0.0), give_up))
        try:
            return await _Download(context, dial, donor, into, emit).run()
        except PeerBusyError as error:
            if trio.current_time() >= give_up:
                failed[donor] = error.cause
            busy_until[donor] = trio.current_time() + max(error.retry_after, _FIRST_PAUSE)
        except DiskFullError as error:  # the size is that donor's word: it must not stop us alone
            failed[donor] = error.cause
            too_large.add(donor)
        except RemoteError as error:
            failed[donor] = error.cause
            blame(donor, error)


class _Download:
    """One donor's snapshot, over as many streams as it takes."""

    def __init__(self, context: Context, dial: Dial, donor: PeerId, into: Path, emit: Emit) -> None:
        self._context = context
        self._limits = context.limits
        self._dial = dial
        self._donor = donor
        self._into = into
        self._emit = emit
        self._partial = into.with_name(into.name + ".partial")
        self._offer: pb.SnapshotOffer | None = None
        self._description: Description | None = None
        self._next = 0
        self._scope = trio.CancelScope()  # has a deadline once the size is known

    async def run(self) -> Fetched:
        started = trio.current_time()
        with disk_errors(self._partial):
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with self._scope:
                description = await self._download(file)
            if self._scope.cancelled_caught:
                raise PeerTooSlowError(f"{short(self._donor)} sends too slowly.")
            await self._context.aside(self._finish, file)
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        if self._offer is None:
            raise AssertionError("a download without an offer")
        standing = standing_from_wire(self._offer.standing)
        seconds = trio.current_time() - started
        self._emit(WeightsFetched(self._donor, standing.round, description.size, seconds))
        return Fetched(self._into, standing, self._donor, description.size, seconds)

    async def _download(self, file: int) -> Description:
        tries, pause = 0, _FIRST_PAUSE
        while True:
            before = self._next
            try:
                return await self._one_stream(file)
            except (PeerUnavailableError, PeerTooSlowError, GoneError) as error:
                if self._next > before:
                    tries, pause = 0, _FIRST_PAUSE
                tries += 1
                # with nothing gained yet, another donor may be the quicker way
                if tries > (self._limits.resumes if self._next else 1):
                    raise
                if isinstance(error, GoneError):
                    self._offer, self._description, self._next = None, None, 0
                await trio.sleep(pause)
                pause *= 2
            except PeerBusyError as error:
                if self._description is None:
                    raise
                # our slot went to another newcomer while our stream was broken: the part is worth the wait
                tries += 1
                if tries > self._limits.resumes:
                    raise
                await trio.sleep(error.retry_after)

    async def _one_stream(self, file: int) -> Description:
        async with open_line(self._context, self._dial, self._donor) as line:
            if self._description is None:
                self._description = await self._ask(line)
            description = self._description
            buffer = bytearray(min(description.chunk_size, description.size))
            while self._next < len(description.hashes):
                await self._batch(line, description, file, buffer)
        return description

    async def _ask(self, line: Line) -> Description:
        self._offer, description = await line.described(self._limits)
        with disk_errors(self._partial):
            free = shutil.disk_usage(self._partial.parent).free
        if description.size > free:
            raise DiskFullError(f"{self._partial.parent} has {free} bytes free, the weights need {description.size}.")
        self._scope.deadline = trio.current_time() + self._limits.whole(description.size)
        return description

    async def _batch(self, line: Line, description: Description, file: int, buffer: bytearray) -> None:
        """Ask for the next chunks, and check and store each as it comes."""
        count = min(self._limits.chunks_per_request, len(description.hashes) - self._next)
        await line.ask(chunk_request=pb.ChunkRequest(id=description.root, first=self._next, count=count))
        for _ in range(count):
            with deadline(self._limits.chunk_seconds, "a chunk"):
                start, content = await line.chunk(description, self._next, buffer)
                await self._context.aside(self._store, file, start, content)
            self._next += 1
            line.service.step("<chunk")
        line.service.step("<last chunk of a request" if self._next < len(description.hashes) else "<last chunk")

    def _store(self, file: int, start: int, content: memoryview) -> None:
        if self._description is None:
            raise AssertionError("a chunk without a description")
        check_chunk(self._description, self._next, content)
        with disk_errors(self._partial):
            while len(content):
                count = os.pwrite(file, content, start)
                content, start = content[count:], start + count

    def _finish(self, file: int) -> None:
        """On the disk first, under its name second."""
        with disk_errors(self._into):
            os.fsync(file)
            self._partial.rename(self._into)
            folder = os.open(self._into.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _no(body: pb.Body, refused: type[RefusedError]) -> RemoteError:
    """A donor's Busy or Refuse as an error."""
    if body.HasField("busy"):
        return PeerBusyError(readable(body.busy.reason), retry_after=body.busy.retry_after_ms / 1000)
    return refused(readable(body.refuse.reason))
