"""From a relayed connection to a straight one: both ends dial at the same moment, so that each NAT takes the other's
packet for an answer. DCUtR over TCP (libp2p's specs/relay/DCUtR.md), the opener's side and the answerer's.

The rule: who was reached through the relay opens, and is the server of the connection that comes of it; whoever gets SYNC
is the client, however the packets crossed. What a peer says of its addresses costs ten dials a second to each of a few of
them, for some seconds and a few times, however many ports it names of one machine no more than that machine is knocked at
(`strangers.PUNCHES`), and none into a private network that is not ours.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from nolocod.errors import ProtocolError, RefusedError, RemoteError
from nolocod.observe.events import Emit, Punched
from nolocod.p2p.transport.deadlines import deadline
from nolocod.p2p.transport.delimited import receive_message, send_message
from nolocod.p2p.transport.identify import readable
from nolocod.p2p.transport.multiaddrs import endpoint, public

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nolocod.identity import PeerId
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

logger = logging.getLogger(__name__)

DCUTR = "/libp2p/dcutr"

_MESSAGE_BYTES = 4096
"""As the specification has it."""
_MOST_REMEMBERED = 1024
"""Peers whose tries are counted."""
_LONGEST_WAIT = 1.0
"""Seconds that the opener waits at most for its SYNC to arrive: half of what a message takes to and fro."""


@dataclass(frozen=True)
class PunchLimits:
    """What punching may cost. Times in seconds."""

    at_once: int = 8
    tries: int = 3
    """Of one peer, within `span`; each has `rounds`."""
    span: float = 600.0
    rounds: int = 3
    dialling: float = 4.0
    """For all dials of one round."""
    public: float = 2.0
    """For dialling the peer's public addresses, before anything else."""
    answer: float = 10.0
    addresses: int = 8
    """Of a peer's that are dialled, and of ours that it is told."""


