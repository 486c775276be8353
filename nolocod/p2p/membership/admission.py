"""Who may be a member of a run that one must be invited to, as one node knows it.

The rule: a peer counts as admitted for what it showed in its own signed heartbeat, as long as its invitation lasts and
the owner has not taken it back; whatever it asks of us is looked at again. The owner needs no admission.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import trio

from nolocod.errors import (
    InvitationOverError,
    LocalError,
    NotInvitedError,
    PeerInvitationOverError,
    PeerNotInvitedError,
    RefusedError,
)
from nolocod.identity import PeerId, short
from nolocod.observe.events import Troubled
from nolocod.run import credentials
from nolocod.run.invitations import open_admission, open_revocations

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.events import Emit
    from nolocod.run.invitations import Invitation
    from nolocod.run.manifest import Sealed
    from nolocod.run.paths import DataDir

T = TypeVar("T")

_KEPT = 4096
"""Peers whose admission is kept in mind while it counts, and as many that were refused."""
_REREAD = 2.0
"""Seconds between two looks at what the owner's commands left in the data directory."""


class Admission:
    """membership.Access for run `sealed`, on behalf of node `own`. `clock` gives the time of day.

    Raises InvitationError, InvitationOverError or NotInvitedError if the node itself may not be a member, DataDirError
    for files that are damaged.
    """

    def __init__(self, sealed: Sealed, own: PeerId, paths: DataDir, clock: Callable[[], float] = time.time) -> None:
        self.admission = credentials.stored_admission(paths)
        """What we show to others."""
        self._sealed = sealed
        self._owner = PeerId(sealed.manifest.owner)
        self._own = own
        self._paths = paths
        self._clock = clock
        self._revoked, self._raw = credentials.stored_revocations(paths, sealed)
        self._admitted: OrderedDict[PeerId, tuple[bytes, Invitation]] = OrderedDict()
        self._refused: OrderedDict[PeerId, tuple[type[RefusedError], str]] = OrderedDict()
        """Why, as kind and cause: an error itself holds on to all that led to it."""
        self._ours: Invitation | None = None
        if own != self._owner:
            self._check_ourselves()

    def _check_ourselves(self) -> None:
        manifest = self._sealed.manifest
        if not self.admission:
            raise NotInvitedError(f"run {manifest.name} of {short(manifest.owner)} takes only those whom its owner invited.")
        self._ours = credentials.check_own(self.admission, self._own, self._sealed)
        if (objection := self._over()) is not None:
            raise InvitationOverError(objection.cause)

    def _over(self) -> PeerInvitationOverError | None:
        """Why we are no member any more; None while we are."""
        return self._revoked.over(self._ours, self._own, self._clock()) if self._ours else None

    # --- membership.Access ------------------------------------------------------------------------

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

    def objection(self, peer: PeerId) -> RefusedError | None:
        """Why nothing is given to `peer` now; None if it may have what members have."""
        if peer == self._owner:
            return None
        known = self._admitted.get(peer)
        if known is not None:
            return self._revoked.over(known[1], peer, self._clock())
        kind, cause = self._refused.get(peer, (PeerNotInvitedError, f"{short(peer)} has shown no invitation to this node."))
        return kind(cause)

    def told(self) -> bytes:
        return self._raw

    def learn(self, raw: bytes) -> bool:
        revoked = open_revocations(raw, self._owner, self._sealed.run_id)
        if revoked.version <= self._revoked.version:
            return False
        self._revoked, self._raw = revoked, raw
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

    # --- with the data directory ------------------------------------------------------------------

    async def run(self, emit: Emit) -> None:
        """Keep the revocations in the data directory the same as ours, the newer ones on both sides. What goes wrong with
        that, and that our own admission ends, is told once."""
        trouble: str | None = None
        over = False
        while True:
            try:
                raw = await trio.to_thread.run_sync(self._meet, self._raw)
                if raw != self._raw:
                    self.learn(raw)
                trouble = None
            except (LocalError, RefusedError) as error:
                if error.cause != trouble:
                    emit(Troubled(error.code, f"{error.cause} {error.remedy}"))
                trouble = error.cause
            if (objection := self._over()) is not None and not over:
                over = True
                emit(Troubled(objection.code, objection.cause))
            await trio.sleep(_REREAD)

    def _meet(self, ours: bytes) -> bytes:
        """The newer of our revocations and those stored, which are replaced if ours are."""
        stored = credentials.stored_revocations_bytes(self._paths)
        if stored == ours:
            return ours
        if stored and credentials.opened_revocations(stored, self._paths, self._sealed).version >= self._revoked.version:
            return stored
        credentials.store_revocations(self._paths, ours)
        return ours


def _keep(table: OrderedDict[PeerId, T], peer: PeerId, value: T) -> None:
    table[peer] = value
    table.move_to_end(peer)
    if len(table) > _KEPT:
        table.popitem(last=False)
