"""Finding the run and its members: bootstrap addresses, peers of earlier days, the DHT.

The rule: every address tried ends as a contact or as a named cause; a node that has members goes on
looking for more now and then, so that a mesh that fell apart finds together again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from nolocod.errors import (
    InvitationOverError,
    LocalError,
    ManifestError,
    NetworkKeyError,
    NoBootstrapError,
    NotAllowedError,
    NotInvitedError,
    OtherRunError,
    PeerInvitationOverError,
    PeerNetworkKeyError,
    PeerNotAllowedError,
    PeerNotInvitedError,
    PeerTooSlowError,
    PeerUnavailableError,
    PeerVersionError,
    RemoteError,
    VersionError,
    WrongRunError,
)
from nolocod.events import Troubled
from nolocod.identity import short
from nolocod.p2p.info import fetch_info

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from nolocod.events import Emit
    from nolocod.identity import PeerId
    from nolocod.manifest import Sealed
    from nolocod.p2p.dht import Dht
    from nolocod.p2p.gossip import Gossip
    from nolocod.p2p.host import Host
    from nolocod.p2p.requests import Terms
    from nolocod.p2p.timing import Timing

Contact = tuple["PeerId", tuple[str, ...]]
"""A peer and where to dial it."""

_SHUT_OUT: dict[type[RemoteError], type[LocalError]] = {
    PeerNetworkKeyError: NetworkKeyError,
    PeerNotAllowedError: NotAllowedError,
    PeerNotInvitedError: NotInvitedError,
    PeerInvitationOverError: InvitationOverError,
}
"""What it means for this node when every peer that answers keeps it out for the same reason."""
_FINAL = (ManifestError, VersionError, OtherRunError, PeerVersionError, PeerNetworkKeyError, PeerNotAllowedError)
"""What asking again does not change."""
_RETRY = 0.5
_REMEMBERED_AT_ONCE = 8


async def find_run(host: Host, contacts: Sequence[Contact], terms: Terms, seconds: float) -> Sealed:
    """Ask all contacts at once which run they are in; the first good answer wins.

    A peer that does not answer yet is asked again until `seconds` are over: it may just be starting.
    Raises NoBootstrapError with each address's cause, or what all of them gave: WrongRunError, VersionError,
    ManifestError; or what all that answered gave: NetworkKeyError, NotAllowedError.
    """
    causes: dict[PeerId, LocalError | RemoteError] = {}
    found: list[Sealed] = []

    async def query(contact: Contact) -> None:
        peer, addresses = contact
        while True:
            try:
                found.append(await fetch_info(host, peer, addresses, terms))
            except _FINAL as error:
                causes[peer] = error
                return
            except RemoteError as error:
                causes[peer] = error
            else:
                scope.cancel()
            await trio.sleep(_RETRY)

    with trio.move_on_after(seconds) as scope:
        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(query, contact)
    if found:
        return found[0]
    raise verdict(contacts, causes)


def verdict(contacts: Sequence[Contact], causes: dict[PeerId, LocalError | RemoteError]) -> LocalError:
    """What it means that no contact would have us."""
    errors = list(causes.values())
    words = " ".join(
        f"{addresses[0] if addresses else short(peer)}: {causes[peer].cause if peer in causes else 'timed out.'}"
        for peer, addresses in contacts
    )
    everybody = bool(contacts) and len(errors) == len(contacts)
    if everybody and all(isinstance(error, OtherRunError) for error in errors):
        return WrongRunError(words)
    if everybody and all(isinstance(error, (PeerVersionError, VersionError)) for error in errors):
        return VersionError(words)
    if everybody and all(isinstance(error, ManifestError) for error in errors):
        return ManifestError(words)
    answers = [error for error in errors if not isinstance(error, (PeerUnavailableError, PeerTooSlowError))]
    for theirs, ours in _SHUT_OUT.items():
        if answers and all(isinstance(error, theirs) for error in answers):
            return ours(words)
    return NoBootstrapError(words or "no bootstrap address was given, and no peer is remembered.")


class Discovery:
    """Keeps a node that is in a run supplied with members. `dht` is filled in when the DHT is up."""

    def __init__(
        self,
        gossip: Gossip,
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
        if not contacts:
            return
        causes = await self._contact_all(contacts)
        if causes is None:
            return
        asked = self._bootstrap or contacts
        named = verdict(asked, {peer: causes[peer] for peer, _ in asked if peer in causes})
        if isinstance(named, NoBootstrapError):
            self._emit(Troubled(named.code, named.cause))
        else:
            raise named

    async def _contact_all(self, contacts: Sequence[Contact]) -> dict[PeerId, LocalError | RemoteError] | None:
        """Contact all at once, until one answers: None then, else the causes of those that failed in time."""
        causes: dict[PeerId, LocalError | RemoteError] = {}
        answered = trio.Event()

        async def attempt(peer: PeerId, addresses: Sequence[str]) -> None:
            try:
                await self._gossip.contact(peer, addresses)
            except RemoteError as error:
                causes[peer] = error
            else:
                answered.set()
                scope.cancel()

        with trio.move_on_after(self._timing.bootstrap) as scope:
            async with trio.open_nursery() as nursery:
                for peer, addresses in contacts:
                    nursery.start_soon(attempt, peer, addresses)
        return None if answered.is_set() else causes

    async def run(self, present: Callable[[], Sequence[Contact]]) -> None:
        """Look for members until cancelled: often while there are none, now and then when there are."""
        pause = self._timing.search
        while True:
            await trio.sleep(pause * self._rng.uniform(0.8, 1.2))
            known = present()
            if self.dht is not None and known:
                await self._refresh(self.dht, known)
            alone = not known
            members = {peer for peer, _ in known}
            bootstrap = {peer: addresses for peer, addresses in self._bootstrap if peer not in members}
            others = [contact for contact in self._remembered() if contact[0] not in {*members, *bootstrap}]
            count = min(len(others), _REMEMBERED_AT_ONCE if alone else 1)
            # the bootstraps always: they are few, and where the parts of a mesh meet again
            chosen = [*bootstrap.items(), *self._rng.sample(others, count)]
            if chosen:
                await self._contact_all(chosen)
            pause = self._timing.search if alone else self._timing.widen

    async def _refresh(self, dht: Dht, known: Sequence[Contact]) -> None:
        try:
            await dht.refresh(known)
            providers = await dht.providers()
        except RemoteError:
            return  # the DHT is the second way; the first goes on
        strangers = {peer: addresses for peer, addresses in providers.items() if peer not in {peer for peer, _ in known}}
        await self._contact_all(list(strangers.items())[:_REMEMBERED_AT_ONCE])
