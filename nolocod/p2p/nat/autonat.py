"""Whether others can dial us: AutoNAT v1, both sides (github.com/libp2p/specs, autonat/autonat-v1.md).

The rule: we dial for a peer only where its own straight connection comes from, a few addresses, one question of a
peer at a time and so many a minute, so that nobody has us knock at a third one's door; and what a helper answers
counts only for addresses that it was asked about. A NAT that lets in any port of an address that we talked to
is taken for open: AutoNAT's first version cannot tell.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import trio
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from nolocod.errors import RemoteError
from nolocod.p2p.limits import rate_limits
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.identify import readable
from nolocod.p2p.transport.multiaddrs import endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.identity import PeerId
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.libp2p_stream import LibStream
    from nolocod.p2p.transport.stream import Stream

AUTONAT = "/libp2p/autonat/1.0.0"

_MOST_BYTES = 8 << 10
_MOST_TOLD = 32
"""Addresses of one question that are looked at."""
_MINUTE = 60.0


@dataclass(frozen=True)
class AutoNatLimits:
    """What strangers may have of us, and seconds that things may take."""

    addresses: int = 4
    """Dialled for one question."""
    per_peer: int = 4
    """Questions a minute."""
    per_address: int = 12
    """Questions a minute of all peers behind one address."""
    in_all: int = 30
    """Questions a minute of all peers together."""
    at_once: int = 8
    question: float = 10.0
    """Until all of one has come."""
    dial: float = 8.0
    answer: float = 14.0
    """For our own questions: the helper dials meanwhile."""


@dataclass(frozen=True)
class DialBack:
    """What one helper found: `dialled` is the address at which it got through, None if it was none of those `asked`."""

    helper: PeerId
    observer: str
    """The helper's IP address."""
    asked: tuple[str, ...]
    dialled: str | None


class AutoNatServer:
    """Dials back those who ask."""

    def __init__(self, host: Host, limits: AutoNatLimits | None = None) -> None:
        self._host = host
        self._limits = limits or AutoNatLimits()
        self._busy: set[PeerId] = set()
        self._asked: deque[tuple[float, PeerId, str]] = deque()

    def serve(self) -> None:
        """Answer from now on."""
        self._host.serve(AUTONAT, self.handle)

    async def handle(self, stream: Stream) -> None:
        """Answer one question. Raises RemoteError for a peer that breaks the protocol, or takes too long."""
        with deadline(self._limits.question, "a question to dial back"):
            message = await receive_message(stream, Message, _MOST_BYTES)
        answer = Message(type=Message.DIAL_RESPONSE)
        status, text, address = await self._judge(stream, message)
        answer.dialResponse.status = status
        answer.dialResponse.statusText = text
        if address is not None:
            answer.dialResponse.addr = Multiaddr(address).to_bytes()
        await send_message(stream, answer)

    async def _judge(self, stream: Stream, message: Message) -> tuple[Message.ResponseStatus.ValueType, str, str | None]:
        peer = stream.remote
        if message.type != Message.DIAL or message.dial.peer.id != ID.from_string(peer).to_bytes():
            return Message.E_BAD_REQUEST, "a question is about the one who asks", None
        source = endpoint(cast("LibStream", stream).remote_address or "")
        if source is None:
            return Message.E_DIAL_REFUSED, "not through a relay", None
        told = [readable(raw) for raw in message.dial.peer.addrs[:_MOST_TOLD]]
        wanted = [text for text in dict.fromkeys(told) if text and (endpoint(text) or ("",))[0] == source[0]]
        if not wanted:
            return Message.E_DIAL_REFUSED, "no address is of the host that asks", None
        if not self._admit(peer, rate_limits.source(source[0])):
            return Message.E_DIAL_REFUSED, "too many questions", None
        self._busy.add(peer)
        try:
            found = await self._dial(peer, wanted[: self._limits.addresses])
        finally:
            self._busy.discard(peer)
        return (Message.OK, "", found) if found else (Message.E_DIAL_ERROR, "no address could be dialled", None)

    def _admit(self, peer: PeerId, place: str) -> bool:
        now = trio.current_time()
        while self._asked and self._asked[0][0] <= now - _MINUTE:
            self._asked.popleft()
        limits = self._limits
        if peer in self._busy or len(self._busy) >= limits.at_once or len(self._asked) >= limits.in_all:
            return False
        if sum(asker == peer for _, asker, _ in self._asked) >= limits.per_peer:
            return False
        if sum(where == place for _, _, where in self._asked) >= limits.per_address:
            return False
        self._asked.append((now, peer, place))
        return True

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> str | None:
        """The first of `addresses` at which `peer` answers."""
        found: list[str] = []

        async def attempt(address: str) -> None:
            try:
                await self._host.probe(peer, address)
            except RemoteError:
                return
            found.append(address)
            nursery.cancel_scope.cancel()

        with trio.move_on_after(self._limits.dial):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(attempt, address)
        return found[0] if found else None


async def ask(host: Host, helper: PeerId, addresses: Sequence[str], limits: AutoNatLimits | None = None) -> DialBack | None:
    """Have a connected `helper` dial us at `addresses` (multiaddrs); it tries those where it sees us.

    None if it would not, or is connected through a relay only. Raises RemoteError (RefusedError if it knows no AutoNAT).
    """
    limits = limits or AutoNatLimits()
    stream = await host.open_stream(helper, AUTONAT)
    source = endpoint(stream.remote_address or "")
    if source is None:
        await stream.reset()
        return None
    try:
        message = Message(type=Message.DIAL)
        message.dial.peer.id = ID.from_string(host.own).to_bytes()
        message.dial.peer.addrs.extend(Multiaddr(address).to_bytes() for address in addresses)
        with deadline(limits.answer, "the answer of one who dials us back"):
            await send_message(stream, message)
            answer = await receive_message(stream, Message, _MOST_BYTES)
        await stream.close()
    except BaseException:
        await stream.reset()
        raise
    response = answer.dialResponse
    if response.status == Message.OK:
        dialled = readable(response.addr)
        return DialBack(helper, source[0], tuple(addresses), dialled) if dialled in addresses else None
    if response.status == Message.E_DIAL_ERROR:
        return DialBack(helper, source[0], tuple(addresses), None)
    return None
