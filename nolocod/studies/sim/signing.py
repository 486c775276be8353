"""Signatures for simulations: real ones, or cheap ones for thousands of nodes.

The rule: a cheap signature is as hard to forge for a simulated peer as a real one, because both need its secret; but
whoever runs the simulation knows all secrets, and checking one is a hash instead of a curve. Small simulations use the
real ones; a report says which were used.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import blake3

from nolocod import identity as identities
from nolocod.errors import SignatureError
from nolocod.identity import Identity, PeerId, peer_id_of
from nolocod.p2p.membership import heartbeat
from nolocod.proto import envelope, receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REAL_UP_TO = 64
"""Nodes; with more, signatures are cheap unless asked otherwise."""
_READ = 1 << 16
"""Heartbeats that are kept as read: more than are about among 4,096 nodes."""


def read_once() -> dict[str, Callable[..., Any]]:
    """The readers of heartbeats, by name, each of which reads a heartbeat once for all who hear it."""
    return {name: lru_cache(maxsize=_READ)(getattr(heartbeat, name)) for name in ("read", "glance")}


class CheapIdentity(Identity):
    """Signs with a keyed hash."""

    def sign(self, message: bytes) -> bytes:
        return blake3.blake3(message, key=self.secret).digest(64)


class Signing:
    """Makes the identities of one simulation, and knows them all."""

    def __init__(self, seed: int, *, cheap: bool) -> None:
        self.cheap = cheap
        self._seed = seed
        self._secrets: dict[str, bytes] = {}

    def identity(self, number: int) -> Identity:
        """The `number`-th node's, the same for the same seed."""
        secret = blake3.blake3(f"simulated node {self._seed} {number}".encode()).digest(32)
        if not self.cheap:
            return Identity.from_secret(secret)
        made = CheapIdentity(secret, peer_id_of(blake3.blake3(secret).digest(32)))
        self._secrets[made.peer_id] = secret
        return made

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Until the end of the block envelopes and receipts are checked as they were signed, and a heartbeat is read once
        for all who hear it."""
        stand_ins: list[tuple[object, str, object]] = [(heartbeat, name, reader) for name, reader in read_once().items()]
        if self.cheap:
            stand_ins += [(module, "verify", self._verify) for module in (envelope, receipt)]
        with ExitStack() as stack:
            for module, name, stand_in in stand_ins:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, stand_in)
            yield

    def _verify(self, peer_id: str, message: bytes, signature: bytes) -> None:
        secret = self._secrets.get(PeerId(peer_id))
        if secret is None or blake3.blake3(message, key=secret).digest(64) != signature:
            raise SignatureError(f"a message in the name of {identities.short(peer_id)} was not signed by it.")
