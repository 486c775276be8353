"""Weights for newcomers, the newcomer's side: ask for chunks, check each, go on where it broke off.

The rule: the newcomer drives. It knows how large the run's weights are, and no donor's word changes how long it waits.
A transfer ends for lack of progress only, and what was verified stays so (partial.py): a broken stream costs a redial.
Replicas differ, so a snapshot comes from one donor as a whole; beside one that is slow others are asked. The file appears
under its name only when it is whole and on the disk.
"""

from __future__ import annotations

import math
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from nolocod import errors
from nolocod.disk import disk_errors
from nolocod.identity import short
from nolocod.p2p.exchange.context import redial_pauses
from nolocod.p2p.snapshots.partial import Partial, forget, furthest, keep_furthest, store
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.deadlines import deadline, reset_unless_done
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import describe_from_wire
from nolocod.proto.envelope import Dialogue, readable, standing_from_wire
from nolocod.proto.snapshot_states import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from io import FileIO
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.transport.stream import Dial
    from nolocod.proto.limits import Limits
    from nolocod.proto.types import Description, Standing

    Blame = Callable[[PeerId, errors.RemoteError], None]
    Tell = Callable[[PeerId, int], None]

_SOONEST = 0.25
"""Seconds for which a busy donor is left alone, at least."""
_LOOK = 10.0
"""Seconds from one look at the donors' rates to the next."""
_AT_ONCE = 4
"""Donors that are asked at the same time, at most. Two give: the others have not begun yet."""
_SLICE = 64 << 10
"""Bytes after which what came of a chunk is counted."""
ROOM = 4096
"""Bytes by which honest snapshots of one run differ, at most: their heads name the round."""


class GoneError(errors.RefusedError):
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
        self.came = 0
        """Bytes of chunks, checked or not."""

    async def describe(self, size: int, root: bytes = b"") -> tuple[Standing, Description]:
        """What the donor has and signs for: its weights, or the file with the root hash `root`.

        Raises PeerBusyError or RefusedError if it gives nothing of `size` bytes.
        """
        limits = self._context.limits
        await self._ask("snapshot_request", pb.Body(snapshot_request=pb.SnapshotRequest(id=root)))
        with deadline(limits.written(size), "a snapshot"):
            while (body := await self._next()).HasField("working"):
                pass
        if not body.HasField("snapshot_offer"):
            raise _declined(body, errors.RefusedError)
        offer = body.snapshot_offer
        description = await self._context.aside(_described, offer, root, limits)
        if abs(description.size - size) > ROOM:
            raise errors.RefusedError(
                f"{short(self._channel.remote)} has weights of {description.size} bytes where {size} are due."
            )
        return standing_from_wire(offer.standing), description

    async def _next(self) -> pb.Body:
        raw = await self._channel.receive_envelope(self._service.most)
        return await self._context.aside(self._take, raw)  # an offer may have the hashes of 120 000 chunks

    async def fetch(self, description: Description, first: int, count: int, file: FileIO) -> AsyncIterator[int]:
        """Ask for `count` chunks from `first` on; each is told once it is checked and in its place in `file`."""
        chunks, end = len(description.hashes), first + count
        request = pb.ChunkRequest(id=description.root, first=first, count=count)
        buffer = memoryview(bytearray(min(description.chunk_size, description.size)))
        await self._ask("chunk_request", pb.Body(chunk_request=request))
        for index in range(first, end):
            with deadline(self._context.limits.chunk_seconds, "a chunk"):
                content = await self._chunk(description, index, buffer)
                await self._context.aside(store, file, description, index, content)
            self._service.step("<chunk")
            if index == end - 1:
                self._service.step("<last chunk of a request" if end < chunks else "<last chunk")
            yield index

    async def _chunk(self, description: Description, index: int, buffer: memoryview) -> memoryview:
        """Chunk `index`, which is due, not checked yet."""
        frame = await self._channel.receive(self._service.most)
        if isinstance(frame, bytes):
            raise _declined(self._take(frame), GoneError)
        _, length = description.span(index)
        if (frame.index, frame.length) != (index, length):
            raise errors.ProtocolError(f"chunk {frame.index} of {frame.length} bytes came where {index} of {length} was due.")
        for start in range(0, length, _SLICE):
            part = buffer[start : min(start + _SLICE, length)]
            await self._channel.read_into(part)
            self.came += len(part)
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
    async with reset_unless_done(channel.reset):
        yield DonorStream(context, channel)
        await channel.close()


def _described(offer: pb.SnapshotOffer, root: bytes, limits: Limits) -> Description:
    """What an offer tells of its file; ProtocolError unless the name is of its content, and is `root` if one was asked for."""
    description = describe_from_wire(offer.content, limits)
    if offer.id != description.root:
        raise errors.ProtocolError("a snapshot is not named by its content.")
    if root and offer.id != root:
        raise errors.ProtocolError("another file was offered than was asked for.")
    return description


