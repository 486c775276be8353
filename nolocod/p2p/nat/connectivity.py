"""The ways between this node and others: straight, punched, or through relays; and what it gives of these itself.

The rule: who is reached straight relays for others, if its owner lets it, and holds no places; everybody else holds
places and gives none. A node that was given --announce, or that has a public address on an interface, counts as
reached straight until it has learned better; any other waits for a peer that dialled it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from nolocod.errors import RelayBudgetError
from nolocod.identity import short
from nolocod.observe.events import Punched
from nolocod.p2p.nat.circuit_messages import HOP
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient, RelayLimits
from nolocod.p2p.nat.classify import needs_relay
from nolocod.p2p.nat.hole_punching import HolePuncher
from nolocod.p2p.nat.reachability import Reachability
from nolocod.p2p.nat.reservations import Candidate, Needs, ReservationKeeper
from nolocod.p2p.transport.multiaddrs import endpoint, public

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
"""Seconds for which a failed punch counts: NATs change, and so does luck."""
_KNOWN = 512
_TOLD = 8
"""Addresses in a heartbeat."""
_CIRCUITS_TOLD = 4
_OVERHEAD = 1.05
"""Bytes on the wire per byte of an exchange: sealing, frames, hashes."""


class Connectivity:
    """How one node reaches others and is reached. `run` keeps it so; `mesh` asks it about members."""

    def __init__(self, host: Host, config: MeshSettings, bootstrap: Sequence[Contact], rng: random.Random, emit: Emit) -> None:
        self.members: Callable[[], Iterable[Member]] = tuple
        """Live members, of whom some relay."""
        self.resting: Callable[[], bool] = lambda: False
        """Whether our owner wants nothing done for others now."""
        self.bulk = 0
        """Bytes of an exchange, one way; 0 while that is not known."""
        self._host = host
        self._config = config
        self._bootstrap = dict(bootstrap)
        self._emit = emit
        self._failed: dict[PeerId, float] = {}  # when punching failed, in trio's time
        relaying = config.relaying
        self._client = RelayClient(host)
        self._reach = Reachability(host, config, self.follow, rng)
        self._puncher = HolePuncher(host, self.follow)
        self._keeper = ReservationKeeper(host, self._client, Needs(self._want, self._candidates), self.follow, rng)
        seconds = RelayLimits.circuit_seconds
        self._relay = Relay(
            host,
            RelayLimits(
                reservations=relaying.reservations,
                circuits=relaying.circuits,
                circuit_bytes=int(relaying.rate * seconds),
                circuit_seconds=seconds,
                rate=relaying.rate,
            ),
            lambda: self.gives,
        )

    def serve(self, guard: Callable[[Handler], Handler]) -> None:
        """Take circuits and give them, as far as the owner lets us; what is given is broken off by `guard`."""
        self._puncher.serve()
        if self._config.relaying.use:
            self._client.serve()
            self._host.through = self._client.connect
        if self._config.relaying.only:
            self._host.straight_to = self._may_connect_straight
        if self._config.relaying.serve:
            self._host.serve(HOP, guard(self._relay.handle))

    async def run(self) -> None:
        """Find out how we are reached, keep places at relays, and tell what is given, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reach.run)
            nursery.start_soon(self._keeper.run)
            nursery.start_soon(self._relay.run, self.follow)

    def wake(self) -> None:
        """The network is another one now: what failed is tried again."""
        self._failed.clear()
        self._keeper.wake()

    # --- what we are --------------------------------------------------------------------------------

    @property
    def kind(self) -> NatClass | None:
        """How others reach us; None while we do not know."""
        return self._reach.kind or ("public" if self._declared() else None)

    @property
    def gives(self) -> bool:
        """Whether we give reservations now."""
        relaying = self._config.relaying
        return relaying.serve and not relaying.only and self.kind == "public" and not self.resting()

    @property
    def told(self) -> tuple[str, ...]:
        """Our addresses for a heartbeat, which has room for eight: circuits have theirs in any case."""
        circuits = self._host.circuits[:_CIRCUITS_TOLD]
        straight = [address for address in self._host.announced if address not in self._host.circuits]
        return (*straight[: _TOLD - len(circuits)], *circuits)

    def _declared(self) -> bool:
        """Whether we may take it that we are public until we know better."""
        if self._config.announce:
            return True
        if self._config.relaying.only:
            return False
        found = [endpoint(address) for address in self._host.local]
        return any(public(place[0]) for place in found if place is not None)

    def _want(self) -> Want:
        relaying = self._config.relaying
        if not relaying.use:
            return "no"
        if relaying.only:
            return "yes"
        kind = self.kind
        return "no" if kind == "public" else "perhaps" if kind is None else "yes"

    def _candidates(self) -> list[Candidate]:
        members = {member.peer_id: member for member in self.members()}
        found = [Candidate(member.peer_id, member.addresses, member.relays) for member in members.values() if member.relays]
        for peer, addresses in self._bootstrap.items():
            member = members.get(peer)
            if member is None:
                found.append(Candidate(peer, addresses))
            elif not member.relays:
                found.append(Candidate(peer, member.addresses, gives=False))
        return found

    def _may_connect_straight(self, peer: PeerId) -> bool:
        return peer in self._bootstrap or any(member.peer_id == peer and member.relays for member in self.members())

    # --- what members are to us -----------------------------------------------------------------------

    def carried(self, members: Iterable[Member]) -> set[PeerId]:
        """Those of `members` that only a relay reaches."""
        kind, since = self.kind, trio.current_time() - _UNPUNCHED
        failed = {peer for peer, when in self._failed.items() if when > since}
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
            self._note_failure(peer)
        if self._host.peers().get(peer) != "relayed":
            return
        carries = self._client.carries(peer)
        if carries is not None and carries < 2 * self.bulk * _OVERHEAD:
            raise RelayBudgetError(
                f"{short(peer)} is reached only through a relay that carries {carries / 1e6:.0f} MB, "
                f"and an exchange takes {2 * self.bulk / 1e6:.0f} MB."
            )

    def _may_punch(self, peer: PeerId, member: Member | None) -> bool:
        if self._config.relaying.only or trio.current_time() - self._failed.get(peer, -_UNPUNCHED) < _UNPUNCHED:
            return False
        return "symmetric" not in (self.kind, member.nat if member else None)

    def follow(self, event: Event) -> None:
        """Take note of how punches end, and pass every event on."""
        if isinstance(event, Punched):
            if event.succeeded:
                self._failed.pop(event.peer_id, None)
            else:
                self._note_failure(event.peer_id)
        self._emit(event)

    def _note_failure(self, peer: PeerId) -> None:
        self._failed.pop(peer, None)
        self._failed[peer] = trio.current_time()
        if len(self._failed) > _KNOWN:
            del self._failed[next(iter(self._failed))]
