"""A node among the peers of its run: what training asks of them, and how this node serves them.

The rule: no peer's wish may end this node, and one that pauses serves nobody: its peers ask another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import trio

from nolocod.errors import DataDirError, DiskFullError, LocalError, NolocodError, PeerBusyError, first_error
from nolocod.observe.events import Troubled, WeightsComing, WeightsFetched
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.snapshots.base import fetch_file
from nolocod.p2p.snapshots.client import fetch_snapshot
from nolocod.p2p.snapshots.cross_check import fetch_parts
from nolocod.p2p.snapshots.server import ServedSnapshot
from nolocod.proto.types import Accept, Answer, Busy, Ended, LocalSide, Offer, Standing
from nolocod.trainer.process import TrainerEndedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.observe.events import Emit
    from nolocod.outer.loop import OuterLoop
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.exchange.service import ExchangeService
    from nolocod.p2p.mesh import Mesh
    from nolocod.p2p.transport.stream import Handler, Stream
    from nolocod.proto.types import Built, Description, SnapshotParts
    from nolocod.run.base import BaseFile
    from nolocod.trainer.process import TrainerProcess

_SERVED_TIMES = 4.0
"""A snapshot is served for so many times as long as it took to write."""
_LOADING_SECONDS = 5.0
"""What a peer is told when this node's trainer is not up."""


class Peers:
    """The members of the run, as training sees them. Its disk's failures cost an exchange or a sample, not the training."""

    def __init__(self, mesh: Mesh, exchange_service: ExchangeService, context: Context, emit: Emit) -> None:
        self._mesh = mesh
        self._exchange_service = exchange_service
        self._context = context
        self._emit = emit
        self.live = mesh.live
        self.partner = mesh.partner
        self.admits = mesh.admits
        self.met = mesh.met
        self.believed = mesh.believed
        self.pace = mesh.pace
        self.suspect = mesh.suspect
        self.probation = mesh.probation
        self._answering = PausableServices(lambda: False)
        self.answer = self._answering.pausable(lambda stream: exchange_service.handle(stream))
        """Serves a peer that offers."""
        self.stop_answering = self._answering.break_off
        """Give up the exchange that a peer offered, and that is under way."""

    def expect(self, size: int, built: Built) -> float:
        """Exchanges are of `size` bytes each way, of the tensors that `built` tells; the seconds that one may take."""
        self._exchange_service.box_size = size
        self._exchange_service.tell_built(built)
        self._mesh.built = built
        self._mesh.expect(size)
        return self.patience

    @property
    def patience(self) -> float:
        """Seconds that an exchange may take."""
        return self._exchange_service.patience

    async def offer(self, partner: PeerId, standing: Standing, subject: int, local_side: LocalSide) -> Ended:
        """Run a whole exchange as the one who offers; faults of the partner are outcomes, not exceptions."""
        try:
            return await self._exchange_service.offer(partner, standing, subject, local_side)
        except (DiskFullError, DataDirError) as error:  # no receipt, no exchange
            self._emit(Troubled(error.code, error.cause))
            return Ended("aborted", partner, b"", error=error.code, reason=error.cause)

    async def fetch_weights(self, donors: list[PeerId], into: Path, size: int) -> tuple[PeerId, Standing]:
        """Fetch the slow weights of one of `donors`, of `size` bytes, into a file; NoDonorError if none gave them.

        Returns the donor and its standing when it wrote them.
        """

        def tell(donor: PeerId, here: int) -> None:
            self._emit(WeightsComing(donor, here, size))

        fetched = await fetch_snapshot(self._context, self._mesh.dial, donors, into, size, self._mesh.blame, tell)
        self._emit(WeightsFetched(fetched.donor, fetched.standing.round, fetched.size, fetched.seconds))
        return fetched.donor, fetched.standing

    async def fetch_file(self, file: BaseFile, into: Path) -> Description:
        """Fetch a file that the manifest pins from whoever has it; NoDonorError if nobody does."""

        def donors() -> list[PeerId]:
            return [member.peer_id for member in self.live() if member.verified and member.state != "paused"]

        return await fetch_file(self._context, self._mesh.dial, donors, (file, into), self._mesh.blame)

    async def sample_weights(
        self, donors: list[PeerId], wanted: tuple[int, int], folder: Path, took: tuple[float, float]
    ) -> tuple[SnapshotParts, ...]:
        """Fetch into `folder` samples of the weights of the first `donors` that give one.

        `wanted`: how many at most, and the bytes of whole weights; `took`: the seconds of the whole fetch before, and of the
        longest inner step.
        """
        seconds = self._context.limits.sample(*took)
        try:
            return tuple(await fetch_parts(self._context, self._mesh.dial, donors, wanted, folder, seconds, self._mesh.blame))
        except (DiskFullError, DataDirError) as error:
            self._emit(Troubled(error.code, error.cause))
            return ()

    def doubt(self, donor: PeerId) -> None:
        """The weights that `donor` gave were worse than another donor's by more than can be."""
        self._mesh.judge(donor, Conduct.FALSE_WEIGHTS)