def _declined(body: pb.Body, refused: type[errors.RefusedError]) -> errors.RemoteError:
    """A donor's Busy or Refuse as an error."""
    if body.HasField("busy"):
        return errors.PeerBusyError(readable(body.busy.reason), retry_after=body.busy.retry_after_ms / 1000)
    return refused(readable(body.refuse.reason))


async def fetch_snapshot(
    context: Context,
    dial: Dial,
    donors: Sequence[PeerId],
    into: Path,
    size: int,
    blame: Blame = lambda _, __: None,
    tell: Tell = lambda _, __: None,
) -> Fetched:
    """Fetch the snapshot of one of `donors`, best first, whole into the file `into`; `size` is that of the run's weights.

    `blame` is told why one was left; `tell`, at each look, how many bytes are here of the donor who is furthest. Raises
    NoDonorError with every donor's reason, DiskFullError or DataDirError; what came stays for the next try.
    """
    with disk_errors(into):
        into.parent.mkdir(parents=True, exist_ok=True)
        keep_furthest(into)  # of a process that was killed
        if size > (room := shutil.disk_usage(into.parent).free + furthest(into)):
            raise errors.DiskFullError(f"{into.parent} has {room} bytes free, the weights need {size}.")
    parts = {donor: Partial(into, donor) for donor in donors}
    donors = sorted(donors, key=lambda donor: -parts[donor].size)  # of equals the best first, as given
    race = _Race(lambda donor: _Download(context, dial, donor, (parts[donor], size)), context.limits.busy(size), tell)
    try:
        async with trio.open_nursery() as nursery:
            outcome = await race.run(nursery, donors, blame)
            nursery.cancel_scope.cancel()
        if isinstance(outcome, errors.NolocodError):
            raise outcome
        await context.aside(parts[outcome.donor].finish)
        forget(into)
        return replace(outcome, path=into)
    finally:
        keep_furthest(into)


class _Race:
    """Downloads beside each other, of which the first that is whole is taken.

    A donor that gives at `Limits.pace` is left alone. As long as none does, one more is asked at each look, and of those
    that gave for long enough to tell only that goes on which would be whole first.
    """

    def __init__(self, download: Callable[[PeerId], _Download], busy_seconds: float, tell: Tell) -> None:
        """Who is busy for `busy_seconds`, since somebody gave something, has failed."""
        self._download = download
        self._busy_seconds = busy_seconds
        self._tell_progress = tell
        self._gained = trio.current_time()
        self._lanes: dict[PeerId, _Download] = {}
        self._slower: set[PeerId] = set()  # than another, which goes on
        self._tell: trio.MemorySendChannel[tuple[PeerId, Fetched | errors.NolocodError]]
        self._told: trio.MemoryReceiveChannel[tuple[PeerId, Fetched | errors.NolocodError]]
        self._tell, self._told = trio.open_memory_channel(math.inf)

    async def run(self, nursery: trio.Nursery, donors: Sequence[PeerId], blame: Blame) -> Fetched | errors.NolocodError:
        """The first that is whole, in its partial file, or why there is none."""
        failed: dict[PeerId, str] = {}
        due = dict.fromkeys(donors, 0.0)  # when each may be asked
        look, another = trio.current_time() + _LOOK, False
        while len(failed) < len(due):
            idle = [donor for donor in due if donor not in failed and donor not in self._lanes]
            fresh = [donor for donor in idle if donor not in self._slower]
            donor = min(fresh if self._lanes else fresh or idle, key=lambda one: due[one], default=None)  # of equals the first
            wake = look
            if donor is not None and (another or not self._lanes):
                if due[donor] <= trio.current_time():
                    self._start(nursery, donor)
                    another = False
                else:
                    wake = min(look, due[donor])
            with trio.move_on_at(wake):
                donor, outcome = await self._told.receive()
                another = True
                self._gained = max(self._gained, self._lanes.pop(donor).gained)
                give_up = self._gained + self._busy_seconds
                if not isinstance(outcome, errors.RemoteError):
                    return outcome
                if isinstance(outcome, errors.PeerBusyError) and trio.current_time() < give_up:
                    due[donor] = min(trio.current_time() + max(outcome.retry_after, _SOONEST), give_up)
                elif donor not in self._slower:
                    failed[donor] = outcome.cause
                    blame(donor, outcome)
            if trio.current_time() >= look:
                look, another = trio.current_time() + _LOOK, self._compare()
        reasons = "; ".join(f"{short(donor)}: {reason}" for donor, reason in failed.items())
        return errors.NoDonorError(f"none of {len(failed)} peers with weights gave them ({reasons or 'no peer is known'}).")

    def _start(self, nursery: trio.Nursery, donor: PeerId) -> None:
        download = self._lanes[donor] = self._download(donor)
        self._slower.discard(donor)

        async def run() -> None:
            outcome: Fetched | errors.NolocodError
            try:
                outcome = await download.run()
            except errors.NolocodError as error:
                outcome = error
            self._tell.send_nowait((donor, outcome))

        nursery.start_soon(run)

    def _compare(self) -> bool:
        """Stop those that are slower than another; whether one more is to be asked."""
        for lane in self._lanes.values():
            lane.look()
        if self._lanes:
            donor = max(self._lanes, key=lambda donor: self._lanes[donor].here)
            self._tell_progress(donor, self._lanes[donor].here)
        well = [donor for donor, lane in self._lanes.items() if lane.well]
        giving = {donor: lane.left for donor, lane in self._lanes.items() if lane.left is not None}
        best = min(well or giving, key=lambda donor: giving.get(donor, math.inf), default=None)
        for donor in (self._lanes if well else giving).keys() - {best}:
            self._slower.add(donor)
            self._lanes[donor].scope.cancel()
        return not well and len(self._lanes) < _AT_ONCE


