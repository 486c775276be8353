"""Signatures for simulations: real ones, or cheap ones for thousands of nodes.

The rule: a cheap signature is as hard to forge for a simulated peer as a real one, because both need its secret; but
whoever runs the simulation knows all secrets, and checking one is a hash instead of a curve. Small simulations use the
real ones; a report says which were used.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import blake3

from nolocod import identity as identities
from nolocod.errors import SignatureError
from nolocod.identity import Identity, PeerId, peer_id_of
from nolocod.proto import envelope, receipt

if TYPE_CHECKING:
    from collections.abc import Iterator

REAL_UP_TO = 64
"""Nodes; with more, signatures are cheap unless asked otherwise."""


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
        """Envelopes and receipts are checked as they were signed, until the end of the block."""
        if not self.cheap:
            yield
            return
        modules = (envelope, receipt)
        for module in modules:
            module.verify = self._verify  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module in modules:
                module.verify = identities.verify  # type: ignore[attr-defined]

    def _verify(self, peer_id: str, message: bytes, signature: bytes) -> None:
        secret = self._secrets.get(PeerId(peer_id))
        if secret is None or blake3.blake3(message, key=secret).digest(64) != signature:
            raise SignatureError(f"a message in the name of {identities.short(peer_id)} was not signed by it.")
