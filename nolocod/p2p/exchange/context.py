"""What every exchange and snapshot of one node has in common: who it is, in which run, within which limits."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

import trio

from nolocod.proto.exchange import Setting
from nolocod.run.manifest import wire_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.identity import Identity
    from nolocod.run.manifest import Sealed

_LONGEST_PAUSE = 8.0
"""Seconds: a line that comes back after two minutes is not left unused for two more."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Aside(Protocol):
    """Does what blocks on a disk while this process goes on, and returns what came of it."""

    async def __call__(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T: ...


async def in_a_thread(work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    return await trio.to_thread.run_sync(work, *arguments)


@dataclass(frozen=True)
class Context(Setting):
    """This node in its run."""

    codec: str = ""
    size: int = 0
    """Of the run's largest message, in bytes; 0 until it is known."""
    rng: random.Random = field(default_factory=random.SystemRandom)
    """Names sessions; a test passes its own."""
    aside: Aside = in_a_thread
    """The virtual clock does not wait for threads: what runs on it does such work at once."""

    @classmethod
    def of(cls, identity: Identity, sealed: Sealed, size: int = 0) -> Context:
        """`identity` in the run of `sealed`."""
        run, outer = sealed.manifest, sealed.manifest.outer
        codec = wire_name(run.codec)
        return cls(identity, sealed.run_id, codec, size, fragments=outer.turns, staleness=outer.staleness, clock=time.time)


def redial_pauses() -> Iterator[float]:
    """Seconds to wait before each further try on a new stream."""
    return (min(0.25 * 2**number, _LONGEST_PAUSE) for number in count())
