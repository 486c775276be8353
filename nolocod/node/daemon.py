"""Puts one node together: the order in which its parts start, work, and stop.

The trainer process is spawned before the run is known, so that torch is imported while the network
process looks for peers. A trainer that dies is started again from its last checkpoint; the mesh stays up
meanwhile. SIGTERM or SIGINT once: the exchange under way is finished or abandoned within the grace
period, a checkpoint is written, peers are told, exit status 0. Twice: the node stops at once.
"""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING

import trio

from nolocod import identity
from nolocod.disk import write_whole
from nolocod.errors import (
    AllowanceError,
    ClockError,
    ClonedIdentityError,
    DataDirError,
    DiskFullError,
    LocalError,
    LostStepsError,
    NolocodError,
    PeerBusyError,
    TrainerError,
)
from nolocod.node import data_directory
from nolocod.node.host_checks import check_host
from nolocod.node.schedule import TrainingHours, month_spent, on_battery, outside_hours
from nolocod.node.supervisor import Supervisor
from nolocod.node.training_session import Part, TrainingSession
from nolocod.observe.events import Allowed, ExchangeEnded, OuterStep, Paused, Started, StateChanged, Troubled
from nolocod.observe.metrics import Metrics
from nolocod.observe.status.access import PageAccess, is_loopback, make_token, read_token
from nolocod.observe.status.server import Pages, serve_http
from nolocod.observe.status.state import StatusState
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.limits.bandwidth import Budget, Ledger, shortfalls
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.snapshots.cross_check import sample_snapshots
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot, fetch_snapshot
from nolocod.p2p.transport.stream import EXCHANGE, SNAPSHOT, Handler, Stream
from nolocod.p2p.transport.throughput import SAMPLE, Sampler
from nolocod.proto.types import Accept, Answer, Busy, Ended, LocalSide, Offer, Standing, Subject
from nolocod.run.manifest import stored_manifest
from nolocod.trainer.process import TrainerProcess, open_trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from trio_typing import TaskStatus  # mypy reads trio through its stubs, which do not name it

    from nolocod.identity import PeerId
    from nolocod.node.config import NodeConfig
    from nolocod.node.schedule import Check
    from nolocod.observe.events import Emit, Event
    from nolocod.outer.loop import Rounds
    from nolocod.proto.types import Member, Sampled
    from nolocod.run.manifest import Sealed

_TRAINER_FAILURES = 3
"""Trainer deaths without an outer step in between, after which the node gives up."""
_CLOCK_LIMIT = 600.0
"""Seconds by which this clock may differ from the peers' median."""
_LOADING_SECONDS = 5.0
"""What a peer is told when this node's trainer is not up."""


async def run_node(config: NodeConfig, *, may_seed: bool, followers: Iterable[Callable[[Event], None]] = ()) -> None:
    """Run one daemon until its run ends or it is told to stop.

    `may_seed`: this node may begin from the run's initial weights when no peer has any (`nolocod start`).
    Raises a LocalError, alone or in an exception group, when the node cannot go on.
    """
    supervisor = Supervisor(os.environ)
    with data_directory.hold(config.paths):
        node = Node(config, may_seed=may_seed, followers=[supervisor.follow, *followers])
        async with trio.open_nursery() as nursery:
            await nursery.start(node.watch_signals, nursery.cancel_scope)
            await nursery.start(node.keep_allowance)
            http = await nursery.start(serve_http, config.http, Pages(node.status, node.metrics), _guard(config))
            supervisor.ready()
            nursery.start_soon(supervisor.feed)
            await node.run(http)
            nursery.cancel_scope.cancel()


