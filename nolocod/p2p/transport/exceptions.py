"""Where libp2p's exceptions become ours: the one list of those that it lets through, and what each means to a user.

The rule: a failure of the other side is a RemoteError above this room; Cancelled passes through.
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.identity import PeerId

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


@contextmanager
def map_exceptions(peer: PeerId, doing: str, *, unverified: bool = False) -> Iterator[None]:
    """Turn libp2p's failures into ours; Cancelled and our own errors pass through.

    `unverified`: there is no connection yet, and what answers may be no libp2p node.
    """
    try:
        yield
    except RemoteError:
        raise
    except (trio.TooSlowError, *FOREIGN) as error:
        raise _translate(peer, doing, error, unverified) from error


def _translate(peer: PeerId, doing: str, error: BaseException, unverified: bool) -> RemoteError:
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
            case HandshakeFailure() | MultiselectError() | MultiselectCommunicatorError() if unverified:
                return PeerUnavailableError(f"{doing}: the program that answers there is not a libp2p node.")
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


@contextmanager
def already_gone() -> Iterator[None]:
    """For closing: a connection that is gone already is what we wanted."""
    try:
        yield
    except FOREIGN:
        return


def without_frames(error: Exception) -> Exception:
    """`error` without the frames that it and its causes came through.

    Who keeps an error keeps their locals, here the buffers of what was being read and sent; and the error, the connection
    and its streams hold each other, until a full garbage collection, which in a large process comes next to never.
    """
    left: list[BaseException] = [error]
    found = set()
    while left:
        one = left.pop()
        found.add(id(one))
        one.__traceback__ = None
        left += [other for other in (one.__cause__, one.__context__) if other is not None and id(other) not in found]
    return error
