"""Weights of several members of a run, for who does not train: fetched one after another, and judged beside each other.

The rule: members are those that an observer verified, near the median of their rounds. What came whole is kept in a file of its
own, and what came in part too (p2p/snapshots/partial.py), so that a fetch that was broken off goes on where it was. How good
weights are is not judged here, but by whoever knows the model (trainer/average.py); who does not count is told, and another
member is asked instead.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from nolocod.disk import make_folder
from nolocod.errors import FarWeightsError, NoDonorError, RemoteError
from nolocod.identity import PeerId, short
from nolocod.node.weights import best_first
from nolocod.observe.events import Troubled, WeightsFetched
from nolocod.p2p.exchange.context import Context, in_a_thread
from nolocod.p2p.snapshots.client import fetch_snapshot
from nolocod.watch.observer import Observer
from nolocod.watch.service import seeking

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from nolocod.observe.events import Emit
    from nolocod.p2p.settings import MeshSettings
    from nolocod.proto.types import Member
    from nolocod.run.manifest import Sealed

_LOOK_SECONDS, _LOOK_EVERY = 30.0, 0.25
"""For how long members are looked for while there are too few; they are asked one after another."""
_OLD = 0.1
"""Weights that are kept count until the run has come so much further, as a share of its rounds."""


class Judge(Protocol):
    """Who knows the model. It may take long, and is asked in a thread."""

    @property
    def size(self) -> int:
        """Bytes of one member's weights."""
        ...

    def admit(self, peer: PeerId, path: Path) -> None:
        """RejectedTensorError if these are no weights of this run."""
        ...

    def objections(self, files: Mapping[PeerId, Path]) -> dict[PeerId, str]:
        """Of those that were admitted: who does not count, and why."""
        ...


J = TypeVar("J", bound=Judge)


@dataclass(frozen=True)
class Weights:
    """The slow weights of `peer` in its round `round`."""

    peer: PeerId
    round: int
    path: Path


async def gather(settings: MeshSettings, count: int, of_run: Callable[[Sealed], J], emit: Emit) -> tuple[J, list[Weights]]:
    """The weights of `count` members of a run or more, of which the judge that `of_run` gives has nothing to say; and that one.

    Raises NoDonorError if there are fewer, what `seeking` and `Seeker.find` raise, DiskFullError or DataDirError.
    """
    async with seeking(settings, emit) as (seeker, run_id):
        sealed = await seeker.find(run_id)
        judge = await in_a_thread(of_run, sealed)
        observer = Observer(seeker, sealed, settings, random.SystemRandom())
        gathering = _Gathering(observer, sealed, judge, settings.paths.incoming, emit)
        context = Context.of(seeker.identity, sealed)
        while len(good := await gathering.judged(count)) < count:
            await gathering.fetch(context, count, len(good))
    return judge, good


class _Gathering:
    """What is here of one run's weights, in a folder of `folder`."""

    def __init__(self, observer: Observer, sealed: Sealed, judge: Judge, folder: Path, emit: Emit) -> None:
        self._judge = judge
        self._observer, self._emit = observer, emit
        self._staleness = sealed.manifest.outer.staleness
        self._folder = folder / sealed.run_id[:16]
        make_folder(self._folder)
        found = [path.stem.partition("-") for path in self._folder.glob("*.weights")]
        self._kept = {PeerId(peer): self._weights(PeerId(peer), int(number)) for number, _, peer in found}
        self._admitted: set[PeerId] = set()
        self._refused: set[PeerId] = set()
        self._told: set[PeerId] = set()
        self._few = False
        """Once there were too few for as long as they are looked for."""

    def _weights(self, peer: PeerId, number: int) -> Weights:
        return Weights(peer, number, self._folder / f"{number:08d}-{peer}.weights")

    async def judged(self, count: int) -> list[Weights]:
        """Those that count; all that are here, while these are fewer than `count`."""
        for weights in [one for peer, one in self._kept.items() if peer not in self._admitted]:
            await self._admit(weights)
        if len(self._kept) < count:
            return [*self._kept.values()]
        files = {peer: weights.path for peer, weights in self._kept.items()}
        objections = await in_a_thread(self._judge.objections, files)
        for peer in objections.keys() - self._told:
            self._told.add(peer)
            self._emit(Troubled(FarWeightsError.entry.code, f"weights of {short(peer)} are left out: {objections[peer]}."))
        return [weights for peer, weights in self._kept.items() if peer not in objections]

    async def _admit(self, weights: Weights) -> None:
        try:
            await in_a_thread(self._judge.admit, weights.peer, weights.path)
        except RemoteError as error:
            self._emit(Troubled(error.code, f"weights of {short(weights.peer)}: {error.cause}"))
            self._refused.add(weights.peer)
            self._drop(weights)
        else:
            self._admitted.add(weights.peer)

    def _drop(self, weights: Weights) -> None:
        del self._kept[weights.peer]
        weights.path.unlink()

    async def fetch(self, context: Context, count: int, good: int) -> None:
        """The weights of one member more; `good` of `count` count so far. NoDonorError if nobody gives them."""
        members = await self._look(self._kept.keys() | self._refused, count - good)
        median = statistics.median_low([member.standing.round for member in members]) if members else 0
        for weights in [one for one in self._kept.values() if median - one.round > max(self._staleness, _OLD * median)]:
            self._drop(weights)
        donors = [one.peer_id for one in best_first(members, median) if one.peer_id not in self._kept.keys() | self._refused]
        into = self._folder / "coming"
        try:
            fetched = await fetch_snapshot(context, self._observer.dial, donors, into, self._judge.size)
        except NoDonorError as error:
            cause = f"{good} of {count} members gave weights that count. Of others, {error.cause}"
            raise NoDonorError(cause, remedy="Try again: what came is kept. Or take a smaller --swarm.") from error
        weights = self._weights(fetched.donor, fetched.standing.round)
        into.rename(weights.path)
        self._kept[weights.peer] = weights
        self._emit(WeightsFetched(weights.peer, weights.round, fetched.size, fetched.seconds))

    async def _look(self, besides: Collection[PeerId], wanted: int) -> list[Member]:
        """The members near the median round; looked for until `wanted` are there `besides` those, or the time is up; from then
        on until there is one."""
        with trio.move_on_after(_LOOK_SECONDS) as looking:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._observer.run)
                least = 1 if self._few else wanted
                while len([one for one in self._near() if one.peer_id not in besides]) < least:  # noqa: ASYNC110 - nobody tells
                    await trio.sleep(_LOOK_EVERY)
                nursery.cancel_scope.cancel()
        self._few |= looking.cancelled_caught
        return self._near()

    def _near(self) -> list[Member]:
        having = [one for one in self._observer.live() if one.verified and one.state in ("training", "finished")]
        median = statistics.median_low([one.standing.round for one in having]) if having else 0
        return [one for one in having if abs(one.standing.round - median) <= self._staleness]
