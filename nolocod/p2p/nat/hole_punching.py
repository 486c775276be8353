"""Hole punching, DCUtR over TCP (libp2p's specs/relay/DCUtR.md): a relayed connection becomes a straight one. Both ends
dial at the same moment, so that each NAT takes the other's packet for an answer.

The rule: who was reached through the relay opens, and is the server of the connection that comes of it; whoever gets SYNC
is the client, however the packets crossed. What a peer says of its addresses costs ten dials a second to each of a few of
them, for some seconds and a few times; one machine is dialled no more than `rate_limits.PUNCHES` says, however many ports
are named; and nothing is dialled in a private network that is not ours.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from nolocod.errors import ProtocolError, RefusedError, RemoteError
from nolocod.observe.events import Emit, Punched
from nolocod.p2p.limits.rate_limits import RARE, Windows
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.identify import readable
from nolocod.p2p.transport.multiaddrs import endpoint, host_of, public

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nolocod.identity import PeerId
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

DCUTR = "/libp2p/dcutr"

_MESSAGE_BYTES = 4096
"""As the specification has it."""
_AT_ONCE = 8
_SPAN = 600.0
"""Seconds within which a peer has so many `tries`."""
_PUBLIC = 2.0
"""Seconds for dialling the peer's public addresses, before anything else."""
_ANSWER = 10.0
_ADDRESSES = 8
"""Of a peer's that are dialled, and of ours that it is told."""
_LONGEST_WAIT = 1.0
"""Seconds that the opener waits at most for its SYNC to arrive: half of what a message takes to and fro."""


@dataclass(frozen=True)
class PunchLimits:
    """What punching with one peer may cost."""

    tries: int = 3
    rounds: int = 3
    """Of one try."""
    dialling: float = 4.0
    """Seconds for all dials of one round."""


