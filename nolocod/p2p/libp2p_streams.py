"""libp2p's streams as `streams.Stream`, and the one place where libp2p's exceptions become ours.

The rule: nothing that libp2p is doing on a connection is ever cancelled half-way. Its noise layer counts a
nonce before it sends, so that a cancelled send makes every later record of that connection unreadable.
Writes therefore run in the host's own task; whoever waits for one may be cancelled, the write may not, and
when it has to be given up, its connection is closed with it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio
from libp2p.exceptions import BaseLibp2pError, MultiError
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectCommunicatorError, MultiselectError
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey

from nolocod.errors import PeerTooSlowError, PeerUnavailableError, RefusedError, RemoteError
from nolocod.identity import short

if TYPE_CHECKING:
    from collections.abc import Iterator

    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream

    from nolocod.identity import PeerId

FOREIGN = (BaseLibp2pError, trio.BrokenResourceError, trio.ClosedResourceError, OSError, EOFError, ValueError)
"""What libp2p lets through for a failure of the other side (ValueError: a frame that makes no sense)."""

_PIECE = 65_519 - 12
"""Bytes per libp2p write: one yamux frame that fits one noise record, where 64 KiB would need two."""
_GRACE = 1.0
"""How long a cancelled write may take to end in order, in seconds."""


@contextmanager
def map_exceptions(peer: PeerId, doing: str, *, stranger: bool = False) -> Iterator[None]:
    """Turn libp2p's failures into ours; Cancelled and our own errors pass through.

    To a `stranger` there is no connection yet: it may be something else than a libp2p node.
    """
    try:
        yield
    except RemoteError:
        raise
    except trio.TooSlowError as error:
        raise PeerTooSlowError(f"{doing} with {short(peer)} made no progress.") from error
    except FOREIGN as error:
        raise _translate(peer, doing, error, stranger) from error


def _translate(peer: PeerId, doing: str, error: BaseException, stranger: bool) -> RemoteError:
    """Find the cause in the chain that people can act on."""
    for reason in _chain(error):
        match reason:
            case MultiselectClientError() if "not supported" in str(reason):
                return RefusedError(f"{short(peer)} does not know the protocol ({doing}).")
            case PeerIDMismatchesPubkey():
                return PeerUnavailableError(f"{doing}: another peer than {short(peer)} answers there.")
            case ConnectionRefusedError():
                return PeerUnavailableError(f"{doing}: connection refused.")
            case OSError(strerror=str(text)) if not isinstance(reason, EOFError):
                return PeerUnavailableError(f"{doing}: {text}.")
            case HandshakeFailure() | MultiselectError() | MultiselectCommunicatorError() if stranger:
                return PeerUnavailableError(f"{doing}: what answers there is no libp2p node.")
    return PeerUnavailableError(f"{doing} with {short(peer)}: {str(error) or type(error).__name__}.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what caused it, outermost first; of several causes the first."""
    while error is not None:
        yield error
        match error:
            case MultiError(errors=[first, *_]):
                error = first
            case BaseExceptionGroup():
                error = error.exceptions[0]
            case _:
                error = error.__cause__


def shielded(seconds: float) -> trio.CancelScope:
    """A scope that outer cancellation does not reach, for at most `seconds`."""
    return trio.CancelScope(deadline=trio.current_time() + seconds, shield=True)


async def abort(connection: SwarmConn) -> None:
    """Close a connection that may be corrupt: the socket first, so that nothing more is sent on it."""
    with shielded(_GRACE):
        with already_gone():
            await connection.muxed_conn.secured_conn.close()
        with already_gone():
            await connection.close()


@contextmanager
def already_gone() -> Iterator[None]:
    """For closing: a connection that is gone already is what we wanted."""
    try:
        yield
    except FOREIGN:
        return