class Node:
    """What outlives a trainer: identity, mesh, services to peers, and whether we were told to stop."""

    def __init__(self, config: NodeConfig, *, may_seed: bool, followers: Iterable[Callable[[Event], None]]) -> None:
        self.status = StatusState(trio.current_time, _tasks)
        self.metrics = Metrics(_tasks)
        self._config = config
        self._may_seed = may_seed
        self._followers = [self.metrics.follow, self.status.follow, *followers]
        self._identity = identity.load_or_create(config.paths.identity)
        self._rng = random.SystemRandom()
        self._budget = Budget(config.allowance, Ledger(config.paths.usage), self.emit)
        self._gate = TrainingHours(_checks(config, self._budget, self.emit), self.emit)
        self._stop = trio.Event()
        self._reception = Reception()
        self._part: Part | None = None
        self._exchange_service: ExchangeService | None = None
        self._receipts = ReceiptStore(config.paths.receipts)
        self._training_session: TrainingSession | None = None
        self._trainer: TrainerProcess | None = None
        self._served: ServedSnapshot | None = None
        self._dumping = trio.Lock()
        self._warned: set[str] = set()
        self._pausable: set[trio.CancelScope] = set()
        self._failures = 0
        self._cloned = False

    def emit(self, event: Event) -> None:
        """Tell all followers, the training session among them."""
        if isinstance(event, OuterStep):
            self._failures = 0
        if isinstance(event, Paused):
            for scope in self._pausable:
                scope.cancel()
        for follow in self._followers:
            follow(event)
        if self._training_session is not None:
            self._training_session.follow(event)
        if isinstance(event, ExchangeEnded):
            self._gate.look()  # before the next one begins, which the month may have no bytes for

    async def watch_signals(self, everything: trio.CancelScope, task_status: TaskStatus[None]) -> None:
        """First signal: stop in order, if there is something to put in order. Second: stop at once."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                if self._stop.is_set() or self._training_session is None or self._training_session.state == "joining":
                    everything.cancel()
                self._stop.set()

    async def keep_allowance(self, task_status: TaskStatus[None]) -> None:
        """Open and close the gate, and count the bytes, until cancelled."""
        allowance, hours = self._config.allowance, tuple(map(str, self._config.hours))
        self.emit(Allowed(allowance.up, allowance.down, allowance.monthly, hours, not self._config.pause_on_battery))
        self._gate.look()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._gate.run)
                nursery.start_soon(self._budget.run)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2):
                await self._budget.save()

    async def run(self, http: str) -> None:
        """Join the run and train, through as many trainer processes as it takes."""
        self.emit(StateChanged("starting"))
        mesh_of = open_mesh(
            self._config.mesh, self._identity, self.emit, rng=self._rng, meter=self._budget, guard=self._unless_paused
        )
        async with mesh_of as mesh, trio.open_nursery() as nursery:
            nursery.start_soon(check_host, self._config.paths.root, mesh.clock_offset, self.emit)
            nursery.start_soon(self._give_way, mesh, nursery.cancel_scope)
            try:
                while await self._one_life(mesh, http):
                    pass
                nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(2):
                    await mesh.leave()
                self._config.paths.daemon.unlink(missing_ok=True)
        if self._cloned:
            raise ClonedIdentityError("another node with the same identity.key was there before this one.")

    async def _give_way(self, mesh: Mesh, everything: trio.CancelScope) -> None:
        """Stop in order once an elder node turns out to have our identity."""
        await mesh.cloned.wait()
        self._cloned = True
        if self._training_session is None or self._training_session.state == "joining":
            everything.cancel()
        self._stop.set()

    async def _one_life(self, mesh: Mesh, http: str) -> bool:
        """Run one trainer process to its end; True if another is to follow."""
        again = False
        try:
            async with open_trainer(self.emit) as self._trainer:
                if self._part is None:
                    self._part = await self._join(mesh, http)
                await self._train(self._part, self._trainer, mesh)
        except* TrainerError as errors:
            self._failures += 1
            if self._failures >= _TRAINER_FAILURES:
                raise
            again = not self._stop.is_set()
            follows = "It starts again from its checkpoint." if again else "What it did since its checkpoint is lost."
            self.emit(Troubled(TrainerError.entry.code, f"{_first(errors).cause} {follows}"))
        finally:
            self._reception.rounds = None
            self._trainer = None
        return again

    async def _train(self, part: Part, trainer: TrainerProcess, mesh: Mesh) -> None:
        self._training_session = training_session = TrainingSession(part, trainer, self.emit)
        if not await training_session.rest(self._stop):
            return
        await training_session.load()
        self._count_lost(training_session.kept_round)
        if self._exchange_service is not None:
            self._exchange_service.box_size = trainer.outbox.size
            mesh.expect(trainer.outbox.size)
            self._mind(trainer.outbox.size, self._exchange_service.patience)
        self._reception.rounds = training_session.rounds
        while (reason := await training_session.train(self._stop)) in ("behind", "paused"):
            if reason == "paused" and not await training_session.rest(self._stop):
                break
            if reason == "behind" or training_session.is_behind():
                await training_session.refresh()
        if reason == "finished":
            with trio.move_on_after(self._config.linger):
                await self._stop.wait()

    def _count_lost(self, round_number: int) -> None:
        """Tell of the steps that receipts prove and the weights on this disk do not hold."""
        own = self._identity.peer_id
        lost = self._receipts.since(own, round_number)  # once per trainer, some milliseconds
        if lost:
            cause = f"{len(lost)} that partners took with this node came after its checkpoint of round {round_number}."
            self.emit(Troubled(LostStepsError.entry.code, cause))

    def _mind(self, size: int, patience: float) -> None:
        """Keep back the bytes of an exchange, and tell once what the owner's limits make impossible."""
        self._budget.keep_back(size)
        for cause in shortfalls(self._config.allowance, size, patience):
            if cause not in self._warned:
                self._warned.add(cause)
                self.emit(Troubled(AllowanceError.entry.code, cause))

    # --- joining ------------------------------------------------------------------------------------

    async def _join(self, mesh: Mesh, http: str) -> Part:
        """Find the run's manifest and its members, and open this node's services to them."""
        config = self._config
        sealed = stored_manifest(config.paths)
        if sealed is None:
            self.emit(StateChanged("discovering", "a peer that tells us about the run"))
            sealed = await mesh.find_run()
            write_whole(config.paths.manifest, sealed.to_bytes())
        sealed.manifest.data.check_given(config.data)  # here too: the trainer takes long to import what it needs to say so
        self._tell_started(sealed, mesh, http)
        self.emit(StateChanged("discovering", "the run's members"))
        await mesh.enter(sealed, self._says)
        offset = mesh.clock_offset()
        if abs(offset) > _CLOCK_LIMIT:
            raise ClockError(f"it differs from the peers' median by {offset:.0f} s.")
        context = Context.of(self._identity, sealed)
        self._exchange_service = exchange_service = ExchangeService(
            context, mesh.dial, self._reception, self._receipts, mesh.judge, self.emit
        )
        donor = Donor(context, self._snapshot, config.max_uploads, self.emit)
        mesh.serve(EXCHANGE, self._outliving(exchange_service.handle))
        mesh.serve(SNAPSHOT, self._outliving(self._unless_paused(donor.handle)))
        mesh.serve(SAMPLE, self._unless_paused(Sampler().handle))
        swarm = MeshSwarm(mesh, exchange_service, context, self.emit)
        return Part(self._identity.peer_id, sealed, config, swarm, self._may_seed, self._gate, mesh.probation)

    def _tell_started(self, sealed: Sealed, mesh: Mesh, http: str) -> None:
        started = Started(self._identity.peer_id, sealed.run_id, sealed.manifest.name, mesh.addresses, http)
        running = data_directory.Running(
            os.getpid(), http, started.peer_id, started.run_id, started.addresses, _token_file(self._config)
        )
        data_directory.announce(self._config.paths, running)
        self.emit(started)

    def _says(self) -> tuple[Standing, str]:
        """What our heartbeats say."""
        standing, state = (
            (self._training_session.standing, self._training_session.state)
            if self._training_session
            else (Standing(0, 0, 0.0), "joining")
        )
        return standing, state if self._gate.pause is None else "paused"

    async def _snapshot(self) -> ServedSnapshot:
        """The slow weights as a file for newcomers; a fresh one once ours have moved on by a round."""
        if self._trainer is None or self._training_session is None or self._training_session.state == "joining":
            raise PeerBusyError("no weights here yet.", retry_after=_LOADING_SECONDS)
        async with self._dumping:
            if self._served is None or self._served.standing.round < self._training_session.standing.round:
                path = self._config.paths.serving / f"round-{self._training_session.standing.round:08d}.safetensors"
                dumped = await self._trainer.dump(path)
                _remove_beside(path)
                self._served = ServedSnapshot(path, dumped.standing, dumped.description)
            return self._served

    def _unless_paused(self, handle: Handler) -> Handler:
        """A service to peers that is broken off while this node is paused: they ask another one, and resume there."""

        async def guarded(stream: Stream) -> None:
            scope = trio.CancelScope()
            self._pausable.add(scope)
            if self._gate.pause is not None:
                scope.cancel()
            try:
                with scope:
                    await handle(stream)
            finally:
                self._pausable.discard(scope)
            if scope.cancelled_caught:
                await stream.reset()

        return guarded

    def _outliving(self, handle: Handler) -> Handler:
        """A service to peers whose failures are told and cost the stream: no peer's wish may end this node.

        That a dead trainer is started again is `_one_life`'s business.
        """

        async def guarded(stream: Stream) -> None:
            try:
                await handle(stream)
            except* LocalError as errors:
                error = _first(errors)
                self.emit(Troubled(error.code, error.cause))
                await stream.reset()

        return guarded


