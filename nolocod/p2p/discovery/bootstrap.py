"""Finding the run and its members: through bootstrap addresses, remembered peers and the DHT.

The rule: every address tried ends as a contact or as a named cause. A node that has members goes on looking for more
now and then, so that a mesh that fell apart comes together again. Whom gossip has heard of lately is not asked: what
bootstraps and the DHT carry does not grow with a swarm that holds together.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from nolocod import errors
from nolocod.identity import short
from nolocod.observe.events import RunFound, Troubled
from nolocod.p2p.discovery.kademlia import look_up
from nolocod.p2p.discovery.run_info import fetch_info
from nolocod.run.manifest import RUN_ID_DIGITS, RunId

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.p2p.discovery.kademlia import Dht
    from nolocod.p2p.host import Host
    from nolocod.p2p.membership.gossip_service import GossipService
    from nolocod.p2p.timing import Timing
    from nolocod.p2p.transport.requests import Terms
    from nolocod.run.manifest import Sealed

Contact = tuple["PeerId", tuple[str, ...]]
"""A peer and where to dial it."""

_THEIRS = (errors.OtherRunError, errors.PeerVersionError, errors.PeerNetworkKeyError, errors.PeerNotAllowedError)
_FINAL = (errors.ManifestError, errors.VersionError, *_THEIRS)
"""What asking again does not change."""
_RETRY = 0.5
_OTHERS = 2.0
"""Seconds that the other contacts are given to contradict, where only the beginning of the run's id is known."""
_REMEMBERED_AT_ONCE = 8
_HINTS = 8
"""Peers that are asked because a server of the DHT named them."""


async def find_run(host: Host, contacts: Sequence[Contact], terms: Terms, seconds: float, emit: Emit) -> Sealed:
    """Ask all contacts at once which run they are in; the first good answer wins. Where `terms` name the run that is one about
    this run, and who is in another is told of; where they have the beginning of its id alone, all answers must agree.

    A peer that does not answer yet is asked again until `seconds` are over: it may just be starting. One that is in
    no run, or left ours, may still serve the DHT: where `terms` have the whole id, those that it names are asked too.
    Raises NoBootstrapError with each address's cause, or what all of them gave: WrongRunError, VersionError,
    ManifestError; or what all that answered gave: NetworkKeyError, NotAllowedError. UsageError for an ambiguous beginning.
    """
    causes: dict[PeerId, errors.LocalError | errors.RemoteError] = {}
    found: dict[RunId, Sealed] = {}
    wanted = terms.run_id or ""
    partial = 0 < len(wanted) < RUN_ID_DIGITS
    asked = {peer for peer, _ in contacts}
    named = frozenset(asked)

    async def follow(server: PeerId, run_id: RunId) -> None:
        with suppress(errors.RemoteError):
            hints = await look_up(host, server, run_id)
            for peer in [peer for peer in hints if peer not in asked][: max(_HINTS - len(asked - named), 0)]:
                asked.add(peer)
                nursery.start_soon(query, (peer, hints[peer]))

    async def query(contact: Contact) -> None:
        peer, addresses = contact
        while True:
            try:
                sealed = await fetch_info(host, peer, addresses, terms)
            except _FINAL as error:
                causes[peer] = error
                if isinstance(error, errors.OtherRunError):
                    emit(Troubled(error.code, f"{addresses[0] if addresses else peer}: {error.cause}"))
                return
            except errors.RemoteError as error:
                causes[peer] = error
                if wanted and not partial and peer in named and isinstance(error, errors.RefusedError):
                    await follow(peer, RunId(wanted))
                await trio.sleep(_RETRY)
            else:
                if not found and not wanted:
                    emit(RunFound(sealed.run_id, sealed.manifest.name, peer))
                found.setdefault(sealed.run_id, sealed)
                scope.deadline = min(scope.deadline, trio.current_time() + (_OTHERS if partial else 0))
                return

    with trio.move_on_after(seconds) as scope:
        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(query, contact)
    if partial and len(found) > 1:
        cause = f"several runs have an id that begins with {wanted}: {', '.join(found)}."
        raise errors.UsageError(cause, remedy="Give the whole id.")
    if found:
        return next(iter(found.values()))
    raise verdict(contacts, {peer: cause for peer, cause in causes.items() if peer in named})


def verdict(contacts: Sequence[Contact], causes: dict[PeerId, errors.LocalError | errors.RemoteError]) -> errors.LocalError:
    """What it means that no contact would have us."""
    given = list(causes.values())
    words = " ".join(
        f"{addresses[0] if addresses else short(peer)}: {causes[peer].cause if peer in causes else 'timed out.'}"
        for peer, addresses in contacts
    )
    everybody = bool(contacts) and len(given) == len(contacts)
    if everybody and all(isinstance(error, errors.OtherRunError) for error in given):
        return errors.WrongRunError(words)
    if everybody and all(isinstance(error, (errors.PeerVersionError, errors.VersionError)) for error in given):
        return errors.VersionError(words)
    if everybody and all(isinstance(error, errors.ManifestError) for error in given):
        return errors.ManifestError(words)
    answers = [error for error in given if not isinstance(error, (errors.PeerUnavailableError, errors.PeerTooSlowError))]
    for theirs, ours in errors.SHUT_OUT.items():  # everybody who answers keeps us out for the same reason
        if answers and all(isinstance(error, theirs) for error in answers):
            return ours(words)
    return errors.NoBootstrapError(words or "no bootstrap address was given, and no peer is remembered.")


