"""AutoNAT v1, both sides: whether others can dial us (github.com/libp2p/specs, autonat/autonat-v1.md).

The rule: we dial for a peer only where its own straight connection comes from, a few addresses, one question of a peer
at a time and so many a minute, so that nobody can have us dial a third party. A helper's answer counts only for
addresses that it was asked about. A NAT that lets in any port of an address that we talked to is taken for open:
AutoNAT's first version cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from nolocod.p2p.limits.address_groups import source
from nolocod.p2p.limits.rate_limits import RARE, Windows
from nolocod.p2p.nat.classify import DialBack
from nolocod.p2p.transport.deadlines import deadline, reset_unless_done
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.dialer import first_of
from nolocod.p2p.transport.identify import readable, texts_of
from nolocod.p2p.transport.multiaddrs import host_of

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
_MOST_DIALLED = 4
"""Addresses that are dialled for one question."""
_AT_ONCE = 8
_DIAL = 8.0
"""Seconds for all dials of one question."""
_ANSWER = 14.0
"""Seconds for the answer to a question of ours: the helper dials meanwhile."""


@dataclass(frozen=True)
class AutoNatLimits:
    """How many questions are answered in any minute."""

    per_peer: int = 4
    per_address: int = 12
    """Of all peers of one address group."""
    in_all: int = 30
    question: float = 10.0
    """Seconds until all of one question has come."""


class AutoNatServer:
    """Dials back those who ask, from the start."""

    def __init__(self, host: Host, limits: AutoNatLimits | None = None) -> None:
        self._host = host
        self._limits = limits = limits or AutoNatLimits()
        self._busy: set[PeerId] = set()
        self._windows = [Windows(count, _MINUTE) for count in (limits.per_peer, limits.per_address, limits.in_all)]
        host.serve(AUTONAT, self.handle, RARE)

    async def handle(self, stream: Stream) -> None:
        """Answer one question. Raises RemoteError for a peer that breaks the protocol, or takes too long."""
        with deadline(self._limits.question, "a question to dial back"):
            message = await receive_message(stream, Message, _MOST_BYTES)
        await send_message(stream, Message(type=Message.DIAL_RESPONSE, dialResponse=await self._response(stream, message)))

    async def _response(self, stream: Stream, message: Message) -> Message.DialResponse:
        def refusal(status: Message.ResponseStatus.ValueType, why: str) -> Message.DialResponse:
            return Message.DialResponse(status=status, statusText=why)

        peer = stream.remote
        if message.type != Message.DIAL or message.dial.peer.id != ID.from_string(peer).to_bytes():
            return refusal(Message.E_BAD_REQUEST, "a question is about the one who asks")
        seen_at = host_of(cast("LibStream", stream).remote_address or "")
        if not seen_at:
            return refusal(Message.E_DIAL_REFUSED, "not through a relay")
        theirs = [text for text in await texts_of(message.dial.peer.addrs[:_MOST_TOLD]) if host_of(text) == seen_at]
        wanted = [text for text in theirs if self._host.may_dial(text, seen_at)]
        if not wanted:
            return refusal(Message.E_DIAL_REFUSED, "no address is of the host that asks, and may be dialled from here")
        if not self._admit(peer, source(seen_at), trio.current_time()):
            return refusal(Message.E_DIAL_REFUSED, "too many questions")
        self._busy.add(peer)
        try:
            found = await self._dial(peer, wanted[:_MOST_DIALLED])
        finally:
            self._busy.discard(peer)
        if not found:
            return refusal(Message.E_DIAL_ERROR, "no address could be dialled")
        return Message.DialResponse(status=Message.OK, addr=Multiaddr(found).to_bytes())

    def _admit(self, peer: PeerId, address: str, now: float) -> bool:
        """Whether one more question may be answered; a refused one counts for nobody."""
        counted = list(zip(self._windows, (peer, address, ""), strict=True))
        if peer in self._busy or len(self._busy) >= _AT_ONCE or any(window.full(name, now) for window, name in counted):
            return False
        return all(window.take(name, now) for window, name in counted)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> str | None:
        """The first of `addresses` at which `peer` answers."""
        found: list[str] = []

        async def attempt(address: str) -> None:
            await self._host.probe(peer, address)
            found.append(address)

        with trio.move_on_after(_DIAL):
            await first_of([partial(attempt, address) for address in addresses])
        return found[0] if found else None


async def ask(host: Host, helper: PeerId, addresses: Sequence[str]) -> DialBack | None:
    """Have a connected `helper` dial us at `addresses`: multiaddrs of the one IP address at which it sees us.

    None if it would not, or is connected through a relay only. Raises RemoteError (RefusedError if it knows no AutoNAT).
    """
    stream = await host.open_stream(helper, AUTONAT)
    if not (observer := host_of(stream.remote_address or "")):
        await stream.reset()
        return None
    async with reset_unless_done(stream.reset):
        message = Message(type=Message.DIAL)
        message.dial.peer.id = ID.from_string(host.own).to_bytes()
        message.dial.peer.addrs.extend(Multiaddr(address).to_bytes() for address in addresses)
        with deadline(_ANSWER, "the answer of one who dials us back"):
            await send_message(stream, message)
            response = (await receive_message(stream, Message, _MOST_BYTES)).dialResponse
        await stream.close()
    dialled = readable(response.addr) if response.status == Message.OK else None
    if dialled in addresses or response.status == Message.E_DIAL_ERROR:
        return DialBack(observer, host_of(addresses[0]), dialled)
    return None
