"""The mesh: what the rest of a node sees of its peers. Host, membership, gossip and discovery put together.

The rule: a mesh is opened without a run, so that a newcomer can ask for one; `enter` makes this node a
member, `leave` says that it goes. Streams are opened by peer id alone.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from nolocod.errors import NolocodError, PeerTooSlowError, PeerUnavailableError, RelayBudgetError, RemoteError, VersionError
from nolocod.p2p.discovery.address_book import AddressBook, save_aside
from nolocod.p2p.discovery.bootstrap import Discovery, find_run
from nolocod.p2p.discovery.kademlia import open_dht
from nolocod.p2p.discovery.run_info import serve_info
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.keepalive import drop_the_dead, keep_alive
from nolocod.p2p.limits.address_groups import address_group, counted_with
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.limits.connection_manager import KEPT, MEMBER, PARTNER, STRANGER, ConnectionLimits
from nolocod.p2p.limits.rate_limits import NORMAL, Rate
from nolocod.p2p.membership.admission import Admission, InvitedAdmission
from nolocod.p2p.membership.amended import AmendedRun
from nolocod.p2p.membership.gossip_service import GossipService
from nolocod.p2p.membership.heartbeat import OwnHeartbeat, new_life
from nolocod.p2p.membership.peer_scoring import Conduct, Records, Reputation, conduct_of
from nolocod.p2p.membership.peer_selection import PeerSelection
from nolocod.p2p.membership.run_clock import believed_round, pace_in
from nolocod.p2p.membership.table import Membership
from nolocod.p2p.nat.connectivity import Connectivity
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.multiaddrs import split, via
from nolocod.p2p.transport.requests import Terms, turn_away
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, INFO, REGISTRY, SNAPSHOT
from nolocod.proto.envelope import MAJOR
from nolocod.proto.types import Built
from nolocod.run.credentials import accept, network_key, prologue, read_allow_list
from nolocod.run.invitations import unchecked
from nolocod.run.manifest import RunId

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from nolocod.identity import Identity, PeerId
    from nolocod.observe.events import Emit, Reach
    from nolocod.p2p.discovery.bootstrap import Contact
    from nolocod.p2p.limits.bandwidth import Meter
    from nolocod.p2p.settings import MeshSettings
    from nolocod.p2p.transport.stream import Handler, Stream
    from nolocod.paths import DataDir
    from nolocod.proto.types import Member, Standing
    from nolocod.run.manifest import Sealed

_SAVE_EVERY, _FIRST_SAVE = 30.0, 0.5
_FAREWELL = 1.5
_REMEMBERED = 8
"""Peers of earlier days that are tried at once."""
_BULK = frozenset({EXCHANGE, SNAPSHOT})


@asynccontextmanager
async def open_mesh(
    config: MeshSettings,
    identity: Identity,
    emit: Emit,
    *,
    rng: random.Random,
    timing: Timing | None = None,
    meter: Meter | None = None,
    interruptible: Callable[[Handler], Handler] = lambda handler: handler,
) -> AsyncIterator[Mesh]:
    """Listen and be ready to find a run; what is sent and received goes by `meter`.

    `interruptible` wraps the handlers of what this node does for others alone, so that it can be broken off. Relays in the
    addresses of a token are bootstraps too: in a run by invitation they carry for those that they know. Raises PortTakenError
    or UsageError, and what `credentials.accept` raises for an invitation.
    """
    access = config.access
    token = accept(config.paths, access.invite, identity.peer_id, time.time()) if access.invite else None
    bootstrap = [contact(text) for text in (*config.bootstrap, *(token.bootstrap if token else ()))]
    bootstrap += [(found[0], (found[1],)) for _, (address,) in bootstrap if token and (found := via(address))]
    book = AddressBook(config.paths.peers, emit)
    raised: NolocodError | None = None
    key = network_key(config.paths, access.network_key)
    gater = ConnectionGater.reading(prologue(key), access.allow, read_allow_list)
    limits = HostLimits(connections=config.connections, inbound=ConnectionLimits(per_source=config.connections_per_address))
    host_of = open_host(identity, config.listen, config.announce, emit, limits, meter, gater)
    async with host_of as host, trio.open_nursery() as nursery:
        nursery.start_soon(gater.follow, host.peers, host.disconnect, emit)
        host.vouch((*config.announce, *(address for _, (address,) in bootstrap)))
        connectivity = Connectivity(host, config, bootstrap, rng, emit)
        connectivity.serve(interruptible)
        nursery.start_soon(connectivity.run)
        try:
            run_id = RunId(config.run or (unchecked(token).run_id if token else ""))
            parts = _Parts(bootstrap, nursery, rng, timing or Timing(), emit, connectivity, config.paths, config.name, run_id)
            yield Mesh(host, identity, book, parts)
        except NolocodError as error:
            raised = error  # on its own, not in a group for each nursery around it
        nursery.cancel_scope.cancel()
    if raised is not None:
        raise raised


def contact(text: str) -> Contact:
    """Read a bootstrap address; UsageError if it is none."""
    peer, address = split(text)
    return peer, (address,)


@dataclass(frozen=True)
class _Parts:
    """What a mesh is given by those who open it."""

    bootstrap: Sequence[Contact]
    nursery: trio.Nursery
    rng: random.Random
    timing: Timing
    emit: Emit
    connectivity: Connectivity
    paths: DataDir
    name: str
    run_id: RunId
    """The run that this node was invited to or is to join, or the beginning of its id; empty for any."""


class Mesh:
    """This node among its peers. Made by `open_mesh`."""

    def __init__(self, host: Host, identity: Identity, book: AddressBook, parts: _Parts) -> None:
        self._host = host
        self._identity = identity
        self._book = book
        self._parts = parts
        self._table = Membership(identity.peer_id, "", parts.timing)
        self._gossip: GossipService | None = None
        self._admission = Admission()
        self._reputation = Reputation(parts.emit, group_of=lambda peer: address_group(host.way(peer)[1]))
        self._selection = PeerSelection(
            identity.peer_id, parts.rng, self._reputation, lambda: self._table.size(), lambda: self._table.answers,
            lambda: self._reputation.shunned(time.time()),
        )  # fmt: skip
        self._records = Records(parts.paths.reputation, self._reputation, time.time())
        self._staleness, self._phase, self.built = 0, 0.0, Built()
        self._work = trio.CancelScope()
        self.cloned = trio.Event()
        """Set once another node, that began before this one, is known to speak with our key."""
        host.dialer.connection_manager.rank = self._rank

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs that others can give as --bootstrap, best first."""
        return self._host.addresses

    # --- the run ----------------------------------------------------------------------------------

    async def find_run(self) -> Sealed:
        """Ask bootstraps and remembered peers which run this is.

        Raises NoBootstrapError with each address's cause, WrongRunError, VersionError or ManifestError.
        """
        parts, contacts = self._parts, dict(self._known())
        terms = Terms(self._identity, parts.run_id, parts.timing.request)
        return await find_run(self._host, list(contacts.items()), terms, parts.timing.bootstrap, parts.emit)

    async def enter(self, sealed: Sealed, own: Callable[[], tuple[Standing, str]]) -> AmendedRun:
        """Become a member of the run: gossip, answer newcomers, look for others. Returned is the run as its owners amend it.

        `own` tells our standing and state ("joining", "training", "paused", "finished") for every heartbeat.
        Returns once a peer has us, or none could be reached in time. Raises VersionError or WrongRunError
        when the manifest or every bootstrap says so; what Admission and Discovery.enter raise if others keep us out.
        """
        if sealed.manifest.protocol != MAJOR:
            raise VersionError(f"the run needs protocol version {sealed.manifest.protocol}, this release speaks {MAJOR}.")
        parts = self._parts
        self._staleness = sealed.manifest.outer.staleness
        if sealed.manifest.access == "invited":
            self._admission = InvitedAdmission(sealed, self._identity.peer_id, parts.paths)
            parts.connectivity.relay.strangers = 0
        trust, reputation = sealed.manifest.trust, self._reputation
        reputation.newcomers, reputation.judging = trust.probation, trust.reputation
        own_id, ban = self._identity.peer_id, lambda peer: reputation.objection(peer, time.time())
        self._table = Membership(own_id, sealed.run_id, parts.timing, self._admission, ban, reputation.committed)
        self._host.refuses = lambda peer: reputation.banned(peer, time.time()) > 0
        self._host.judge = self.blame
        self._host.memory.is_partner = lambda peer: reputation.committed(peer) > 0
        connectivity = parts.connectivity
        connectivity.members, connectivity.resting = self.live, lambda: own()[1] == "paused"
        own_heartbeat = OwnHeartbeat(
            self._identity, sealed.run_id, own, lambda: connectivity.heartbeat_addresses,
            reach=lambda: connectivity.kind, relays=lambda: connectivity.relays, admission=self._admission.shown,
            life=new_life(time.time(), parts.rng), phase=lambda: self._phase, name=parts.name, built=lambda: self.built,
        )  # fmt: skip
        run = AmendedRun(sealed, parts.paths.amendments, lambda: own()[0].round, parts.emit)
        gossip = GossipService(self._host, self._table, own_heartbeat, parts.rng, parts.timing, parts.emit, run)
        self._gossip = gossip
        gossip.cloned, gossip.judge = self.cloned, self.judge
        connectivity.client.introduce = lambda relay: self._greet(gossip, relay, ())
        terms = Terms(self._identity, sealed.run_id, parts.timing.request)
        self._host.serve(INFO, partial(serve_info, terms=terms, sealed=sealed))
        self._host.serve(GOSSIP, gossip.handle, Rate(3 / parts.timing.heartbeat, NORMAL.burst))  # it asks somebody once a beat
        discovery = Discovery(gossip, (*parts.bootstrap, *run.contacts), self._book.recent, parts.rng, parts.timing, parts.emit)
        ready = trio.Event()
        parts.nursery.start_soon(self._run, gossip, discovery, run, ready)
        await ready.wait()
        await discovery.enter()
        await self._save()
        return run

    async def _run(self, gossip: GossipService, discovery: Discovery, run: AmendedRun, ready: trio.Event) -> None:
        with self._work:
            dht_of = open_dht(self._host, run.sealed.run_id, lambda: self._parts.connectivity.kind == "public")
            async with dht_of as discovery.dht, trio.open_nursery() as nursery:
                nursery.start_soon(gossip.run, nursery)
                nursery.start_soon(discovery.run, self._contacts)
                nursery.start_soon(keep_alive, self._host, self._parts.timing, gossip.heard_at, self.suspect)
                nursery.start_soon(self._remember)
                nursery.start_soon(self._roam, gossip)
                nursery.start_soon(self._admission.run, self._parts.emit)
                nursery.start_soon(run.run)
                ready.set()

    async def leave(self) -> None:
        """Tell the others, remember them, and stop; a clone without a word: the other node with our identity stays."""
        if self._gossip is not None and not self.cloned.is_set():
            await self._gossip.leave(_FAREWELL)
        await self._save()
        self._work.cancel()

    async def _save(self) -> None:
        """Verified members; while we know a few only, those that are connected too: a founder has verified nobody at first."""
        few = len(self._book.recent()) < _REMEMBERED
        for member in self.live():
            if member.verified or (few and member.reach):
                self._book.remember(member.peer_id, member.addresses, time.time())
        await save_aside(self._book.save, self._parts.emit)
        await save_aside(self._records.save, self._parts.emit)

    async def _remember(self) -> None:
        """Save now and then, and at once whom we know first: a node that is killed then finds back without a bootstrap."""
        while True:
            await trio.sleep(min(_SAVE_EVERY, self._parts.timing.live) if self._book.recent() else _FIRST_SAVE)
            await self._save()

    def _contacts(self) -> list[Contact]:
        """Members that are there for certain."""
        return [(member.peer_id, member.addresses) for member in self.live() if member.verified or member.reach]

    async def _roam(self, gossip: GossipService) -> None:
        """Come back to the others after our network was another one, or none, for a while."""
        while True:
            await trio.sleep(self._parts.timing.roam)
            moved = self._host.look_again()
            if moved:
                await drop_the_dead(self._host, self._parts.timing.pong)
            if moved or not self._host.peers():
                self._parts.connectivity.wake()
                with trio.move_on_after(self._parts.timing.bootstrap):
                    async with trio.open_nursery() as nursery:
                        for peer, addresses in self._known():
                            nursery.start_soon(self._greet, gossip, peer, addresses)

    async def _greet(self, gossip: GossipService, peer: PeerId, addresses: Sequence[str]) -> None:
        with suppress(RemoteError):
            await gossip.contact(peer, addresses)

    def _known(self) -> list[Contact]:
        """Where to look for the run: those seen last, and the bootstraps."""
        return [*self._book.recent()[:_REMEMBERED], *self._parts.bootstrap]

    # --- the members ------------------------------------------------------------------------------

    def live(self) -> list[Member]:
        """All live members but ourselves."""
        return self._table.live(trio.current_time(), self._host.peers())

    def partner(self, own: Standing, avoid: Collection[PeerId] = (), apart: Collection[PeerId] = ()) -> PeerId | None:
        """Draw a live training member within the run's staleness limit, or None; those that only a relay reaches less often."""
        members = self.live()
        shunned = {*avoid, *self._table.suspected(trio.current_time())}
        carried = self._parts.connectivity.behind_relays(members)
        return self._selection.draw(members, own, self._staleness, shunned, carried, apart)

    def admits(self, peer: PeerId, own: Standing, apart: Collection[PeerId], *, late: bool) -> bool:
        """Whether an offer of `peer` may be taken: of members only, in its hour or after our own draws have failed (`late`)."""
        if not self._table.known(peer, trio.current_time()):
            return False
        return self._selection.admits(peer, self.live(), own, self._staleness, apart, late=late)

    def met(self, peer: PeerId, *, offered: bool) -> None:
        """An exchange with `peer` was committed, that it `offered`."""
        self._selection.met(peer, self.live(), offered=offered)

    def believed(self, peer: PeerId, told: int, phase: float) -> int:
        """The round to which a step with `peer`, who says that it is at `told`, takes us; a round takes `phase` seconds."""
        return believed_round(self.live(), phase, peer, told)

    def pace(self, number: int, phase: float) -> tuple[float, int]:
        """Tell others that our phases take `phase` seconds (0: not known); return how long the run's are, as soon as we know
        the run, and by how many rounds one at round `number` is before the others."""
        self._phase = phase
        return pace_in(self._table, trio.current_time(), number, phase)

    def expect(self, size: int) -> None:
        """Exchanges are of `size` bytes each way: a relay that carries less is not tried."""
        self._parts.connectivity.bulk = size

    def suspect(self, peer: PeerId) -> None:
        """This peer could not be reached: no partner until it is heard again, and for a growing while."""
        self._table.suspect(peer, trio.current_time())

    def judge(self, peer: PeerId, conduct: Conduct) -> None:
        """Take note of what a peer did: whether it is a member or not."""
        self._reputation.judge(peer, conduct, time.time())
        if conduct is Conduct.COMMITTED:
            self._table.met(peer, *self._host.way(peer))

    def blame(self, peer: PeerId, error: RemoteError | None) -> None:
        """Take note of what `error` says of a peer; None: it asked too often."""
        if (conduct := conduct_of(error) if error is not None else Conduct.FLOODED) is not None:
            self.judge(peer, conduct)

    def probation(self, peer: PeerId) -> bool:
        """Whether this peer is to prove itself yet (manifest: `trust.probation`)."""
        return self._reputation.probation(peer)

    def origin(self, peer: PeerId) -> tuple[str, bool]:
        """The address group from which `peer` is connected, its own id where it has none; and whether it is verified."""
        return counted_with(peer, self._host.way(peer)[1]), peer in self._table.verified()

    def connections(self) -> dict[PeerId, Reach]:
        """Who is connected, and how."""
        return self._host.peers()

    def _rank(self, peer: PeerId) -> int:
        """What a connection with `peer` is worth."""
        if (refused := self._host.refuses(peer)) or self._parts.connectivity.needs(peer):
            return STRANGER if refused else KEPT
        invited = isinstance(self._admission, InvitedAdmission)  # then it is admission that counts, however large the run is
        member = self._table.objection(peer) is None and (invited or self._table.known(peer, trio.current_time()))
        return STRANGER if not member else PARTNER if self._reputation.committed(peer) else MEMBER

    def clock_offset(self) -> float:
        """The median of the verified members' clocks minus ours, in seconds; 0 without any."""
        return self._table.clock_offset()

    # --- streams ----------------------------------------------------------------------------------

    async def dial(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to a member; one for bulk goes straight where that can be had.

        Raises PeerUnavailableError, PeerTooSlowError or RefusedError, of which RelayBudgetError and BannedError are two.
        """
        if (ban := self._table.ban(peer)) is not None:
            raise ban
        known = (*self._table.addresses(peer), *self._book.addresses(peer))
        try:
            if protocol in _BULK:
                await self._introduce(peer, known)
                await self._host.connect(peer, known)
                member = next((member for member in self.live() if member.peer_id == peer), None)
                await self._parts.connectivity.straighten(peer, member, self._parts.timing.punch)
            stream = await self._host.open_stream(peer, protocol, known)
        except (PeerUnavailableError, PeerTooSlowError, RelayBudgetError):
            self.suspect(peer)
            raise
        self._table.met(peer, *self._host.way(peer))
        return stream

    async def _introduce(self, peer: PeerId, known: Sequence[str]) -> None:
        """Show our heartbeat to a peer that has not seen it: in a large run it may never have heard of us."""
        gossip = self._gossip
        if gossip is None:
            return
        if not self._host.connected(peer) or peer not in gossip.heard_directly:
            await gossip.contact(peer, known)

    async def visit(self, peer: PeerId, protocol: str, addresses: Sequence[str]) -> Stream:
        """Open a stream to anybody at these addresses. Raises what `dial` raises."""
        return await self._host.open_stream(peer, protocol, addresses)

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of `protocol`; only the registry's go to anybody, where the run is by invitation. A RemoteError out
        of `handler` costs the peer its stream."""

        async def to_members(stream: Stream) -> None:
            if (objection := self._table.objection(stream.remote)) is None:
                await handler(stream)
            else:
                terms = Terms(self._identity, self._table.run_id, self._parts.timing.request)
                await turn_away(stream, objection, terms)

        self._host.serve(protocol, handler if protocol == REGISTRY else to_members)