class CurrentLoop:
    """Answers offers by the outer loop of the trainer that is up (types.Answerer).

    An accepted exchange stays with the loop that accepted it, also when their trainer has died; until
    it has ended no other offer is accepted.
    """

    def __init__(self) -> None:
        self.loop: OuterLoop | None = None
        self._engaged: OuterLoop | None = None

    def decide(self, offer: Offer) -> Answer:
        if self.loop is None or self._engaged not in (None, self.loop):
            return Busy(_LOADING_SECONDS, "not ready")
        answer = self.loop.decide(offer)
        if isinstance(answer, Accept):
            self._engaged = self.loop
        return answer

    @property
    def local_side(self) -> LocalSide:
        return self._accepted().local_side

    async def ended(self, ended: Ended) -> None:
        loop = self._accepted()
        try:
            await loop.ended(ended)
        finally:
            self._engaged = None

    def _accepted(self) -> OuterLoop:
        if self._engaged is None:
            raise AssertionError("no exchange was accepted")
        return self._engaged


class _Writing:
    """A snapshot that is being written."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.failure: NolocodError | None = None


class OwnSnapshot:
    """This node's slow weights as a file for newcomers; a fresh one once they have moved on by a round, and the last one is
    some times as old as its writing took. `run` once.

    What was begun is written to its end, also if who asked has gone: writing may take longer than anybody waits.
    """

    def __init__(self, folder: Path, ready: Callable[[], TrainerProcess | None]) -> None:
        """`ready` gives the trainer once its weights may be given on."""
        self._folder = folder
        self._ready = ready
        self._served: ServedSnapshot | None = None
        self._good_until = 0.0  # whatever the round
        self._writing: _Writing | None = None
        self._asked = trio.Event()

    async def get(self) -> ServedSnapshot:
        """PeerBusyError while there are no weights."""
        trainer, served = self._trainer(), self._served
        if served is None or (served.standing.round < trainer.standing.round and trio.current_time() > self._good_until):
            if self._writing is None:
                self._writing = _Writing()
                self._asked.set()
            writing = self._writing
            await writing.done.wait()
            if writing.failure is not None:
                raise writing.failure
        if self._served is None:
            raise AssertionError("nothing was written")
        return self._served

    async def run(self) -> NoReturn:
        while True:
            await self._asked.wait()
            self._asked, writing = trio.Event(), self._writing
            if writing is None:
                raise AssertionError("asked for nothing")
            try:
                await self._write(self._trainer())
            except NolocodError as error:
                writing.failure = error
            finally:
                self._writing = None
                writing.done.set()

    def _trainer(self) -> TrainerProcess:
        if (trainer := self._ready()) is None:
            raise PeerBusyError("this node has no weights yet.", retry_after=_LOADING_SECONDS)
        return trainer

    async def _write(self, trainer: TrainerProcess) -> None:
        began = trio.current_time()
        path = self._folder / f"round-{trainer.standing.round:08d}.safetensors"
        dumped = await trainer.dump(path)
        for old in set(self._folder.iterdir()) - {path}:
            old.unlink(missing_ok=True)  # uploads under way keep theirs open
        self._served = ServedSnapshot(path, dumped.standing, dumped.description)
        self._good_until = trio.current_time() + _SERVED_TIMES * (trio.current_time() - began)


class PausableServices:
    """Services to peers that are broken off while this node is paused; `paused` says whether it is now."""

    def __init__(self, paused: Callable[[], bool]) -> None:
        self._paused = paused
        self._scopes: set[trio.CancelScope] = set()

    def break_off(self) -> None:
        for scope in self._scopes:
            scope.cancel()

    def pausable(self, handle: Handler) -> Handler:
        """Such a service; a peer whose stream is reset asks another node, and resumes there."""

        async def broken_off_on_pause(stream: Stream) -> None:
            scope = trio.CancelScope()
            self._scopes.add(scope)
            if self._paused():
                scope.cancel()
            try:
                with scope:
                    await handle(stream)
            finally:
                self._scopes.discard(scope)
            if scope.cancelled_caught:
                await stream.reset()

        return broken_off_on_pause


def containing_failures(handle: Handler, emit: Emit) -> Handler:
    """A service to peers whose failures here are told and cost the stream. That a trainer is ended is the daemon's business."""

    async def contained(stream: Stream) -> None:
        try:
            await handle(stream)
        except* LocalError as errors:
            error = first_error(errors)
            if not isinstance(error, TrainerEndedError):
                emit(Troubled(error.code, error.cause))
            await stream.reset()

    return contained
