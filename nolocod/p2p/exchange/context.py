"""What every exchange of one node has in common: who it is, in which run, within which limits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

import trio

from nolocod.proto.limits import Limits
from nolocod.run.manifest import wire_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import Identity
    from nolocod.run.manifest import Sealed


T = TypeVar("T")


Ts = TypeVarTuple("Ts")


class Aside(Protocol):
    """Does what blocks on a disk while this process goes on, and returns what came of it."""

    async def __call__(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T: ...


async def in_a_thread(work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    return await trio.to_thread.run_sync(work, *arguments)


@dataclass(frozen=True)
class Context:
    """Who this node is in its run. `box_size` is the size of the largest message; 0 until it is known."""

    identity: Identity
    run_id: str
    codec: str = ""
    box_size: int = 0
    limits: Limits = field(default_factory=Limits)
    fragments: int = 1
    staleness: int | None = None
    """Rounds that partners may be apart (manifest: `outer.staleness`)."""
    rng: random.Random = field(default_factory=random.SystemRandom)
    """Names sessions; a test passes its own."""
    aside: Aside = in_a_thread
    """The virtual clock does not wait for threads: what runs on it does such work at once."""

    @classmethod
    def of(cls, identity: Identity, sealed: Sealed, box_size: int = 0) -> Context:
        """`identity` in the run of `sealed`."""
        manifest = sealed.manifest
        outer = manifest.outer
        return cls(
            identity,
            sealed.run_id,
            wire_name(manifest.codec),
            box_size,
            fragments=outer.fragments,
            staleness=outer.staleness,
        )
