"""libp2p's streams as `streams.Stream`, and the one place where libp2p's exceptions become ours.

The rule: what is read and written goes past libp2p's own stream to our muxer, which can be cancelled at any
time; opening, closing and the books are libp2p's.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio
from libp2p.exceptions import BaseLibp2pError, MultiError
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectCommunicatorError, MultiselectError
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.tools.anyio_service import LifecycleError

from nolocod.errors import (
    PeerNetworkKeyError,
    PeerNotAllowedError,
    PeerTooSlowError,
    PeerUnavailableError,
    RefusedError,
    RemoteError,
)
from nolocod.identity import short
from nolocod.p2p.transport.connection import origin_of
from nolocod.p2p.transport.multiaddrs import multiaddr_of
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from libp2p.network.stream.net_stream import NetStream

    from nolocod.identity import PeerId
    from nolocod.p2p.transport.connection import Origin
    from nolocod.p2p.transport.yamux_stream import YamuxStream

FOREIGN = (
    BaseLibp2pError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    OSError,
    EOFError,
    ValueError,
    LifecycleError,
)
"""What libp2p lets through for a failure of the other side (ValueError: a frame that makes no sense), or because our own host
is closing meanwhile (LifecycleError)."""


_RESET = 1.0
"""Seconds for libp2p's books; a reset itself waits for nothing."""


@contextmanager
def map_exceptions(peer: PeerId, doing: str, *, stranger: bool = False) -> Iterator[None]:
    """Turn libp2p's failures into ours; Cancelled and our own errors pass through.

    To a `stranger` there is no connection yet: it may be something else than a libp2p node.
    """
    try:
        yield
    except RemoteError:
        raise
    except (trio.TooSlowError, *FOREIGN) as error:
        raise _translate(peer, doing, error, stranger) from error


def _translate(peer: PeerId, doing: str, error: BaseException, stranger: bool) -> RemoteError:
    """Find the cause in the chain that people can act on."""
    ours = next((reason for reason in causes(error) if isinstance(reason, (PeerNetworkKeyError, PeerNotAllowedError))), None)
    if ours is not None:
        return type(ours)(f"{doing}: {ours.cause}")
    for reason in causes(error):
        match reason:
            case trio.TooSlowError():
                return PeerTooSlowError(f"{doing} with {short(peer)} made no progress.")
            case MuxedStreamEOF():
                return PeerUnavailableError(f"{short(peer)} closed the stream early.")
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


def causes(error: BaseException | None) -> Iterator[BaseException]:
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


@contextmanager
def already_gone() -> Iterator[None]:
    """For closing: a connection that is gone already is what we wanted."""
    try:
        yield
    except FOREIGN:
        return


class LibStream:
    """streams.Stream on a libp2p stream; `progress` is the deadline in seconds for any byte to move."""

    def __init__(self, raw: NetStream, remote: PeerId, progress: float) -> None:
        self._raw = raw
        # Past NetStream, which knows no deadlines and copies what it reads.
        self.muxed: YamuxStream = raw.muxed_stream
        self._remote = remote
        self._progress = progress

    @property
    def remote(self) -> PeerId:
        return self._remote

    @property
    def origin(self) -> Origin:
        """How the connection came about that the stream is on."""
        return origin_of(self._raw)

    @property
    def remote_address(self) -> str | None:
        """The multiaddr that the peer comes from; None through a relay."""
        found = None if self.origin.reach == "relayed" else self._raw.muxed_conn.secured_conn.get_remote_address()
        return multiaddr_of(Address(*found)) if found else None

    async def read_exactly(self, count: int) -> bytes:
        content = bytearray(count)
        await self.read_into(memoryview(content))
        return bytes(content)

    async def read_into(self, view: memoryview) -> None:
        with map_exceptions(self._remote, "reading"):
            await self.muxed.read_into(view.cast("B"), self._progress)

    async def read_available(self) -> bytearray:
        with map_exceptions(self._remote, "reading"):
            return await self.muxed.take(self._progress)

    async def write(self, data: bytes | memoryview) -> None:
        with map_exceptions(self._remote, "writing"):
            await self.muxed.write_all(data, self._progress)

    async def close(self) -> None:
        # NetStream.close only ends our side of a yamux stream; close_write would leave the stream in the
        # swarm's books for the connection's lifetime.
        with map_exceptions(self._remote, "closing"):
            await self._raw.close()

    async def reset(self) -> None:
        # Cancelled on its way, libp2p would keep the stream in its books for the connection's lifetime.
        with shielded(_RESET), already_gone():
            await self._raw.reset()

    async def finish(self, patience: float) -> None:
        """End a stream that was served: close our side and wait up to `patience` seconds for the other's.

        A stream that only one side closed stays in the muxer's books for the connection's lifetime.
        """
        await self.close()
        with trio.move_on_after(patience):
            await self.muxed.ended.wait()
        if not self.muxed.closed:
            await self.reset()
