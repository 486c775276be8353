"""Simulated nodes that faults are tried on: they can be stopped, filled up, cut off, killed, and started again.

What survives a kill is what was on the disk: receipts, and a checkpoint after each outer step. What a killed process still
does while its tasks end reaches nobody and nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import trio

from nolocod.errors import DataDirError, DiskFullError, HarmfulTensorError, LocalError, LostStepsError
from nolocod.observe.events import DoubtSettled, Event, ExchangeEnded, OuterStep, Troubled
from nolocod.p2p.exchange.receipts import sessions_since
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto.types import Busy, Ended
from nolocod.studies.sim.clock import past, sleep
from nolocod.studies.sim.node import SimNode, SimReceipts, T, Ts
from nolocod.studies.sim.replica import SimReplica, State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nolocod.identity import PeerId
    from nolocod.p2p.transport.stream import Handler, Stream
    from nolocod.proto.receipt import Receipt
    from nolocod.proto.types import Answer, Applied, Description, Inspection, LocalSide, Offer, Standing
    from nolocod.studies.sim.network import Port
    from nolocod.studies.sim.swarm import Swarm

_DISK_SECONDS = 0.02
"""Of a write: a kill in its first half leaves nothing of it, one in its second half all."""
_WRITING = ("_store", "_finish")
"""What a newcomer does to its disk (p2p/snapshots/client.py)."""


@dataclass
class Disk:
    """What of a node survives its process."""

    receipts: dict[bytes, Receipt] = field(default_factory=dict)
    votes: dict[bytes, Receipt] = field(default_factory=dict)
    weights: State | None = None
    round: int = 0
    tokens: int = 0


class Receipts(SimReceipts):
    """Those on a disk, which can be full."""

    def __init__(self, disk: Disk) -> None:
        self.kept, self.votes = disk.receipts, disk.votes
        self.full = False

    def add(self, receipt: Receipt) -> None:
        self._check()
        super().add(receipt)

    def vote(self, vote: Receipt) -> None:
        self._check()
        super().vote(vote)

    def _check(self) -> None:
        if self.full:
            raise DiskFullError("the simulated disk is full.")


class RejectingReplica(SimReplica):
    """Rejects the next message if told to; and its network process can stand still, which hears no answer then."""

    reject_once = False
    unheard_until = 0.0

    async def capture(self, subject: int, after: int = 0) -> Description:
        description = await super().capture(subject, after)
        await past(self.unheard_until)
        return description

    async def apply(self, run_round: int, skipped: bytes) -> Applied:
        await past(self.unheard_until)
        return await super().apply(run_round, skipped)

    async def inspect(self, *, probation: bool) -> Inspection:
        inspection = await super().inspect(probation=probation)
        await past(self.unheard_until)
        if self.reject_once:
            self.reject_once = False
            raise HarmfulTensorError("told to reject it.")  # which bans nobody at once: of two nodes nobody would be left
        return inspection


class NodeUnderTest(SimNode):
    """Keeps account of what its exchanges came to, by session."""

    replica: RejectingReplica

    def __init__(self, swarm: Swarm, number: int, port: Port, replica: RejectingReplica, disk: Disk, life: int) -> None:
        self.receipts: Receipts
        super().__init__(swarm, number, port, replica, goal=0, life=life, receipts=Receipts(disk))
        port.handlers[EXCHANGE] = self.outliving(self.exchange_service.handle)
        self._swarm = swarm
        self.disk = disk
        self.life = life
        self.killed = False
        self.busy_once = False
        """Say Busy to the next offer."""
        self.told: dict[str, ExchangeEnded] = {}
        """How its exchanges ended ..."""
        self.began: dict[str, float] = {}
        """... and when they began."""
        self.settled: set[str] = set()
        """Exchanges that are in doubt no more."""
        self.steps: dict[str, bytes] = {}
        """Our message of each exchange that was applied."""
        self.troubles: list[str] = []

    @classmethod
    def first(cls, swarm: Swarm, speed: float) -> NodeUnderTest:
        """The next node of `swarm`, in its first life."""
        number = len(swarm.nodes)
        port = swarm.network.add(swarm.signing.identity(number).peer_id)
        node = cls(swarm, number, port, _replica(swarm, number, speed), Disk(), 0)
        swarm.nodes.append(node)
        return node

    def again(self) -> NodeUnderTest:
        """The same node in its next life, from what is on its disk."""
        swarm, disk = self._swarm, self.disk
        replica = _replica(swarm, self.number, self.replica.speed)
        if disk.weights is not None:
            replica.restore(disk.weights, disk.round, disk.tokens)
        node = type(self)(swarm, self.number, swarm.network.add(self.peer_id), replica, disk, self.life + 1)
        swarm.nodes[self.number] = node
        newest_first = reversed(list(node.receipts.kept.values()))
        if lost := sessions_since(newest_first, self.peer_id, disk.round):
            node.emit(Troubled(LostStepsError.entry.code, f"{len(lost)} steps"))
        return node

    # --- what can befall it -----------------------------------------------------------------------------

    def freeze(self, seconds: float) -> None:
        """Its network process stands still, as under SIGSTOP; the trainer, another process, goes on."""
        self.port.frozen_until = self.replica.unheard_until = trio.current_time() + seconds

    def fill_disk(self, seconds: float) -> None:
        self.receipts.full = True
        self.world.nursery.start_soon(self._empty_disk, seconds)

    async def _empty_disk(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.receipts.full = False

    def cut_off(self, seconds: float) -> None:
        """Nothing passes between it and the others, who are told nothing."""
        self.port.side = 1
        self.world.nursery.start_soon(self._join_again, seconds)

    async def _join_again(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.port.side = 0
        for other in self._swarm.nodes:  # those that it remembers, as mesh.py has it
            if other.port.up and other is not self:
                await self.swap(other.peer_id)

    def kill(self) -> None:
        self.disk = replace(self.disk, receipts=dict(self.disk.receipts), votes=dict(self.disk.votes))
        self.killed = True
        super().kill()

    async def do(self, work: Callable[[], Awaitable[None]]) -> None:
        """Before it takes part: `work`, which ends with its process."""
        async with trio.open_nursery() as self._nursery:
            await work()
        self._nursery = None

    async def aside(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        if self.receipts.full and getattr(work, "__name__", "") in _WRITING:
            raise DiskFullError("the simulated disk is full.")
        await past(self.port.frozen_until)
        await sleep(_DISK_SECONDS / 2)
        done = await super().aside(work, *arguments)
        await sleep(_DISK_SECONDS / 2)
        return done

    def outliving(self, handle: Handler) -> Handler:
        """As daemon.Node: a failure of our own is told, and costs the stream."""

        async def told(stream: Stream) -> None:
            try:
                await handle(stream)
            except LocalError as error:
                self.emit(Troubled(error.code, error.cause))
                await stream.reset()

        return told

    async def offer(self, partner: PeerId, standing: Standing, subject: int, local_side: LocalSide) -> Ended:
        try:
            return await super().offer(partner, standing, subject, local_side)
        except (DiskFullError, DataDirError) as error:  # as node.peers.Peers
            self.emit(Troubled(error.code, error.cause))
            return Ended("aborted", partner, b"", error=error.code, reason=error.cause)

    # --- what it tells ----------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        super().emit(event)
        if not self.port.up:
            return
        match event:
            case DoubtSettled():
                self.settled.add(event.session)
            case ExchangeEnded(session=str(session)) if session:
                self.told[session] = event
                self.began[session] = trio.current_time() - event.seconds
            case Troubled():
                self.troubles.append(event.code)
            case OuterStep():
                self._checkpoint()

    def _applied(self, before: State, after: State, paired: bool) -> None:
        super()._applied(before, after, paired)
        if self.port.up:
            if paired:
                span = self.replica.span
                self.steps[self._session] = bytes(self.replica.outbox.content[: 8 * (span.stop - span.start)])
            self._checkpoint()

    def decide(self, offer: Offer) -> Answer:
        if self.busy_once:
            self.busy_once = False
            return Busy(1.0, "told to")
        return super().decide(offer)

    def committed(self, since: float = 0.0) -> bool:
        """Whether an exchange that began after `since` was committed."""
        return any(ended.outcome == "committed" and self.began[name] > since for name, ended in self.told.items())

    def left(self) -> dict[str, int]:
        """What an idle node must have none of."""
        return {
            "exchanges": len(self.exchange_service._running),
            "offers": len(self.exchange_service._outstanding),
            "streams": len(self.port.ends),
            "engagements": int(not self.idle),
            "snapshots": int(self.replica.captured is not None),
            "doubts": len(self.receipts.doubts()),
        }

    def _checkpoint(self) -> None:
        replica = self.replica
        self.disk.weights, self.disk.round, self.disk.tokens = replica.state, replica.round, replica.tokens


def _replica(swarm: Swarm, number: int, speed: float) -> RejectingReplica:
    rng = random.Random(f"{swarm.plan.seed} replica {number} {trio.current_time()}")
    return RejectingReplica(swarm.scenario.outer, speed, rng, chunk=swarm.limits.chunk_bytes)