def _checks(config: NodeConfig, budget: Budget, emit: Emit) -> list[Check]:
    """What may pause a node, by its owner's word."""
    checks = [outside_hours(config.hours)] if config.hours else []
    if config.pause_on_battery:
        checks.append(on_battery(emit))
    if config.allowance.monthly is not None:
        checks.append(month_spent(lambda: budget.spent, lambda: budget.seconds_left))
    return checks


def _token_file(config: NodeConfig) -> str:
    """Where the token of the pages lies; "" where they need none, because only this machine can ask."""
    if config.http_token is not None:
        return str(config.http_token.absolute())
    return "" if is_loopback(config.http.host) else str(config.paths.http_token.absolute())


def _guard(config: NodeConfig) -> PageAccess:
    if config.http_token is not None:
        token: str | None = read_token(config.http_token)
    else:
        token = make_token(config.paths.http_token) if _token_file(config) else None
    return PageAccess(token, config.http_open_metrics)


def _tasks() -> int:
    """How many trio runs in this process."""
    return trio.lowlevel.current_statistics().tasks_living


def _remove_beside(path: Path) -> None:
    """Remove other snapshots, also those that nobody waited for to the end; uploads under way keep theirs open."""
    for old in set(path.parent.iterdir()) - {path}:
        old.unlink(missing_ok=True)


