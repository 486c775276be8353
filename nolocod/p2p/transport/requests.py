"""One question and one answer on a stream of their own: gossip and the run's information go this way.

The rule: a side that cannot take a message for its run or its version says so in a signed Refuse before it
gives the stream up, so that both users read the same cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from nolocod import errors
from nolocod.identity import Identity, short
from nolocod.p2p.transport.deadlines import deadline, reset_unless_done
from nolocod.p2p.transport.exceptions import map_exceptions
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import open_envelope, readable, seal
from nolocod.proto.framing import HEAD_SIZE, envelope_head, parse_head
from nolocod.proto.limits import most_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager

    from nolocod.p2p.transport.stream import Stream

T = TypeVar("T")

_LARGE = 256 << 10
"""Bytes of which a signature is checked in half a millisecond, and made in one."""
_LARGE_AT_ONCE = trio.CapacityLimiter(1)
_TOLD = (errors.OtherRunError, errors.PeerVersionError, errors.PeerNotInvitedError, errors.PeerInvitationOverError)
"""Refusals that are raised here as the peer raised them; a ban is one more."""


@dataclass(frozen=True)
class Terms:
    """What a question and its answer are held to: whose, about which run, within how many seconds."""

    identity: Identity
    run_id: str | None
    seconds: float


async def ask(stream: Stream, body: pb.Body, terms: Terms, due: str) -> pb.Body:
    """Send `body`, return the answer, a message named `due`, and end the stream. Every failure is a RemoteError.

    A peer's Refuse is raised as what its code says, or as RefusedError, with the peer's words.
    """
    async with reset_unless_done(stream.reset):
        with map_exceptions(stream.remote, "asking"), deadline(terms.seconds, f"the answer of {short(stream.remote)}"):
            await _send(stream, body, terms)
            answer = await _receive(stream, terms, due, "refuse")
        await stream.close()
    if answer.HasField("refuse"):
        raise _refusal(answer.refuse, stream)
    return answer


async def answer(
    stream: Stream, terms: Terms, due: str, reply: Callable[[pb.Body], Awaitable[pb.Body]]
) -> errors.RemoteError | None:
    """Read one question, a message named `due`, and send what `reply` makes of it; the stream is closed by whoever called.

    Returns the error for which the question was refused, if it was; the peer was told, and its stream must
    not be reset before it has read that. Raises RemoteError for what cannot be answered at all.
    """
    with _served(stream, terms):
        try:
            await _send(stream, await reply(await _receive(stream, terms, due)), terms)
        except (errors.OtherRunError, errors.PeerVersionError, errors.RefusedError) as error:
            await _send(stream, _refuse(error), terms)
            return error
    return None


async def turn_away(stream: Stream, error: errors.RefusedError, terms: Terms) -> None:
    """Read the first message of a stream, whatever it asks for, and refuse it for `error`. Raises RemoteError."""
    with _served(stream, terms):
        asked = await _receive(stream, terms)
        refusal = _refuse(error)
        refusal.session, refusal.sequence = asked.session, 1
        await _send(stream, refusal, terms)


def _served(stream: Stream, terms: Terms) -> AbstractContextManager[None]:
    """For reading a question and answering it."""
    return deadline(terms.seconds, f"a request of {short(stream.remote)}, or its reading of the answer,")


def _refuse(error: errors.RemoteError) -> pb.Body:
    return pb.Body(refuse=pb.Refuse(code=error.code, reason=error.cause))


async def _send(stream: Stream, body: pb.Body, terms: Terms) -> None:
    body.receiver = stream.remote
    body.run_id = terms.run_id or body.run_id
    raw = await off_the_loop(partial(_framed, body, terms.identity), large=body.HasField("info"))
    del body  # a large one is held once while it is sent
    await stream.write(raw)


def _framed(body: pb.Body, identity: Identity) -> bytes:
    raw = seal(body, identity)
    return envelope_head(len(raw)) + raw


async def _receive(stream: Stream, terms: Terms, *due: str) -> pb.Body:
    """A message of one of the names in `due`, which bound its size; of any name if there are none."""
    raw = await stream.read_exactly(parse_head(await stream.read_exactly(HEAD_SIZE), most_bytes(due)).length)
    opened = partial(open_envelope, raw, receiver=terms.identity.peer_id, remote=stream.remote)
    try:
        body = await off_the_loop(partial(opened, run_id=terms.run_id), large=len(raw) > _LARGE)
    except errors.OtherRunError:
        # A refusal carries the refuser's own run, which is another than ours: its words say it best.
        body = opened(run_id=None)
        if not body.HasField("refuse"):
            raise
    if due and (name := body.WhichOneof("content")) not in due:
        raise errors.ProtocolError(f"{short(stream.remote)} sent {name or 'an unknown message'} where {due[0]} was due.")
    return body


async def off_the_loop(work: Callable[[], T], *, large: bool) -> T:
    """What `work` makes of a message; of a `large` one in a thread, where its signature alone would hold up all others."""
    return await trio.to_thread.run_sync(work, limiter=_LARGE_AT_ONCE) if large else work()


def _refusal(refuse: pb.Refuse, stream: Stream) -> errors.RemoteError:
    code, reason = readable(refuse.code, 16), readable(refuse.reason)
    for kind in (*_TOLD, errors.BannedError):
        if code == kind.entry.code:
            return kind(f"{short(stream.remote)} says: {reason}")
    title = errors.CATALOGUE[code].title if code in errors.CATALOGUE else code
    return errors.RefusedError(f"{short(stream.remote)} says: {title}, {reason}")