class HolePuncher:
    """Punches for one host: `serve` it, and every peer that reaches us through a relay is tried once."""

    def __init__(self, host: Host, emit: Emit, limits: PunchLimits | None = None) -> None:
        self._limits = limits = limits or PunchLimits()
        self._host = host
        self._emit = emit
        self._busy: dict[PeerId, trio.CancelScope] = {}
        self._opened, self._answered = Windows(limits.tries, _SPAN), Windows(limits.tries * limits.rounds, _SPAN)

    def serve(self) -> None:
        """Answer others, and open by ourselves where we are reached through a relay, from now on."""
        self._host.serve(DCUTR, self.handle, RARE)
        self._host.met_through_relay = self.punch

    # --- the opener -----------------------------------------------------------------------------------

    async def punch(self, peer: PeerId) -> bool:
        """Try to have a straight connection to `peer`, which is connected through a relay; whether there is one now.

        False at once if enough was tried lately, or too much is under way.
        """
        if self._host.straight(peer):
            return True
        if peer in self._busy or not self._admitted(peer, self._opened):
            return False
        began = trio.current_time()
        reason: str | None = ""
        with self._working(peer) as scope:
            try:
                reason = await self._open(peer)
            except RemoteError as error:
                reason = error.cause
        if scope.cancelled_caught:  # the peer opens, and it was its turn
            with trio.move_on_after(_ANSWER):
                await self._host.straightened(peer)
            return self._host.straight(peer)
        return reason is not None and self._tell(peer, began, reason)

    async def _open(self, peer: PeerId) -> str | None:
        """All rounds; why they failed, if they did. None where there is nothing to try, as with observers."""
        known = await self._host.identify(peer)
        outside = [address for address in known.listen if (host := host_of(address)) and public(host)]
        if outside and await self._host.dial_straight(peer, outside, _PUBLIC):
            return ""
        if DCUTR not in known.protocols:
            return None
        for _ in range(self._limits.rounds):
            if self._host.straight(peer):
                return ""
            stream = await self._host.open_stream(peer, DCUTR)
            try:
                targets, wait = await self._agree(stream)
                if not targets:
                    return "the peer has no address that we may dial."
                with self._host.dialer.expecting(peer, targets, client=False):
                    await send_message(stream, HolePunch(type=HolePunch.SYNC))
                    await trio.sleep(wait)
                    if await self._host.punch(peer, targets, self._limits.dialling, client=False):
                        return ""
            finally:
                await stream.reset()
        return f"no answer in {self._limits.rounds} rounds; one of the two NATs gives each peer another port, or lets none in."

    async def _agree(self, stream: Stream) -> tuple[list[tuple[str, int]], float]:
        """Exchange addresses; where to dial, and how long the next message is going to be on its way."""
        ours = await self._ours()
        sent = trio.current_time()
        await send_message(stream, ours)
        theirs = await self._receive(stream, HolePunch.CONNECT)
        return self._targets(theirs.ObsAddrs), min((trio.current_time() - sent) / 2, _LONGEST_WAIT)

    # --- the answerer ---------------------------------------------------------------------------------

    async def handle(self, stream: Stream) -> None:
        """One round that the peer opened. Raises RemoteError for a fault of the peer's."""
        peer = stream.remote
        if peer in self._busy and self._host.own < peer:  # both of us opened; the other one knows this rule too
            raise RefusedError("hole punching is already under way.")
        if self._host.straight(peer) or not self._admitted(peer, self._answered):
            raise RefusedError("no punch is due.")
        began = trio.current_time()
        with self._working(peer):
            theirs = await self._receive(stream, HolePunch.CONNECT)
            targets = self._targets(theirs.ObsAddrs)
            await send_message(stream, await self._ours())
            with self._host.dialer.expecting(peer, targets, client=True):
                await self._receive(stream, HolePunch.SYNC)
                await self._host.punch(peer, targets, self._limits.dialling, client=True)
        self._tell(peer, began, "the peers' packets did not meet.")

    # --- both -----------------------------------------------------------------------------------------

    @contextmanager
    def _working(self, peer: PeerId) -> Iterator[trio.CancelScope]:
        if peer in self._busy:
            self._busy[peer].cancel()
        with trio.CancelScope() as scope:
            self._busy[peer] = scope
            try:
                yield scope
            finally:
                if self._busy.get(peer) is scope:
                    del self._busy[peer]

    def _admitted(self, peer: PeerId, tries: Windows) -> bool:
        """Whether one more of `tries` with `peer` may begin now; counts it."""
        may = self._host.straight_to is None and len(self._busy) < _AT_ONCE
        return may and tries.take(peer, trio.current_time())

    def _tell(self, peer: PeerId, began: float, reason: str) -> bool:
        worked = self._host.straight(peer)
        self._emit(Punched(peer, worked, trio.current_time() - began, "" if worked else reason))
        return worked

    async def _receive(self, stream: Stream, kind: HolePunch.Type.ValueType) -> HolePunch:
        with deadline(_ANSWER, "a punch's next message"):
            message = await receive_message(stream, HolePunch, _MESSAGE_BYTES)
        if message.type != kind:
            raise ProtocolError("the messages of hole punching came in the wrong order.")
        return message

    async def _ours(self) -> HolePunch:
        """Tells where the peer shall dial, most promising first: as others see our listening port, or probably would."""
        views = self._host.observed.values()
        if not any(view.from_listen_port for view in views):
            await self._be_seen()
        mapped = [address for address, _ in Counter(view.address for view in views if view.from_listen_port).most_common()]
        guessed = [self._with_listen_port(view.address) for view in views if not view.from_listen_port]
        found = [*mapped, *guessed, *self._host.external, *self._host.local]
        told = [Multiaddr(address).to_bytes() for address in dict.fromkeys(found) if endpoint(address)]
        return HolePunch(type=HolePunch.CONNECT, ObsAddrs=told[:_ADDRESSES])

    async def _be_seen(self) -> None:
        """Ask some of those who are connected straight what they see us as."""
        with trio.move_on_after(_PUBLIC):
            async with trio.open_nursery() as nursery:
                for peer in [peer for peer, reach in self._host.peers().items() if reach != "relayed"][:3]:
                    nursery.start_soon(self._host.learn, peer)

    def _with_listen_port(self, address: str) -> str:
        """Most NATs keep a connection's own port outside, where it is free."""
        host, port = endpoint(address) or ("", 0)
        return address.replace(f"/tcp/{port}", f"/tcp/{self._host.dialer.port(host) or port}")

    def _targets(self, raw: Iterable[bytes]) -> list[tuple[str, int]]:
        """Those of a peer's addresses that we are ready to dial."""
        own = {*self._host.local, *self._host.external, *(seen.address for seen in self._host.observed.values())}
        texts = [text for text in map(readable, list(raw)[: 4 * _ADDRESSES]) if text and text not in own]
        found = [target for text in texts if (target := endpoint(text)) and self._host.may_dial(text, target[0])]
        return [target for target in dict.fromkeys(found) if self._host.dialer.port(target[0])][:_ADDRESSES]
