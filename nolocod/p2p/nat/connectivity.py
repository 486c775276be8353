"""How this node and others reach each other: puts reachability, hole punching, reservations and the relay together.

The rule: who is reached straight relays for others, if its owner lets it, and holds no reservations; everybody else
holds some and relays for nobody. A node that was given --announce, or that has a public address on an interface,
counts as reached straight until it has learned better; any other waits for a peer that dialled it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from nolocod.errors import RelayBudgetError
from nolocod.identity import short
from nolocod.observe.events import Punched
from nolocod.p2p.limits.newest import Newest
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient, RelayLimits
from nolocod.p2p.nat.classify import needs_relay
from nolocod.p2p.nat.hole_punching import HolePuncher
from nolocod.p2p.nat.reachability import Reachability, own_hosts
from nolocod.p2p.nat.reservations import Candidate, Reservations
from nolocod.p2p.transport.multiaddrs import public

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit, Event, NatClass
    from nolocod.p2p.discovery.bootstrap import Contact
    from nolocod.p2p.host import Host
    from nolocod.p2p.nat.reservations import Want
    from nolocod.p2p.settings import MeshSettings
    from nolocod.p2p.transport.stream import Handler
    from nolocod.proto.types import Member

_UNPUNCHED = 300.0
"""Seconds for which a failed punch counts: NATs change, and the next try may succeed."""
_KNOWN = 512
_TOLD = 8
"""Addresses in a heartbeat."""
_CIRCUITS_TOLD = 4
_OVERHEAD = 1.05
"""Bytes on the wire per byte of an exchange: sealing, frames, hashes."""


class Connectivity:
    """How one node reaches others and is reached. `run` keeps it so; `mesh` asks it about members."""

    def __init__(
        self, host: Host, settings: MeshSettings, bootstrap: Sequence[Contact], rng: random.Random, emit: Emit
    ) -> None:
        self.members: Callable[[], Iterable[Member]] = tuple
        """Live members, of whom some relay."""
        self.resting: Callable[[], bool] = lambda: False
        """Whether our owner wants nothing done for others now."""
        self.bulk = 0
        """Bytes of an exchange, one way; 0 while that is not known."""
        self._host = host
        self._announced = bool(settings.announce)
        self._relaying = relaying = settings.relaying
        self._bootstrap = dict(bootstrap)
        self._emit = emit
        self._failed: Newest[PeerId, float] = Newest(_KNOWN)  # when punching failed, in trio's time
        self.client = RelayClient(host)
        self._reachability = Reachability(host, settings, self.follow, rng)
        self._puncher = HolePuncher(host, self.follow)
        self._reservations = Reservations(host, self.client, self.follow, rng)
        self._reservations.want, self._reservations.candidates = self._want, self._candidates
        limits = RelayLimits(
            reservations=relaying.reservations,
            circuits=relaying.circuits,
            circuit_bytes=int(relaying.rate * RelayLimits.circuit_seconds),
            rate=relaying.rate,
        )
        self.relay = Relay(host, limits, lambda: self.relays)

    def serve(self, interruptible: Callable[[Handler], Handler]) -> None:
        """Use relays and be one, as far as the owner lets us; `interruptible` is put around what is done for others."""
        self._puncher.serve()
        if self._relaying.use:
            self.client.serve()
            self._host.through = self.client.connect
        if self._relaying.only:
            self._host.straight_to = self._may_connect_straight
        if self._relaying.serve:
            self.relay.serve(interruptible)

    async def run(self) -> None:
        """Find out how we are reached, keep reservations, and tell what is relayed, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reachability.run)
            nursery.start_soon(self._reservations.run)
            nursery.start_soon(self.relay.run, self.follow)

    def wake(self) -> None:
        """The network is another one now: what failed is tried again."""
        self._failed.clear()
        self._reservations.wake()

    # --- what we are --------------------------------------------------------------------------------

    @property
    def kind(self) -> NatClass | None:
        """How others reach us; None while we do not know."""
        declared = self._announced or (not self._relaying.only and any(map(public, own_hosts(self._host))))
        return self._reachability.kind or ("public" if declared else None)

    @property
    def relays(self) -> bool:
        """Whether we relay for others now."""
        relaying = self._relaying
        return relaying.serve and not relaying.only and self.kind == "public" and not self.resting()

    @property
    def heartbeat_addresses(self) -> tuple[str, ...]:
        """Our addresses for a heartbeat, which has room for eight: circuits have theirs in any case."""
        circuits = self._host.circuits[:_CIRCUITS_TOLD]
        straight = [address for address in self._host.announced if address not in self._host.circuits]
        return (*straight[: _TOLD - len(circuits)], *circuits)

    def _want(self) -> Want:
        if not self._relaying.use:
            return "no"
        if self._relaying.only:
            return "yes"
        kind = self.kind
        return "no" if kind == "public" else "perhaps" if kind is None else "yes"

    def _candidates(self) -> list[Candidate]:
        """Members that relay, and the bootstraps, unless they say that they do not."""
        members = {member.peer_id: member for member in self.members()}
        found = [Candidate(peer, addresses) for peer, addresses in self._bootstrap.items() if peer not in members]
        known = (member for member in members.values() if member.relays or member.peer_id in self._bootstrap)
        return [*(Candidate(member.peer_id, member.addresses, member.relays) for member in known), *found]

    def needs(self, peer: PeerId) -> bool:
        """Whether it is a bootstrap, or a relay that holds our reservation."""
        return peer in self._bootstrap or peer in self._reservations.held

    def _may_connect_straight(self, peer: PeerId) -> bool:
        return peer in self._bootstrap or any(member.peer_id == peer and member.relays for member in self.members())

    # --- what members are to us -----------------------------------------------------------------------

    def behind_relays(self, members: Iterable[Member]) -> set[PeerId]:
        """Those of `members` that only a relay reaches."""
        kind, failed = self.kind, self._unpunched()
        return {member.peer_id for member in members if needs_relay(member, kind, failed)}

    async def straighten(self, peer: PeerId, member: Member | None, seconds: float) -> None:
        """Before bulk goes over a relayed connection: give a punch `seconds` to succeed, where one can.

        Raises RelayBudgetError if it did not, and the relay carries less than is to be sent.
        """
        if self._host.peers().get(peer) != "relayed":
            return
        if self._may_punch(peer, member):
            with trio.move_on_after(seconds):
                await self._host.straightened(peer)
                return
            self._failed[peer] = trio.current_time()
        if self._host.peers().get(peer) != "relayed":
            return
        carries = self.client.carries(peer)
        if carries is not None and carries < 2 * self.bulk * _OVERHEAD:
            raise RelayBudgetError(
                f"{short(peer)} is reached only through a relay that carries {carries / 1e6:.0f} MB, "
                f"and an exchange takes {2 * self.bulk / 1e6:.0f} MB."
            )

    def _may_punch(self, peer: PeerId, member: Member | None) -> bool:
        may = not self._relaying.only and peer not in self._unpunched()
        return may and "symmetric" not in (self.kind, member.nat if member else None)

    def _unpunched(self) -> set[PeerId]:
        """Those with whom a punch failed not long ago."""
        since = trio.current_time() - _UNPUNCHED
        return {peer for peer, when in self._failed.items() if when > since}

    def follow(self, event: Event) -> None:
        """Take note of how punches end, and pass every event on."""
        if isinstance(event, Punched):
            if event.succeeded:
                self._failed.pop(event.peer_id, None)
            else:
                self._failed[event.peer_id] = trio.current_time()
        self._emit(event)