class HolePuncher:
    """Punches for one host: `serve` it, and every peer that reaches us through a relay is tried once."""

    def __init__(self, host: Host, emit: Emit, limits: PunchLimits | None = None) -> None:
        self.limits = limits or PunchLimits()
        self._host = host
        self._emit = emit
        self._busy: dict[PeerId, trio.CancelScope] = {}
        self._tries: dict[tuple[PeerId, bool], list[float]] = {}

    def serve(self) -> None:
        """Answer others, and open by ourselves where we are reached through a relay, from now on."""
        self._host.serve(DCUTR, self.handle)
        self._host.met_through_relay = self._met

    async def _met(self, peer: PeerId) -> None:
        await self.punch(peer)

    # --- the opener -----------------------------------------------------------------------------------

    async def punch(self, peer: PeerId) -> bool:
        """Try to have a straight connection to `peer`, which is connected through a relay; whether there is one now.

        False at once if enough was tried lately, or too much is under way.
        """
        if self._host.straight(peer):
            return True
        if peer in self._busy or not self._admitted(peer, opener=True):
            return False
        began = trio.current_time()
        reason = ""
        with self._working(peer) as scope:
            try:
                reason = await self._open(peer)
            except RemoteError as error:
                reason = error.cause
        if scope.cancelled_caught:  # the peer opens, and it was its turn
            with trio.move_on_after(self.limits.answer):
                await self._host.straightened(peer)
            return self._host.straight(peer)
        return self._told(peer, began, reason)

    async def _open(self, peer: PeerId) -> str:
        """All rounds; why they failed, if they did."""
        known = await self._host.identify(peer)
        outside = [address for address in known.listen if (found := endpoint(address)) and public(found[0])]
        if outside and await self._host.dial_straight(peer, outside, self.limits.public):
            return ""
        for _ in range(self.limits.rounds):
            if self._host.straight(peer):
                return ""
            stream = await self._host.open_stream(peer, DCUTR)
            try:
                targets, wait = await self._agree(stream)
                if not targets:
                    return "the peer has no address that we may dial."
                with self._host.dialler.expecting(peer, targets, client=False):
                    await send_message(stream, HolePunch(type=HolePunch.SYNC))
                    await trio.sleep(wait)
                    if await self._host.punch(peer, targets, self.limits.dialling, client=False):
                        return ""
            finally:
                await stream.reset()
        return f"no answer in {self.limits.rounds} rounds; one of the two NATs gives each peer another port, or lets none in."

    async def _agree(self, stream: Stream) -> tuple[list[tuple[str, int]], float]:
        """Exchange addresses; where to dial, and how long the next message is going to be on its way."""
        ours = await self._ours()
        sent = trio.current_time()
        await send_message(stream, _connect(ours))
        theirs = await self._receive(stream, HolePunch.CONNECT)
        return self._targets(theirs.ObsAddrs), min((trio.current_time() - sent) / 2, _LONGEST_WAIT)

    # --- the answerer ---------------------------------------------------------------------------------

    async def handle(self, stream: Stream) -> None:
        """One round that the peer opened. Raises RemoteError for a fault of the peer's."""
        peer = stream.remote
        if peer in self._busy and self._host.own < peer:  # both of us opened; the other one knows this rule too
            raise RefusedError("a punch is under way already.")
        if self._host.straight(peer) or not self._admitted(peer, opener=False):
            raise RefusedError("no punch is due.")
        began = trio.current_time()
        reason = "the peers' packets did not meet."
        with self._working(peer):
            theirs = await self._receive(stream, HolePunch.CONNECT)
            targets = self._targets(theirs.ObsAddrs)
            await send_message(stream, _connect(await self._ours()))
            with self._host.dialler.expecting(peer, targets, client=True):
                await self._receive(stream, HolePunch.SYNC)
                await self._host.punch(peer, targets, self.limits.dialling, client=True)
        self._told(peer, began, reason)

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

    def _admitted(self, peer: PeerId, *, opener: bool) -> bool:
        """Whether one more try with `peer` may begin now; counts it."""
        if self._host.straight_to is not None or len(self._busy) >= self.limits.at_once:
            return False
        now = trio.current_time()
        recent = {key: [at for at in times if now - at < self.limits.span] for key, times in self._tries.items()}
        self._tries = {key: times for key, times in recent.items() if times}
        times = self._tries.setdefault((peer, opener), [])
        if len(times) >= self.limits.tries * (1 if opener else self.limits.rounds) or len(self._tries) > _MOST_REMEMBERED:
            return False
        times.append(now)
        return True

    def _told(self, peer: PeerId, began: float, reason: str) -> bool:
        worked = self._host.straight(peer)
        self._emit(Punched(peer, worked, trio.current_time() - began, "" if worked else reason))
        return worked

    async def _receive(self, stream: Stream, kind: HolePunch.Type.ValueType) -> HolePunch:
        with deadline(self.limits.answer, "a punch's next message"):
            message = await receive_message(stream, HolePunch, _MESSAGE_BYTES)
        if message.type != kind:
            raise ProtocolError("a punch's messages came in another order.")
        return message

    async def _ours(self) -> list[str]:
        """Where the peer shall dial, most promising first: as others see our listening port, or probably would."""
        if not any(seen.from_listen_port for seen in self._host.observed.values()):
            await self._be_seen()
        seen = Counter(seen.address for seen in self._host.observed.values() if seen.from_listen_port)
        mapped = [address for address, _ in seen.most_common()]
        guessed = [self._with_listen_port(seen.address) for seen in self._host.observed.values() if not seen.from_listen_port]
        found = [*mapped, *guessed, *self._host.external, *self._host.local]
        return [address for address in dict.fromkeys(found) if endpoint(address)][: self.limits.addresses]

    async def _be_seen(self) -> None:
        """Ask some of those who are connected straight what they see us as."""

        async def one(peer: PeerId) -> None:
            try:
                await self._host.identify(peer)
            except RemoteError as error:
                logger.debug("nobody there to see us: %s", error)

        near_by = [peer for peer, reach in self._host.peers().items() if reach != "relayed"][:3]
        with trio.move_on_after(self.limits.public):
            async with trio.open_nursery() as nursery:
                for peer in near_by:
                    nursery.start_soon(one, peer)

    def _with_listen_port(self, address: str) -> str:
        """Most NATs keep a connection's own port outside, where it is free."""
        host, port = endpoint(address) or ("", 0)
        listening = self._host.dialler.port(host) or port
        return address.replace(f"/tcp/{port}", f"/tcp/{listening}")

    def _targets(self, raw: Iterable[bytes]) -> list[tuple[str, int]]:
        """Those of a peer's addresses that we are ready to dial."""
        own = {*self._host.local, *self._host.external, *(seen.address for seen in self._host.observed.values())}
        texts = [text for text in map(readable, list(raw)[: 4 * self.limits.addresses]) if text and text not in own]
        found = [target for text in texts if self._host.promising(text) and (target := endpoint(text))]
        return [target for target in dict.fromkeys(found) if self._host.dialler.port(target[0])][: self.limits.addresses]


def _connect(addresses: Iterable[str]) -> HolePunch:
    return HolePunch(type=HolePunch.CONNECT, ObsAddrs=[Multiaddr(address).to_bytes() for address in addresses])
