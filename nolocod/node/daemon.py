"""Puts one node together: the order in which its parts start, work, and stop.

The trainer process is spawned before the run is known, so that torch is imported while the network
process looks for peers. A trainer that dies is started again from its last checkpoint; the mesh stays up
meanwhile. One that is to pause ends, so that all its memory is free, and another one goes on from its checkpoint.
SIGTERM or SIGINT once: the exchange under way is finished or abandoned within the grace period, a checkpoint is
written, peers are told, exit status 0. Twice: the node stops at once.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from nolocod import identity
from nolocod.disk import write_whole
from nolocod.errors import (
    AllowanceError,
    ClonedIdentityError,
    DeviceError,
    LostStepsError,
    ModelTooLargeError,
    TrainerError,
    WrongRunError,
    first_error,
)
from nolocod.node import data_directory
from nolocod.node.base import BaseFiles
from nolocod.node.config import FAREWELL
from nolocod.node.gossips import keep_count, keep_registry
from nolocod.node.guest import Guest
from nolocod.node.host_checks import check_host, watch_loop
from nolocod.node.peers import CurrentLoop, OwnSnapshot, PausableServices, Peers, containing_failures
from nolocod.node.schedule import PausePolicy, month_spent, outside_hours
from nolocod.node.settings import LiveSettings
from nolocod.node.supervisor import Supervisor
from nolocod.node.training_session import NO_TIME, TrainingSession
from nolocod.node.weights import SessionSettings
from nolocod.observe.events import ExchangeEnded, OuterStep, Paused, Started, StateChanged, Troubled
from nolocod.observe.metrics import Metrics
from nolocod.observe.status.access import PageAccess, is_loopback, make_token, read_token
from nolocod.observe.status.server import Pages, serve_http
from nolocod.observe.status.state import StatusState
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.limits.bandwidth import Budget, Ledger, shortfalls
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.snapshots.server import Donor
from nolocod.p2p.transport.stream import EXCHANGE, SNAPSHOT
from nolocod.proto.types import Standing
from nolocod.run.amendments import for_trainers, goal, obstacle
from nolocod.run.manifest import stored_manifest
from nolocod.trainer.attached import attach_trainer
from nolocod.trainer.process import Setup, TrainerProcess, open_trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from trio_typing import TaskStatus  # mypy reads trio through its stubs, which do not name it

    from nolocod.node.config import NodeConfig
    from nolocod.observe.events import Event
    from nolocod.p2p.membership.amended import AmendedRun
    from nolocod.run.manifest import Sealed

_ROOM_SECONDS = 60.0
"""Between two looks whether a model that fitted before fits again: others may have taken the memory in a pause."""
_TRAINER_FAILURES = 3
"""Trainer deaths without an outer step in between, after which the node gives up."""


async def run_node(config: NodeConfig, *, may_seed: bool, followers: Iterable[Callable[[Event], None]] = ()) -> None:
    """Run one daemon until its run ends or it is told to stop.

    `may_seed`: this node may begin from the run's initial weights when no peer has any (`nolocod start`).
    Raises a LocalError, alone or in an exception group, when the node cannot go on.
    """
    supervisor = Supervisor(os.environ)
    with data_directory.hold(config.paths):
        config = replace(config, mesh=replace(config.mesh, name=data_directory.called(config.paths, config.mesh.name)))
        node = Node(config, may_seed=may_seed, followers=[supervisor.follow, *followers])
        gc.collect()
        gc.freeze()  # what is there stays: full collections of it, that peers can bring about, held the loop for 70 ms each
        async with trio.open_nursery() as nursery:
            await nursery.start(node.watch_signals, nursery.cancel_scope)
            await nursery.start(node.keep_allowance)
            pages = Pages(node.status, node.metrics, node.guest.change)
            http = await nursery.start(serve_http, config.http, pages, _page_access(config))
            supervisor.ready()
            nursery.start_soon(supervisor.feed)
            nursery.start_soon(watch_loop, node.metrics.loop_lag.observe)
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
        known = any(config.paths.checkpoints.glob("round-*"))  # a node was here: it must not become another one unasked
        self._identity = (identity.load if known else identity.load_or_create)(config.paths.identity)
        self._budget = Budget(config.allowance, Ledger(config.paths.usage), self.emit)
        self._limits = LiveSettings(config.settings, config.paths.settings)
        self.guest = Guest(self._limits, config.allowance, self.emit)
        spent = month_spent(lambda: self._budget.spent, lambda: self._budget.seconds_left)
        checks = [*self.guest.checks, outside_hours(lambda: self._limits.now.hours), spent, self._wants_another_trainer]
        self._pause_policy = PausePolicy([*checks, self._owners_pause], self.emit)
        self._set_up: tuple[object, ...] | None = None  # how the trainer that is up was told to compute
        self._pausing = PausableServices(lambda: self._pause_policy.pause is not None)
        self._snapshot = OwnSnapshot(config.paths.serving, self._loaded_trainer)
        self._receipts = ReceiptStore(config.paths.receipts)
        self._answerer = CurrentLoop()
        self._base: BaseFiles | None = None
        self._stop = trio.Event()
        self._joined: tuple[AmendedRun, Peers] | None = None
        self._session: TrainingSession | None = None
        self._trainer: TrainerProcess | None = None
        self._warned: set[str] = set()
        self._lost: set[bytes] = set()  # the sessions whose steps were told as lost
        self._failures = 0
        self._fitted = False  # an outer step was taken: there is a device, and its memory is enough
        self._cloned = False

    def emit(self, event: Event) -> None:
        """Tell all followers, the training session among them."""
        if isinstance(event, OuterStep):
            self._failures, self._fitted = 0, True
        if isinstance(event, Paused):
            self._pausing.break_off()
        for follow in self._followers:
            follow(event)
        if self._session is not None:
            self._session.follow(event)
        if isinstance(event, ExchangeEnded):
            self._pause_policy.look()  # before the next one begins, which the month may have no bytes for

    async def watch_signals(self, everything: trio.CancelScope, task_status: TaskStatus[None]) -> None:
        """First signal: stop in order, if there is something to put in order, SIGTERM within a time. Second: stop at once."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            try:
                async for number in signals:
                    if self._stop.is_set():
                        everything.cancel()
                    self._stop_in_order(everything)
                    if number == signal.SIGTERM:
                        everything.deadline = trio.current_time() + self._config.stop_within - FAREWELL
            finally:  # what waits for the trainer is shielded: its inner step may take minutes
                if self._trainer is not None:
                    self._trainer.give_up()

    def _stop_in_order(self, everything: trio.CancelScope) -> None:
        if self._loaded_trainer() is None:  # there is nothing to put in order
            everything.cancel()
        self._stop.set()

    async def keep_allowance(self, task_status: TaskStatus[None]) -> None:
        """Look when to pause, and count the bytes, until cancelled."""
        self.guest.tell()
        await self.guest.look()
        self._pause_policy.look()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.guest.run, self._loaded_trainer)
                nursery.start_soon(self._pause_policy.run)
                nursery.start_soon(self._budget.run)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(FAREWELL - 1):
                await self._budget.save()

    def _wants_another_trainer(self) -> Paused | None:
        """A check whether the trainer that is up was told to compute otherwise than is wanted now."""
        differs = self._set_up not in (None, self._wanted()) and self._config.loop is None
        return Paused("settings", "the trainer starts anew, as it was set", None) if differs else None

    def _wanted(self) -> tuple[object, ...]:
        """How a trainer is to compute, by this node's owner and by the run's."""
        run = self._joined[0] if self._joined else None
        return *self._limits.now.of_trainer, *(for_trainers(run.sealed, self._own_state()[0].round) if run else ())

    def _owners_pause(self) -> Paused | None:
        """A check whether the run's owners have it wait, or need another release."""
        why = obstacle(self._joined[0].sealed, self._own_state()[0].round) if self._joined else ""
        return Paused("run", why, None) if why else None

    async def run(self, http: str) -> None:
        """Join the run and train, through as many trainer processes as it takes."""
        self.emit(StateChanged("starting"))
        rng, interruptible = random.SystemRandom(), self._pausing.pausable
        settings, meter = self._config.mesh, self._budget
        mesh_of = open_mesh(settings, self._identity, self.emit, rng=rng, meter=meter, interruptible=interruptible)
        async with mesh_of as mesh, trio.open_nursery() as nursery:
            nursery.start_soon(check_host, self._config.paths.root, mesh.clock_offset, self.emit)
            nursery.start_soon(self._give_way, mesh, nursery.cancel_scope)
            try:
                while await self._run_trainer(mesh, http, nursery):
                    pass
                nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(FAREWELL - 1):
                    await mesh.leave()
                self._config.paths.daemon.unlink(missing_ok=True)
        if self._cloned:
            raise ClonedIdentityError("another node with the same identity.key was in the run before this one.")

    async def _give_way(self, mesh: Mesh, everything: trio.CancelScope) -> None:
        """Stop in order once an elder node turns out to have our identity."""
        await mesh.cloned.wait()
        self._cloned = True
        self._stop_in_order(everything)

    # --- trainers, one after another ----------------------------------------------------------------

    async def _run_trainer(self, mesh: Mesh, http: str, nursery: trio.Nursery) -> bool:
        """Run one trainer process to its end; True if another is to follow. What outlives it runs in `nursery`."""
        if self._joined is not None and not await self._pause_policy.rest(self._stop):
            return False
        again = False
        try:
            loop = self._config.loop
            opened = open_trainer(self.emit) if loop is None else attach_trainer(self.emit, *loop)
            async with opened as self._trainer:
                if self._joined is None:
                    self._joined = await self._join(mesh, http, nursery)
                run, peers = self._joined
                again = await self._train(run.sealed, peers, self._trainer)
        except* TrainerError as errors:
            again = not self._stop.is_set()
            if self._trainer is not None and self._trainer.given_up:
                self.emit(StateChanged("stopping", NO_TIME))
            else:
                self._failures += 1
                if self._failures >= _TRAINER_FAILURES or self._config.loop is not None:
                    raise
                follows = "It starts again from its checkpoint." if again else "What it did since its checkpoint is lost."
                self.emit(Troubled(TrainerError.entry.code, f"{first_error(errors).cause} {follows}"))
        except* (ModelTooLargeError, DeviceError) as errors:
            error, again = first_error(errors), not self._stop.is_set()
            was_set = error.code == DeviceError.entry.code and self._limits.now.devices != self._config.settings.devices
            if not (self._fitted or was_set) or self._config.loop is not None:
                raise
            if was_set:  # or it would be so after each start, and only a node that is up can be set otherwise
                self.guest.change({"devices": ""})
                self.emit(Troubled(error.code, f"{error.cause} It was set; what --devices says counts again."))
            else:
                self.emit(Troubled(error.code, f"{error.cause} It was enough before, and is tried again in a minute."))
                with trio.move_on_after(_ROOM_SECONDS):
                    await self._stop.wait()
        finally:
            self._answerer.loop = self._set_up = None
            self._trainer = None
        return again

    async def _train(self, sealed: Sealed, peers: Peers, trainer: TrainerProcess) -> bool:
        """Train until told to stop, finished, or paused; True if another trainer is to go on then."""
        set_up = self._wanted()
        before, settings = self._session, self._session_settings(sealed)
        self._session = session = TrainingSession(settings, trainer, peers, self._pause_policy, self.emit)
        if before is not None:
            session.weights.go_on_from(before.weights)
        if not await session.rest(self._stop):
            return False
        if self._base is not None:
            await self._base.gather(trainer, peers)
        if not await session.unless_paused(partial(self._load, session)):
            return True
        self._keep_back(trainer.outbox.size, peers.expect(trainer.outbox.size, trainer.built))
        self._answerer.loop, self._set_up = session.loop, set_up
        while (reason := await session.train(self._stop)) in ("behind", "paused"):
            if session.trainer_may_end:
                return True
            if reason == "paused":
                self._set_up = None  # without a checkpoint it goes on as it is
                if not await session.rest(self._stop):
                    break
            if (reason == "behind" or session.weights.is_behind()) and not await session.unless_paused(session.refresh):
                return True
        if reason == "finished":
            with trio.move_on_after(self._config.linger):
                await self._stop.wait()
        return False

    async def _load(self, session: TrainingSession) -> None:
        self._tell_lost(await session.weights.load())

    def _loaded_trainer(self) -> TrainerProcess | None:
        """The trainer that is up, once it has weights of the run."""
        return None if self._session is None or self._session.state == "joining" else self._trainer

    def _tell_lost(self, round_number: int) -> None:
        """Tell of the steps that receipts prove and the weights on this disk do not hold; once, though trainer after trainer
        begins at or before them."""
        lost = self._receipts.since(self._identity.peer_id, round_number)  # once per trainer, some milliseconds
        if news := {*lost} - self._lost:
            cause = f"{len(news)} that partners took with this node came after its checkpoint of round {round_number}."
            self.emit(Troubled(LostStepsError.entry.code, cause))
            self._lost |= news

    def _keep_back(self, size: int, patience: float) -> None:
        """Keep back the bytes of an exchange, and tell once what the owner's limits make impossible."""
        self._budget.keep_back(size)
        for cause in shortfalls(self._config.allowance, size, patience):
            if cause not in self._warned:
                self._warned.add(cause)
                self.emit(Troubled(AllowanceError.entry.code, cause))

    # --- joining ------------------------------------------------------------------------------------

    async def _join(self, mesh: Mesh, http: str, nursery: trio.Nursery) -> tuple[AmendedRun, Peers]:
        """Find the run's manifest and its members, and open this node's services to them."""
        paths = self._config.paths
        if (sealed := stored_manifest(paths)) is None:
            self.emit(StateChanged("discovering", "a peer that knows the run"))
            sealed = await mesh.find_run()
            write_whole(paths.manifest, sealed.to_bytes())
        elif not sealed.run_id.startswith(wanted := self._config.mesh.run):
            raise WrongRunError(f"{paths.root} belongs to run {sealed.run_id}, and {wanted} was asked for.")
        if self._config.loop is None:
            sealed.manifest.data.check_given(self._config.data)  # here too: the trainer takes long to import what it needs
        self._tell_started(sealed, mesh, http)
        self.emit(StateChanged("discovering", "the run's members"))
        run = await mesh.enter(sealed, self._own_state)
        context = Context.of(self._identity, sealed)
        exchanges = ExchangeService(context, mesh.dial, self._answerer, self._receipts, mesh.judge, self.emit)
        nursery.start_soon(exchanges.doubts.run)
        nursery.start_soon(self._snapshot.run)
        if (base := sealed.manifest.base) is not None:
            self._base = BaseFiles(base, paths.base, self._config.base, self.emit)
        pinned = self._base.served if self._base else None
        donor = Donor(context, self._snapshot.get, self._config.max_uploads, self.emit, mesh.origin, pinned)
        peers = Peers(mesh, exchanges, context, self.emit)
        mesh.serve(EXCHANGE, containing_failures(peers.answer, self.emit))
        mesh.serve(SNAPSHOT, containing_failures(self._pausing.pausable(donor.handle), self.emit))
        nursery.start_soon(keep_registry(mesh, self._identity, sealed, paths, self.emit).run)
        nursery.start_soon(keep_count(mesh, self._identity, sealed, paths, self._receipts, self.emit).run)
        return run, peers

    def _tell_started(self, sealed: Sealed, mesh: Mesh, http: str) -> None:
        started = Started(self._identity.peer_id, sealed.run_id, sealed.manifest.name, mesh.addresses, http)
        token = _token_file(self._config)
        running = data_directory.Running(
            os.getpid(), http, started.peer_id, started.run_id, started.addresses, str(token.absolute()) if token else ""
        )
        data_directory.announce(self._config.paths, running)
        self.emit(started)

    def _session_settings(self, sealed: Sealed) -> SessionSettings:
        config, (devices, threads, nice) = self._config, self._limits.now.of_trainer
        setup = Setup(
            manifest=sealed.to_bytes(), peer_id=self._identity.peer_id,
            amendments=self._joined[0].raw if self._joined else b"", number=self._own_state()[0].round,
            data=config.data, checkpoints=config.paths.checkpoints, cache=config.paths.cache,
            base=config.paths.base if sealed.manifest.base else None, base_bits=config.base_bits,
            devices=devices, threads=threads, nice=nice, spare_memory=config.spare_memory, compile=config.compile,
            tf32=config.tf32, clip_change=config.clip_change,
        )  # fmt: skip
        return SessionSettings(
            setup, sealed.manifest, config.paths.incoming, self._may_seed, config.checkpoint_every, config.grace, goal(sealed)
        )

    def _own_state(self) -> tuple[Standing, str]:
        """What our heartbeats tell."""
        session, paused = self._session, self._pause_policy.pause is not None
        standing, state = (session.weights.standing, session.state) if session else (Standing(0, 0, 0.0), "joining")
        return standing, "paused" if paused else state


def _token_file(config: NodeConfig) -> Path | None:
    """Where the token of the pages lies; None where they need none, because only this machine can ask."""
    return config.http_token or (None if is_loopback(config.http.host) else config.paths.http_token)


def _page_access(config: NodeConfig) -> PageAccess:
    """Changes need the token everywhere, reading where `_token_file` names one."""
    token = read_token(config.http_token) if config.http_token else make_token(config.paths.http_token)
    return PageAccess(token if _token_file(config) else None, config.http_open_metrics, changes=token)


def _tasks() -> int:
    """How many trio runs in this process."""
    return trio.lowlevel.current_statistics().tasks_living
