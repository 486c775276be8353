"""Frames over a stream: what every driver of the protocol shares.

The rule: one frame at a time on a stream; a frame that was cut short makes the stream useless, and
then it is reset, never closed as if all had been said. A chunk goes from its place to its place.
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

import trio

from nolocod.errors import NolocodError, PeerTooSlowError, PeerUnavailableError, ProtocolError, RemoteError
from nolocod.proto.framing import HEAD_SIZE, ChunkHead, EnvelopeHead, chunk_head, envelope_head, parse_head
from nolocod.proto.limits import Limits
from nolocod.run.manifest import wire_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from nolocod.identity import Identity, PeerId
    from nolocod.p2p.transport.stream import Stream
    from nolocod.run.manifest import Sealed


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Aside(Protocol):
    """Does what blocks on a disk while this process goes on, and returns what came of it."""

    async def __call__(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T: ...


async def in_a_thread(work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    return await trio.to_thread.run_sync(work, *arguments)


@dataclass(frozen=True)
class Context:
    """Who this node is in its run. `box_size` is the size of the largest message; 0 until it is known."""

    identity: Identity
    run_id: str
    codec: str = ""
    box_size: int = 0
    limits: Limits = field(default_factory=Limits)
    fragments: int = 1
    staleness: int | None = None
    """Rounds that partners may be apart (manifest: `outer.staleness`)."""
    rng: random.Random = field(default_factory=random.SystemRandom)
    """Names sessions; a test passes its own."""
    aside: Aside = in_a_thread
    """The virtual clock does not wait for threads: what runs on it does such work at once."""

    @classmethod
    def of(cls, identity: Identity, sealed: Sealed, box_size: int = 0) -> Context:
        """`identity` in the run of `sealed`."""
        manifest = sealed.manifest
        outer = manifest.outer
        return cls(
            identity,
            sealed.run_id,
            wire_name(manifest.codec),
            box_size,
            fragments=outer.fragments,
            staleness=outer.staleness,
        )


class Channel:
    """Frames on one stream."""

    def __init__(self, stream: Stream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._lock = trio.Lock()
        self._torn = False
        self._spoke_at = trio.current_time()

    @property
    def remote(self) -> PeerId:
        return self._stream.remote

    @property
    def silent_since(self) -> float:
        return self._spoke_at

    async def send_envelope(self, raw: bytes) -> None:
        async with self._frame():
            await self._stream.write(envelope_head(len(raw)) + raw)

    async def send_chunk(self, index: int, content: memoryview) -> None:
        async with self._frame():
            await self._stream.write(chunk_head(index, len(content)))
            await self._stream.write(content)

    async def receive(self) -> bytes | ChunkHead:
        """Wait for a frame: an envelope is returned whole, of a chunk the head; the caller reads its content."""
        head = parse_head(await self._stream.read_exactly(HEAD_SIZE), self._limits)
        return await self._stream.read_exactly(head.length) if isinstance(head, EnvelopeHead) else head

    async def receive_envelope(self) -> bytes:
        """ProtocolError if a chunk comes."""
        frame = await self.receive()
        if isinstance(frame, ChunkHead):
            raise ProtocolError(f"chunk {frame.index} came where a message was due.")
        return frame

    async def read_into(self, view: memoryview) -> None:
        await self._stream.read_into(view)

    async def close(self) -> None:
        """Let go of the stream: in order if that is possible at once, or else by reset."""
        with self._moment() as scope, suppress(RemoteError):
            await (self._stream.reset() if self._torn else self._stream.close())
        if scope.cancelled_caught:
            await self.reset()

    async def reset(self) -> None:
        with self._moment(), suppress(RemoteError):
            await self._stream.reset()

    async def last_words(self, raw: bytes) -> None:
        """Send an envelope if that is possible within a moment, and close."""
        with self._moment(), suppress(RemoteError):
            await self.send_envelope(raw)
        await self.close()

    def _moment(self) -> trio.CancelScope:
        """For what is still to be done when all else is cancelled."""
        return trio.CancelScope(deadline=trio.current_time() + self._limits.abort_seconds, shield=True)

    @asynccontextmanager
    async def _frame(self) -> AsyncIterator[None]:
        async with self._lock:
            if self._torn:
                raise PeerUnavailableError("the stream was given up in the middle of a frame.")
            self._torn = True
            yield
            self._torn = False
            self._spoke_at = trio.current_time()


@contextmanager
def deadline(seconds: float, what: str, error: type[PeerTooSlowError] = PeerTooSlowError) -> Iterator[None]:
    """`error`("`what` ...") if the block takes longer."""
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise error(f"{what} took more than {seconds:.0f} s.")


async def together(main: Callable[[], Awaitable[None]], *helpers: Callable[[], Awaitable[None]]) -> None:
    """Run all at once until `main` returns, and cancel the rest; the first NolocodError of any ends all.

    It is raised as it is, not in a group.
    """
    failures: list[NolocodError] = []

    async def guard(scope: trio.CancelScope, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except NolocodError as error:
            failures.append(error)
            scope.cancel()
        if part is main:
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for part in (main, *helpers):
            nursery.start_soon(guard, nursery.cancel_scope, part)
    if failures:
        raise failures[0]


async def keep_alive(channel: Channel, working: Callable[[], bytes], every: float) -> None:
    """Send `working()` whenever nothing else was said for `every` seconds."""
    while True:
        due = channel.silent_since + every  # one sum: a difference may leave a wait too short for the clock to move on
        if trio.current_time() >= due:
            await channel.send_envelope(working())
        else:
            await trio.sleep_until(due)