class _Write:
    """One write under way in the host's task."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.abandoned = False
        self.error: RemoteError | None = None


class LibStream:
    """streams.Stream on a libp2p stream; `progress` is the deadline in seconds for any byte to move."""

    def __init__(self, raw: NetStream, remote: PeerId, nursery: trio.Nursery, progress: float) -> None:
        self._raw = raw
        self._remote = remote
        self._nursery = nursery
        self._progress = progress

    @property
    def remote(self) -> PeerId:
        return self._remote

    async def read_exactly(self, count: int) -> bytes:
        parts = []
        while count > 0:
            parts.append(await self._read_some(count))
            count -= len(parts[-1])
        return b"".join(parts)

    async def read_into(self, view: memoryview) -> None:
        start = 0
        while start < len(view):
            piece = await self._read_some(len(view) - start)
            view[start : start + len(piece)] = piece
            start += len(piece)

    async def _read_some(self, limit: int) -> bytes:
        with map_exceptions(self._remote, "reading"):
            with trio.fail_after(self._progress):
                await self._readable()
            # Taking bytes out may send a window update, which must not be cancelled either.
            with shielded(self._progress) as scope:
                piece: bytes = await self._raw.read(limit)
        if scope.cancelled_caught:
            await abort(self._raw.swarm_conn)
            raise PeerTooSlowError(f"{short(self._remote)} takes no bytes from us.")
        if not piece:
            raise PeerUnavailableError(f"{short(self._remote)} closed the stream early.")
        return piece

    async def _readable(self) -> None:
        """Wait until a read would return at once; may be cancelled without harm."""
        muxed = self._raw.muxed_stream
        connection, number = muxed.conn, muxed.stream_id
        while not (
            connection.stream_buffers.get(number)
            or muxed.recv_closed
            or muxed.reset_received
            or connection.event_shutting_down.is_set()
        ):
            event = connection.stream_events.get(number)
            if event is None:
                return
            if event.is_set():  # left over from bytes that were read meanwhile
                connection.stream_events[number] = event = trio.Event()
            await event.wait()

    async def write(self, data: bytes | memoryview) -> None:
        job = _Write()
        self._nursery.start_soon(self._send, memoryview(data).cast("B"), job)
        try:
            await job.done.wait()
        except trio.Cancelled:
            job.abandoned = True
            with shielded(_GRACE):
                await job.done.wait()
            if not job.done.is_set():
                job.scope.cancel()
                await abort(self._raw.swarm_conn)
            raise
        if job.error is not None:
            raise job.error

    async def _send(self, view: memoryview, job: _Write) -> None:
        job.error = PeerUnavailableError(f"writing to {short(self._remote)} was given up.")
        try:
            with job.scope, map_exceptions(self._remote, "writing"):
                start = 0
                while start < len(view) and not job.abandoned:
                    with trio.fail_after(self._progress):
                        await self._raw.write(bytes(view[start : start + _PIECE]))
                    start += _PIECE
                job.error = None
        except PeerTooSlowError as error:
            job.error = error
            await abort(self._raw.swarm_conn)
        except RemoteError as error:
            job.error = error
        finally:
            job.done.set()

    async def close(self) -> None:
        # NetStream.close only ends our side of a yamux stream; close_write would leave the stream in the
        # swarm's books for the connection's lifetime.
        with shielded(self._progress) as scope, map_exceptions(self._remote, "closing"):
            await self._raw.close()
        if scope.cancelled_caught:
            await abort(self._raw.swarm_conn)

    async def reset(self) -> None:
        with shielded(_GRACE) as scope, already_gone():
            await self._raw.reset()
        if scope.cancelled_caught:
            await abort(self._raw.swarm_conn)

    async def finish(self, patience: float) -> None:
        """End a stream that was served: close our side and wait up to `patience` seconds for the other's.

        A stream that only one side closed stays in the muxer's books for the connection's lifetime.
        """
        await self.close()
        with trio.move_on_after(patience):
            await self._readable()
        if not self._raw.muxed_stream.recv_closed:
            await self.reset()
