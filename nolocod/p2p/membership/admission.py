"""Who may be a member of the run: anybody (`Admission`), or whoever its owner invited (`InvitedAdmission`).

The rule: a peer counts as admitted for what it showed in its own signed heartbeat, as long as its invitation lasts and
the owner has not taken it back; whatever it asks of us is looked at again. The owner needs no admission.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import trio

from nolocod.disk import write_private
from nolocod.errors import (
    InvitationOverError,
    NotInvitedError,
    PeerInvitationOverError,
    PeerNotInvitedError,
    RefusedError,
)
from nolocod.identity import PeerId, short
from nolocod.observe.events import Troubled
from nolocod.p2p.membership.left_by_commands import keep_looking
from nolocod.run import credentials
from nolocod.run.invitations import open_admission, open_revocations

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.events import Emit
    from nolocod.paths import DataDir
    from nolocod.run.invitations import Invitation
    from nolocod.run.manifest import Sealed

T = TypeVar("T")

_KEPT = 4096
"""Peers whose admission is kept in mind while it counts, and as many that were refused."""


class Admission:
    """For an open run: anybody may be a member."""

    shown = b""
    """Our own admission, as we show it to others."""
    revocations = b""
    """What we tell others is revoked, sealed by the owner; empty while nothing is."""

    def admits(self, peer: PeerId, admission: bytes, wall: float) -> bool:
        """Whether `peer` may be a member by the admission that it shows, at the time of day `wall`."""
        return True

    def objection(self, peer: PeerId) -> RefusedError | None:
        """Why nothing of the run is given to `peer` now, by what it has shown so far; None if it may have it."""
        return None

    def learn(self, raw: bytes) -> bool:
        """Take in revocations that a peer told; whether they are valid and new. Raises RemoteError."""
        return False

    async def run(self, emit: Emit) -> None:
        """Keep what is revoked the same as in the data directory, until cancelled."""


class InvitedAdmission(Admission):
    """For run `sealed`, on behalf of node `own`. `clock` gives the time of day.

    Raises InvitationError, InvitationOverError or NotInvitedError if the node itself may not be a member, DataDirError
    for files that are damaged.
    """

    def __init__(self, sealed: Sealed, own: PeerId, paths: DataDir, clock: Callable[[], float] = time.time) -> None:
        self.shown = credentials.stored_admission(paths)
        self.revocations = credentials.stored_revocations(paths)
        self._revoked = credentials.opened_revocations(self.revocations, paths, sealed)
        self._sealed = sealed
        self._owner = PeerId(sealed.manifest.owner)
        self._own = own
        self._paths = paths
        self._clock = clock
        self._admitted: OrderedDict[PeerId, tuple[bytes, Invitation]] = OrderedDict()
        self._refused: OrderedDict[PeerId, tuple[type[RefusedError], str]] = OrderedDict()
        """Why, as kind and cause: an error itself holds on to all that led to it."""
        self._ours: Invitation | None = None
        if own != self._owner:
            self._check_ourselves()

    def _check_ourselves(self) -> None:
        manifest = self._sealed.manifest
        if not self.shown:
            raise NotInvitedError(f"run {manifest.name} of {short(manifest.owner)} accepts only nodes that its owner invited.")
        self._ours = credentials.check_own(self.shown, self._own, self._sealed)
        if (objection := self._over()) is not None:
            raise InvitationOverError(objection.cause)

    def _over(self) -> PeerInvitationOverError | None:
        """Why we are no member any more; None while we are."""
        return self._revoked.over(self._ours, self._own, self._clock()) if self._ours else None

    def admits(self, peer: PeerId, admission: bytes, wall: float) -> bool:
        if peer == self._owner:
            return True
        try:
            self._check(peer, admission, wall)
        except RefusedError as error:
            self._admitted.pop(peer, None)
            _keep(self._refused, peer, (type(error), error.cause))
            return False
        return True

    def _check(self, peer: PeerId, admission: bytes, wall: float) -> None:
        """Keep `peer`'s admission in mind if it counts. RefusedError if not: many such must not push out those that do."""
        known = self._admitted.get(peer)
        if known is None or known[0] != admission:  # two signatures are checked once, not for every heartbeat
            known = admission, open_admission(admission, peer, self._owner, self._sealed.run_id)
        if (objection := self._revoked.over(known[1], peer, wall)) is not None:
            raise objection
        _keep(self._admitted, peer, known)
        self._refused.pop(peer, None)

    def objection(self, peer: PeerId) -> RefusedError | None:
        if peer == self._owner:
            return None
        if (known := self._admitted.get(peer)) is not None:
            return self._revoked.over(known[1], peer, self._clock())
        kind, cause = self._refused.get(peer, (PeerNotInvitedError, f"{short(peer)} has shown no invitation to this node."))
        return kind(cause)

    def learn(self, raw: bytes) -> bool:
        revoked = open_revocations(raw, self._owner, self._sealed.run_id)
        if revoked.version <= self._revoked.version:
            return False
        self._revoked, self.revocations = revoked, raw
        return True

    async def run(self, emit: Emit) -> None:
        """Of our revocations and those in the data directory the newer ones replace the others. What goes wrong with that,
        and that our own admission ends, is told once."""
        over = False

        async def look() -> None:
            nonlocal over
            try:
                raw = await trio.to_thread.run_sync(self._newest, self.revocations)
                if raw != self.revocations:
                    self.learn(raw)
            finally:
                if (objection := self._over()) is not None and not over:
                    over = True
                    emit(Troubled(objection.code, objection.cause))

        await keep_looking(look, emit)

    def _newest(self, ours: bytes) -> bytes:
        """The newer of our revocations and those stored, which are replaced if ours are."""
        stored = credentials.stored_revocations(self._paths)
        if stored == ours:
            return ours
        if stored and credentials.opened_revocations(stored, self._paths, self._sealed).version >= self._revoked.version:
            return stored
        write_private(self._paths.revocations, ours)
        return ours


def _keep(table: OrderedDict[PeerId, T], peer: PeerId, value: T) -> None:
    table[peer] = value
    table.move_to_end(peer)
    if len(table) > _KEPT:
        table.popitem(last=False)