def _first(group: BaseExceptionGroup[NolocodError]) -> NolocodError:
    """The first error in a group of whatever depth."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class MeshSwarm:
    """The mesh as a training session sees it (training_session.Swarm)."""

    def __init__(self, mesh: Mesh, exchange_service: ExchangeService, context: Context, emit: Emit) -> None:
        self._mesh = mesh
        self._exchange_service = exchange_service
        self._context = context
        self._emit = emit

    def live(self) -> list[Member]:
        return self._mesh.live()

    def partner(self, own: Standing, avoid: Collection[PeerId]) -> PeerId | None:
        return self._mesh.partner(own, avoid)

    def suspect(self, peer: PeerId) -> None:
        self._mesh.suspect(peer)

    async def offer(self, partner: PeerId, standing: Standing, subject: Subject, local_side: LocalSide) -> Ended:
        try:
            return await self._exchange_service.offer(partner, standing, subject, local_side)
        except (DiskFullError, DataDirError) as error:  # no receipt, no exchange; training goes on
            self._emit(Troubled(error.code, error.cause))
            return Ended("aborted", partner, b"", error=error.code, reason=error.cause)

    async def fetch_weights(self, donors: list[PeerId], into: Path) -> tuple[PeerId, Standing]:
        fetched = await fetch_snapshot(self._context, self._mesh.dial, donors, into, self._emit, self._mesh.blame)
        return fetched.donor, fetched.standing

    async def sample_weights(self, donors: list[PeerId], wanted: tuple[int, int], folder: Path) -> tuple[Sampled, ...]:
        try:
            return tuple(await sample_snapshots(self._context, self._mesh.dial, donors, wanted, folder, self._mesh.blame))
        except (DiskFullError, DataDirError) as error:
            self._emit(Troubled(error.code, error.cause))
            return ()

    def doubt(self, donor: PeerId) -> None:
        self._mesh.judge(donor, Conduct.FALSE_WEIGHTS)


class Reception:
    """Whose rounds answer offers now (terms.Reception).

    An accepted exchange stays with the rounds that accepted it, also when their trainer has died; until
    it has ended no other offer is accepted.
    """

    def __init__(self) -> None:
        self.rounds: Rounds | None = None
        self._engaged: Rounds | None = None

    def decide(self, offer: Offer) -> Answer:
        if self.rounds is None or self._engaged not in (None, self.rounds):
            return Busy(_LOADING_SECONDS, "not ready")
        answer = self.rounds.decide(offer)
        if isinstance(answer, Accept):
            self._engaged = self.rounds
        return answer

    @property
    def local_side(self) -> LocalSide:
        return self._accepted().local_side

    async def ended(self, ended: Ended) -> None:
        rounds = self._accepted()
        try:
            await rounds.ended(ended)
        finally:
            self._engaged = None

    def _accepted(self) -> Rounds:
        if self._engaged is None:
            raise AssertionError("no exchange was accepted")
        return self._engaged
