"""Weights for newcomers, the donor's side: a file on disk, served to several newcomers at once.

The rule: a snapshot is named by the hash of its content, and its file stays open while somebody may
still ask for it, so that a newer one in its place hurts nobody. An upload costs one chunk of memory; a
reader that makes no progress, or less than `Limits.whole` asks for, loses its slot. Identities are free, so slots are
shared by address group: where all are taken, who had its turn (`Limits.turn`) gives way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from nolocod.disk import disk_errors
from nolocod.errors import DataDirError, PeerBusyError, PeerTooSlowError, ProtocolError, RefusedError, RemoteError
from nolocod.identity import short
from nolocod.observe.events import WeightsServed
from nolocod.p2p.limits.newest import Newest
from nolocod.p2p.transport.channel import Channel, send_working
from nolocod.p2p.transport.deadlines import deadline, together
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import describe_to_wire
from nolocod.proto.envelope import Dialogue, open_envelope, standing_to_wire
from nolocod.proto.snapshot_states import Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.transport.stream import Stream
    from nolocod.proto.types import Description, Standing

_IDLE_KEPT = 2
"""Snapshots that stay open though nobody reads them now: a newcomer may come back after a broken stream."""
_RETRY_SECONDS = 10.0
"""What a newcomer is told when all slots are taken."""
_REMEMBERED = 3600.0
"""Seconds for which is known what an address group had of our slots."""
_GROUPS = 1024
"""Of which that is known: those that asked last."""


@dataclass(frozen=True)
class ServedSnapshot:
    """A file that newcomers may fetch. It may be unlinked, but not written to."""

    path: Path
    standing: Standing
    description: Description


class _Open:
    """A snapshot whose file is held open."""

    def __init__(self, snapshot: ServedSnapshot) -> None:
        self.standing = snapshot.standing
        self.description = snapshot.description
        self.id = snapshot.description.root
        self.readers = 0
        self._path = snapshot.path
        with disk_errors(snapshot.path):
            self._file = os.open(snapshot.path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` from byte `start` on."""
        with disk_errors(self._path):
            while len(into):
                count = os.preadv(self._file, [into], start)
                if count == 0:
                    raise DataDirError(f"{self._path} was cut short while it was served.")
                into, start = into[count:], start + count

    def close(self) -> None:
        os.close(self._file)


@dataclass
class _Had:
    """What the newcomers of one address group had of our slots since `since`."""

    since: float
    seconds: float = 0.0
    size: int = 0