class Discovery:
    """Keeps a node that is in a run supplied with members. `dht` is filled in when the DHT is up."""

    def __init__(
        self,
        gossip: GossipService,
        bootstrap: Sequence[Contact],
        remembered: Callable[[], Sequence[Contact]],
        rng: random.Random,
        timing: Timing,
        emit: Emit,
    ) -> None:
        self.dht: Dht | None = None
        self._gossip = gossip
        self._bootstrap = bootstrap
        self._remembered = remembered
        self._rng = rng
        self._timing = timing
        self._emit = emit

    async def enter(self) -> None:
        """Contact the bootstraps, else the remembered peers; return with the first that has us.

        Raises WrongRunError or VersionError when all bootstraps say so; NetworkKeyError, NotAllowedError,
        NotInvitedError or InvitationOverError when all that answer do. That none can be reached is told and no more: the
        node trains alone and goes on looking.
        """
        contacts = [*self._bootstrap, *self._remembered()[:_REMEMBERED_AT_ONCE]]
        causes = await self._contact_all(contacts) if contacts else None
        if causes is None:
            return
        asked = self._bootstrap or contacts
        named = verdict(asked, {peer: causes[peer] for peer, _ in asked if peer in causes})
        if not isinstance(named, errors.NoBootstrapError):
            raise named
        self._emit(Troubled(named.code, named.cause))

    async def _contact_all(self, contacts: Sequence[Contact]) -> dict[PeerId, errors.LocalError | errors.RemoteError] | None:
        """Contact all at once, until one answers: None then, else the causes of those that failed in time."""
        causes: dict[PeerId, errors.LocalError | errors.RemoteError] = {}
        answered = False

        async def attempt(peer: PeerId, addresses: Sequence[str]) -> None:
            nonlocal answered
            try:
                await self._gossip.contact(peer, addresses)
            except errors.RemoteError as error:
                causes[peer] = error
            else:
                answered = True
                scope.cancel()

        with trio.move_on_after(self._timing.bootstrap) as scope:
            async with trio.open_nursery() as nursery:
                for peer, addresses in contacts:
                    nursery.start_soon(attempt, peer, addresses)
        return None if answered else causes

    async def run(self, present: Callable[[], Sequence[Contact]]) -> None:
        """Look for members until cancelled: often while there are none, now and then when there are."""
        pause = self._timing.search
        looked = -math.inf
        while True:
            await self._rest(pause * self._rng.uniform(0.8, 1.2), present)
            known = present()
            alone, members, named = not known, dict(known), dict(self._bootstrap)
            bootstrap, others = (
                [one for one in contacts if one[0] not in members and not self._gossip.knows(one[0])]
                for contacts in (self._bootstrap, [one for one in self._remembered() if one[0] not in named])
            )
            # the bootstraps always, where they are no members: they are few, and where the parts of a mesh meet again
            chosen = [*bootstrap, *self._rng.sample(others, min(len(others), _REMEMBERED_AT_ONCE if alone else 1))]
            if chosen:
                await self._contact_all(chosen)
            if self.dht is not None:
                with suppress(errors.RemoteError):
                    await self.dht.switch_mode()  # long before the next look: others can reach us by now, or no more
                if alone or trio.current_time() - looked >= self._timing.lookup:
                    looked = trio.current_time()
                    await self._look_up(self.dht, [*known, *chosen])
            pause = self._timing.search if alone else self._timing.widen

    async def _rest(self, seconds: float, present: Callable[[], Sequence[Contact]]) -> None:
        """Sleep so long, or until there are no members any more: who has lost all looks for them at once."""
        due = trio.current_time() + seconds
        while (left := due - trio.current_time()) > 0:
            had = bool(present())
            await trio.sleep(min(left, self._timing.search / 2))
            if had and not present():
                return

    async def _look_up(self, dht: Dht, servers: Sequence[Contact]) -> None:
        """Tell the DHT of us, and contact those that it names; `servers` are where we enter it."""
        try:
            await dht.refresh(servers)
            providers = await dht.providers()
        except errors.RemoteError:
            return  # the DHT is the second way; the first goes on
        unknown = [contact for contact in providers.items() if not self._gossip.knows(contact[0])]
        self._rng.shuffle(unknown)  # so that false records do not keep the true ones from their turn
        if unknown:
            await self._contact_all(unknown[:_REMEMBERED_AT_ONCE])
