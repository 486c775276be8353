"""The seam where other libraries' exceptions become ours: what each means to a user.

The rule: whatever fails in a dial, a handshake, a negotiation or a stream is a RemoteError above this room, for the other
side chose the bytes. Cancelled, and what we raise ourselves, pass through.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
from libp2p.exceptions import BaseLibp2pError, MultiError
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectCommunicatorError, MultiselectError
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.tools.anyio_service import LifecycleError

from nolocod.errors import (
    LocalError,
    NolocodError,
    PeerNetworkKeyError,
    PeerNotAllowedError,
    PeerTooSlowError,
    PeerUnavailableError,
    RefusedError,
    RemoteError,
    first_error,
    on_one_line,
)
from nolocod.identity import short

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.identity import PeerId

logger = logging.getLogger(__name__)

FOREIGN = (Exception,)
"""What libp2p and the libraries below it let through for bytes that make no sense, or because our host is closing: anything."""
_OF_TRIO = (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError)
_USUAL = (BaseLibp2pError, OSError, EOFError, ValueError, LifecycleError, ExceptionGroup, *_OF_TRIO)
_MOST_WORDS = 200


@contextmanager
def map_exceptions(peer: PeerId, doing: str, *, unverified: bool = False) -> Iterator[None]:
    """Turn every failure into a RemoteError; Cancelled and our own errors pass through.

    `unverified`: there is no connection yet, and what answers may be no libp2p node.
    """
    try:
        yield
    except NolocodError:
        raise
    except Exception as error:  # the one place: see the rule
        for kind in (LocalError, NolocodError) if isinstance(error, ExceptionGroup) else ():
            if (ours := cast("ExceptionGroup[NolocodError]", error).subgroup(kind)) is not None:
                raise first_error(ours) from error
        if not isinstance(error, _USUAL):  # it may be a fault of ours
            logger.warning("%s with %s: %s", doing, short(peer), type(error).__name__, exc_info=error)
        raise _translate(peer, doing, error, unverified) from error
    except BaseExceptionGroup as group:  # some tasks failed as all were cancelled: only that goes on
        raise group.split(Exception)[1] or group from None


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
    return PeerUnavailableError(f"{doing} with {short(peer)}: {on_one_line(error, _MOST_WORDS) or type(error).__name__}.")


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


already_gone = partial(suppress, *FOREIGN)
"""For closing: a connection that is gone already is what we wanted."""


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
