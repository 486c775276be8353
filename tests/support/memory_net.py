"""A network in memory for driver tests: streams.Stream over trio's memory streams, breakable at any byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio
import trio.testing

from nolocod.errors import PeerTooSlowError, PeerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.p2p.transport.stream import Dial, Handler

PROGRESS = 15.0


@dataclass
class Cut:
    """Break the `stream`-th stream after `at` bytes that the dialler ("out") or the dialled ("in") sent."""

    stream: int
    direction: str
    at: int


class Line:
    """Both ends of one stream; `cut` breaks both at once, as a lost connection does."""

    def __init__(self, cuts: list[Cut]) -> None:
        self.sent = {"out": 0, "in": 0}
        self.log = {"out": bytearray(), "in": bytearray()}
        self.broken = trio.Event()
        self._cuts = cuts

    def allowance(self, direction: str) -> int | None:
        """Bytes that may still pass, if there is a cut in this direction."""
        ats = [cut.at for cut in self._cuts if cut.direction == direction]
        return min(ats) - self.sent[direction] if ats else None


class MemoryStream:
    """One end of a `Line`."""

    def __init__(self, raw: trio.StapledStream, remote: PeerId, line: Line, direction: str) -> None:
        self._raw = raw
        self._remote = remote
        self._line = line
        self._direction = direction
        self._buffer = bytearray()
        self.stuck = False

    @property
    def remote(self) -> PeerId:
        return self._remote

    async def read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._buffer += await self._some()
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def read_into(self, view: memoryview) -> None:
        view[:] = await self.read_exactly(len(view))

    async def _some(self) -> bytes:
        got = b""
        with trio.move_on_after(PROGRESS) as scope:
            try:
                got = await self._raw.receive_some(65536)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise PeerUnavailableError("the stream broke.") from error
        if scope.cancelled_caught:
            raise PeerTooSlowError("nothing came.")
        if not got:
            raise PeerUnavailableError("the stream ended.")
        return bytes(got)

    async def write(self, data: bytes | memoryview) -> None:
        allowance = self._line.allowance(self._direction)
        passing = bytes(data) if allowance is None else bytes(data[: max(0, allowance)])
        try:
            if self._line.broken.is_set():
                raise trio.BrokenResourceError
            if passing:
                await self._raw.send_all(passing)
            self._line.sent[self._direction] += len(passing)
            self._line.log[self._direction] += passing
            if allowance is not None and allowance <= len(data):
                self._line.broken.set()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerUnavailableError("the stream broke.") from error
        if len(passing) < len(data):
            raise PeerUnavailableError("the stream broke.")
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        await self._raw.send_stream.aclose()

    async def reset(self) -> None:
        self._line.broken.set()


@dataclass
class Net:
    """Who listens, and what goes wrong. `lines` are all streams in the order of their dials."""

    nursery: trio.Nursery
    cuts: list[Cut] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    handlers: dict[tuple[PeerId, str], Handler] = field(default_factory=dict)
    down: Callable[[PeerId], bool] = lambda _peer: False
    caught: list[BaseException] = field(default_factory=list)

    def dial(self, own: PeerId) -> Dial:
        async def dial(peer: PeerId, protocol: str) -> MemoryStream:
            await trio.lowlevel.checkpoint()
            handler = self.handlers.get((peer, protocol))
            if handler is None or self.down(peer):
                raise PeerUnavailableError("nobody answers.")
            line = Line([cut for cut in self.cuts if cut.stream in (len(self.lines), -1)])
            self.lines.append(line)
            near, far = trio.testing.memory_stream_pair()
            self.nursery.start_soon(self._breaking, line, near, far)
            self.nursery.start_soon(self._handle, handler, MemoryStream(far, own, line, "in"))
            return MemoryStream(near, peer, line, "out")

        return dial

    async def _handle(self, handler: Handler, stream: MemoryStream) -> None:
        try:
            await handler(stream)
            await stream.close()
        except PeerUnavailableError:
            pass
        except Exception as error:  # noqa: BLE001  # handed to the test
            self.caught.append(error)

    @staticmethod
    async def _breaking(line: Line, *ends: trio.StapledStream) -> None:
        await line.broken.wait()
        for end in ends:
            end.send_stream.close()  # what was sent still arrives; what was not never does
