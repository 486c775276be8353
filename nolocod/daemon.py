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

from nolocod import datadir, identity
from nolocod.errors import ClockError, PeerBusyError, TrainerError
from nolocod.events import Started, StateChanged, Troubled
from nolocod.manifest import unseal
from nolocod.metrics import Metrics
from nolocod.p2p.donors import Donor, ServedSnapshot, fetch_snapshot
from nolocod.p2p.exchanger import Exchanger
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.partners import choose
from nolocod.p2p.receipts import ReceiptStore
from nolocod.p2p.streams import EXCHANGE, SNAPSHOT
from nolocod.replica import Part, Replica
from nolocod.status.server import serve_http
from nolocod.status.state import StatusState
from nolocod.terms import Accept, Answer, Busy, Desk, Ended, Offer, Standing
from nolocod.trainer.process import TrainerProcess, open_trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from nolocod.config import NodeConfig
    from nolocod.events import Event
    from nolocod.identity import PeerId
    from nolocod.manifest import Sealed
    from nolocod.rounds import Rounds
    from nolocod.terms import Member

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
    with datadir.hold(config.paths):
        node = Node(config, may_seed=may_seed, followers=followers)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.watch_signals, nursery.cancel_scope)
            http = await nursery.start(serve_http, config.http, node.status, node.metrics)
            await node.run(http)
            nursery.cancel_scope.cancel()


class Node:
    """What outlives a trainer: identity, mesh, services to peers, and whether we were told to stop."""

    def __init__(self, config: NodeConfig, *, may_seed: bool, followers: Iterable[Callable[[Event], None]]) -> None:
        self.status = StatusState(trio.current_time)
        self.metrics = Metrics()
        self._config = config
        self._may_seed = may_seed
        self._followers = [self.metrics.follow, self.status.follow, *followers]
        self._identity = identity.load_or_create(config.paths.identity)
        self._rng = random.SystemRandom()
        self._stop = trio.Event()
        self._reception = Reception()
        self._part: Part | None = None
        self._replica: Replica | None = None
        self._trainer: TrainerProcess | None = None
        self._served: ServedSnapshot | None = None
        self._failures = 0

    def emit(self, event: Event) -> None:
        """Tell all followers, the replica among them."""
        for follow in self._followers:
            follow(event)
        if self._replica is not None:
            self._replica.follow(event)

    async def watch_signals(self, everything: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        """First signal: stop in order, if there is something to put in order. Second: stop at once."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                if self._stop.is_set() or self._replica is None or self._replica.state == "joining":
                    everything.cancel()
                self._stop.set()

    async def run(self, http: str) -> None:
        """Join the run and train, through as many trainer processes as it takes."""
        self.emit(StateChanged("starting"))
        async with open_mesh(self._config, self._identity, self.emit, rng=self._rng) as mesh:
            try:
                while await self._one_life(mesh, http):
                    pass
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(2):
                    await mesh.leave()
                self._config.paths.daemon.unlink(missing_ok=True)

    async def _one_life(self, mesh: Mesh, http: str) -> bool:
        """Run one trainer process to its end; True if another is to follow."""
        again = False
        try:
            async with open_trainer(self.emit) as self._trainer:
                if self._part is None:
                    self._part = await self._join(mesh, http)
                again = await self._train(self._part, self._trainer)
        except* TrainerError as errors:
            self._failures += 1
            if self._failures >= _TRAINER_FAILURES:
                raise
            self.emit(Troubled(TrainerError.entry.code, f"{errors.exceptions[0]} It starts again from its checkpoint."))
            again = True
        finally:
            self._reception.rounds = None
            self._trainer = None
        return again

    async def _train(self, part: Part, trainer: TrainerProcess) -> bool:
        afresh = self._replica is not None and self._replica.is_behind()
        self._replica = replica = Replica(part, trainer, self.emit)
        await replica.load(afresh=afresh)
        self._reception.rounds = replica.rounds
        reason = await replica.train(self._stop)
        if reason == "finished":
            with trio.move_on_after(self._config.linger):
                await self._stop.wait()
        return reason == "behind"

    # --- joining ------------------------------------------------------------------------------------

    async def _join(self, mesh: Mesh, http: str) -> Part:
        """Find the run's manifest and its members, and open this node's services to them."""
        sealed = self._stored_manifest()
        if sealed is None:
            self.emit(StateChanged("discovering", "a peer that tells us about the run"))
            sealed = await mesh.find_run(self._config.bootstrap)
            datadir.write_whole(self._config.paths.manifest, sealed.to_bytes())
        part = Part(self._identity.peer_id, sealed, self._config, swarm, self._may_seed)
        await mesh.enter(sealed, self._says)
        ...
        return part