class _Download:
    """One donor's snapshot, over as many streams as it takes."""

    def __init__(self, context: Context, dial: Dial, donor: PeerId, wanted: tuple[Partial, int]) -> None:
        self._context = context
        self._limits = context.limits
        self._dial = dial
        self._donor = donor
        self._partial, self._size = wanted
        self._offer: tuple[Standing, Description] | None = None
        self._next = 0
        self._stream: DonorStream | None = None
        self._seen = 0.0, 0  # when somebody looked last, or the offer came, and what had come until then
        self.well = False
        """At the last look it gave at the pace that is due."""
        self.left: float | None = None
        """Seconds that the rest would take from then on; None if it has not given for long enough to tell."""
        self.gained = -math.inf
        """When a chunk came last."""
        self.scope = trio.CancelScope()

    @property
    def here(self) -> int:
        """Bytes, those of the chunk that is under way not counted."""
        return 0 if self._offer is None else min(self._next * self._offer[1].chunk_size, self._size)

    def look(self) -> None:
        """Take note of the rate since the last look."""
        if self._stream is None or self._offer is None:
            return
        (since, before), now = self._seen, trio.current_time()
        rate = (self._stream.came - before) / max(now - since, 1e-3)
        self.well = rate >= self._limits.pace(self._size)
        if now - since >= _LOOK / 2:
            self.left = (self._size - self.here) / max(rate, 1e-3)
        self._seen = now, self._stream.came

    async def run(self) -> Fetched:
        started = trio.current_time()
        with self._partial.opened() as file:
            with self.scope:
                if (found := await self._partial.find(file, self._limits, self._context.aside)) is not None:
                    self._offer, self._next = found
                try:
                    standing, description = await self._download(file)
                except errors.ProtocolError:
                    self._partial.remove()  # nothing more of this donor is taken
                    raise
            if self.scope.cancelled_caught:
                raise errors.PeerTooSlowError(f"{short(self._donor)} gives more slowly than another.")
        return Fetched(self._partial.path, standing, self._donor, description.size, trio.current_time() - started)

    async def _download(self, file: FileIO) -> tuple[Standing, Description]:
        tries, pauses = 0, redial_pauses()
        while True:
            before = self._next
            try:
                return await self._one_stream(file)
            except (errors.PeerUnavailableError, errors.PeerTooSlowError, errors.PeerBusyError, GoneError) as error:
                if self._next > before:
                    tries, pauses = 0, redial_pauses()
                tries += 1
                busy = isinstance(error, errors.PeerBusyError)
                # with nothing gained yet, another donor may be the quicker way
                if tries > (self._limits.resumes if self._next else 1 - busy):
                    raise
                if isinstance(error, GoneError):
                    self._offer, self._next = None, 0
                # busy: our slot went to another newcomer while our stream was broken; the part is worth the wait
                await trio.sleep(error.retry_after if isinstance(error, errors.PeerBusyError) else next(pauses))

    async def _one_stream(self, file: FileIO) -> tuple[Standing, Description]:
        async with open_donor_stream(self._context, self._dial, self._donor) as stream:
            stream.came = self._stream.came if self._stream else 0
            first, self._stream = self._stream is None, stream
            if fresh := self._offer is None:
                self._offer = await stream.describe(self._size)
                await self._context.aside(self._partial.begin, file, *self._offer)
            if first or fresh:
                self._seen = trio.current_time(), stream.came
            _, description = self._offer
            while left := len(description.hashes) - self._next:
                count = min(self._limits.chunks_per_request, left)
                async for index in stream.fetch(description, self._next, count, file):
                    self._next, self.gained = index + 1, trio.current_time()
        return self._offer