@dataclass
class _Upload:
    """One newcomer's stream. `began`: when it had its slot, later by what it waited for our trainer."""

    channel: Channel
    dialogue: Dialogue
    service: Service
    began: float = field(default_factory=trio.current_time)
    open: _Open | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Has a deadline once it is known what is uploaded."""
    size: int = 0
    whole: bool = False


class Donor:
    """Serves SNAPSHOT streams. `snapshot` gives the present one; PeerBusyError of it is told to the newcomer.

    `origin` tells the address group of a peer, its own id where it has none, and whether it is verified. `pinned` gives the
    file of a root hash that the manifest pins; PeerBusyError while it is not here.
    """

    def __init__(
        self,
        context: Context,
        snapshot: Callable[[], Awaitable[ServedSnapshot]],
        max_uploads: int,
        emit: Emit,
        origin: Callable[[PeerId], tuple[str, bool]] = lambda peer: (peer, False),
        pinned: Callable[[bytes], ServedSnapshot] | None = None,
    ) -> None:
        self._context = context
        self._limits = context.limits
        self._snapshot = snapshot
        self._max_uploads = max_uploads
        self._emit = emit
        self._uploads: dict[PeerId, _Upload] = {}
        self._open: dict[bytes, _Open] = {}
        self._origin = origin
        self._pinned = pinned
        self._had = Newest[str, _Had](_GROUPS)
        self._whole = 0  # bytes of the last snapshot: all of a run have nearly the same

    async def handle(self, stream: Stream) -> None:
        """Serve one newcomer until it closes. Raises RemoteError for a peer's fault, LocalError for ours."""
        channel = Channel(stream, self._limits)
        body = await self._first(channel)
        dialogue = Dialogue(self._context.identity, self._context.run_id, channel.remote, body.session)
        dialogue.admit(body)
        if (before := self._uploads.pop(channel.remote, None)) is not None:
            before.scope.cancel()  # a newcomer has one slot: where it comes again, its stream was broken
        service = Service("donor", channel.remote)
        if len(self._uploads) >= self._max_uploads and not self._make_room(channel.remote):
            service.step(">busy")
            await channel.last_words(dialogue.seal(pb.Body(busy=_busy(_RETRY_SECONDS, "all upload slots are taken"))))
            return
        upload = _Upload(channel, dialogue, service)
        started = upload.began
        self._uploads[channel.remote] = upload
        try:
            with upload.scope:
                await self._serve(upload, body)
            if upload.scope.cancelled_caught:
                raise PeerTooSlowError(f"{short(channel.remote)} fetches too slowly, or had its turn.")
        finally:
            had = self._account(channel.remote)
            had.seconds += max(trio.current_time() - upload.began, 0.0)
            had.size += upload.size
            if self._uploads.get(channel.remote) is upload:
                del self._uploads[channel.remote]
            self._let_go(upload)
            if upload.size:
                seconds = trio.current_time() - started
                self._emit(WeightsServed(channel.remote, upload.size, seconds, upload.whole))

    # --- who has a slot ---------------------------------------------------------------------------------

    def _make_room(self, newcomer: PeerId) -> bool:
        """End an upload for a newcomer with a better claim to its slot; False if there is none."""
        claims = {peer: self._claim(peer) for peer in self._uploads}
        worst = max(claims.values())
        if self._claim(newcomer) >= worst:
            return False
        loser = self._context.rng.choice([peer for peer, claim in claims.items() if claim == worst])
        self._uploads.pop(loser).scope.cancel()
        return True

    def _claim(self, peer: PeerId) -> tuple[bool, bool, bool]:
        """How good a claim to a slot is; the lowest is the best: its address group has not had its turn, has no other slot,
        and it is verified."""
        group, verified = self._origin(peer)
        had, now = self._account(peer), trio.current_time()
        uploads = {other: upload for other, upload in self._uploads.items() if self._origin(other)[0] == group}
        seconds = had.seconds + sum(now - upload.began for upload in uploads.values())
        size = had.size + sum(upload.size for upload in uploads.values())
        turn_over = seconds > self._limits.turn(min(size, self._whole))
        return turn_over, bool(uploads.keys() - {peer}), not verified

    def _account(self, peer: PeerId) -> _Had:
        group, now = self._origin(peer)[0], trio.current_time()
        had = self._had.get(group)
        if had is None or now > had.since + _REMEMBERED:
            had = _Had(now)
        self._had[group] = had
        return had

    def close(self) -> None:
        """Close the files. No upload may be under way."""
        for snapshot in self._open.values():
            snapshot.close()
        self._open.clear()

    async def _first(self, channel: Channel) -> pb.Body:
        with deadline(self._limits.accept_seconds, "the first message"):
            raw = await channel.receive_envelope()
        own = self._context.identity.peer_id
        return open_envelope(raw, run_id=self._context.run_id, receiver=own, remote=channel.remote)

    async def _serve(self, upload: _Upload, body: pb.Body) -> None:
        """Answer one request after another; the newcomer's end of stream ends it."""
        buffer = bytearray(0)
        while True:
            name = body.WhichOneof("content") or "an unknown message"
            upload.service.step(f"<{name}")
            match name:
                case "snapshot_request":
                    if not await self._offer(upload, body.snapshot_request.id):
                        return
                case "chunk_request":
                    if not self._bind(upload, body.chunk_request.id):
                        upload.service.step(">refuse")
                        refuse = pb.Refuse(code=RefusedError.entry.code, reason="this snapshot is no longer kept")
                        await self._say(upload, pb.Body(refuse=refuse))
                    else:
                        buffer = buffer or bytearray(_bound(upload).description.chunk_size)
                        await self._send_chunks(upload, body.chunk_request, buffer)
            try:
                with deadline(self._limits.chunk_seconds, "the next request"):
                    raw = await upload.channel.receive_envelope()
            except RemoteError:
                if upload.whole:
                    return  # it has what it wanted
                raise
            body = upload.dialogue.open(raw)

    async def _offer(self, upload: _Upload, root: bytes) -> bool:
        """Describe the present snapshot, or the pinned file `root`; False if there is none now, after saying so."""

        async def get() -> None:
            asked = trio.current_time()
            # the trainer that writes it has a deadline
            snapshot = self._pinned(root) if root and self._pinned else await self._snapshot()
            upload.began += trio.current_time() - asked
            self._whole = max(self._whole, snapshot.description.size) if root else snapshot.description.size
            self._let_go(upload)
            self._bind(upload, self._keep(snapshot).id)  # at once: a newer one may take its file's place

        working = partial(upload.dialogue.seal, pb.Body(working=pb.Working()))
        try:
            await together(get, partial(send_working, upload.channel, working, self._limits.working_seconds))
        except PeerBusyError as error:
            upload.service.step(">busy")
            await upload.channel.last_words(upload.dialogue.seal(pb.Body(busy=_busy(error.retry_after, error.cause))))
            return False
        kept = _bound(upload)
        offer = pb.SnapshotOffer(
            standing=standing_to_wire(kept.standing), content=describe_to_wire(kept.description), id=kept.id
        )
        upload.service.step(">snapshot_offer")
        await self._say(upload, pb.Body(snapshot_offer=offer))
        return True

    async def _send_chunks(self, upload: _Upload, request: pb.ChunkRequest, buffer: bytearray) -> None:
        snapshot = _bound(upload)
        description = snapshot.description
        chunks = len(description.hashes)
        end = request.first + request.count
        if not 0 < request.count <= self._limits.chunks_per_request or end > chunks:
            raise ProtocolError(f"chunks {request.first} to {end} were asked for, of {chunks}.")
        for index in range(request.first, end):
            start, length = description.span(index)
            with memoryview(buffer)[:length] as content:
                await self._context.aside(snapshot.read, start, content)
                with deadline(self._limits.chunk_seconds, "a chunk"):
                    await upload.channel.send_chunk(index, content)
            upload.size += length
            upload.service.step(">chunk")
        upload.whole = end == chunks
        upload.service.step(">last chunk" if upload.whole else ">last chunk of a request")

    async def _say(self, upload: _Upload, body: pb.Body) -> None:
        with deadline(self._limits.chunk_seconds, "a message"):
            await upload.channel.send_envelope(await self._context.aside(upload.dialogue.seal, body))

    # --- open files -----------------------------------------------------------------------------------

    def _keep(self, snapshot: ServedSnapshot) -> _Open:
        """Hold the file open, and let go of those that nobody reads, the oldest first."""
        if (kept := self._open.get(snapshot.description.root)) is None:
            kept = _Open(snapshot)
            self._open[kept.id] = kept
        idle = [known for known in self._open.values() if not known.readers and known is not kept]
        for known in idle[: max(0, len(idle) - _IDLE_KEPT + 1)]:
            self._open.pop(known.id).close()
        return kept

    def _bind(self, upload: _Upload, name: bytes) -> bool:
        """Have `upload` read snapshot `name`; False if it is not kept."""
        if (snapshot := self._open.get(name)) is None:
            return False
        if upload.open is not snapshot:
            self._let_go(upload)
            snapshot.readers += 1
            upload.open = snapshot
            upload.scope.deadline = trio.current_time() + self._limits.whole(snapshot.description.size)
        return True

    def _let_go(self, upload: _Upload) -> None:
        if upload.open is not None:
            upload.open.readers -= 1
            upload.open = None


def _bound(upload: _Upload) -> _Open:
    if upload.open is None:
        raise AssertionError("an upload without a snapshot")
    return upload.open


def _busy(retry_after: float, reason: str) -> pb.Busy:
    return pb.Busy(retry_after_ms=max(0, int(retry_after * 1000)), reason=reason)
