"""One cell of the fault matrix: simulated nodes, the moment of the fault, and what must hold afterwards.

The fault strikes when the cell's side enters the cell's state for the first time after `armed`, and never again. The nodes
are then left alone until they have taken another step together. What must hold is looked at from outside.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RemoteError
from nolocod.proto.exchange import Exchange
from nolocod.proto.limits import Limits
from nolocod.studies.sim import clock
from nolocod.studies.sim.journal import Journal
from nolocod.studies.sim.replica import OuterSettings
from nolocod.studies.sim.scenarios import Plan, Scenario
from nolocod.studies.sim.swarm import Swarm
from tests.fault_matrix.node import NodeUnderTest
from tests.support.faulty_network import FaultyNetwork
from tests.support.state_changes import side_of, state_changes

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable

    from nolocod.proto.snapshot_states import Service
    from tests.fault_matrix.faults import Case
    from tests.support.faulty_network import FaultyEnd

LIMITS = Limits(chunk_bytes=16, chunks_per_request=3)
SCENARIO = Scenario(outer=OuterSettings(inner_steps=20, step_seconds=1.0), staleness=50)
SPEEDS = (1.0, 1.3)
"""Seconds per inner step: the first node is at its boundary first, so it is the one who offers."""
WARM = 200.0
HORIZON = 1500.0
"""Seconds after the fault is over within which the next exchange must be committed."""
QUIET = 60.0
"""After which nothing may be left of anything that has ended: more than the longest wait of what has."""


@dataclass(frozen=True)
class Verdict:
    """What came of one strike. `fate`: in a word; `seconds`: the longest that it made anything take."""

    fate: str
    seconds: float
    violations: tuple[str, ...] = ()


class Cell:
    """One run. `number`: the node whose state it is about; `protocol`: on which streams."""

    def __init__(self, side: str, state: str, case: Case, swarm: Swarm, *, number: int, protocol: str) -> None:
        self.side, self.state, self.case, self.swarm = side, state, case, swarm
        self.rng = random.Random(f"{swarm.plan.seed} {side} {state} {case.name}")
        self.number, self.protocol = number, protocol
        self.nodes: list[NodeUnderTest] = []
        self.lives: list[NodeUnderTest] = []
        """All nodes, and again each that was restarted."""
        self.violations: list[str] = []
        self.armed = False
        self.struck = trio.Event()
        self.over_at = 0.0
        self.restarted = trio.Event()
        self.session = ""
        """The exchange that was struck."""
        self._stream: FaultyEnd | None = None
        self._waiting: list[tuple[str, Callable[[FaultyEnd], None]]] = []

    @property
    def own(self) -> NodeUnderTest:
        return self.nodes[self.number]

    # --- what the two kinds of cells do -----------------------------------------------------------------

    def wire(self, node: NodeUnderTest) -> None:
        """Give a new node its parts that are not in SimNode."""

    def rejoin(self, node: NodeUnderTest) -> None:
        """`node` was started again."""
        self.wire(node)
        self.swarm.begin(node)

    async def play(self) -> None:
        """Make what comes to the cell's state happen, and wait until it is over."""
        raise NotImplementedError

    def outcome(self) -> tuple[str, float]:
        """The fate, and the seconds of a verdict."""
        raise NotImplementedError

    # --- the course of a cell ---------------------------------------------------------------------------

    async def run(self) -> Verdict:
        for speed in SPEEDS:
            self.add(speed)
        for node in self.nodes:
            self.wire(node)
            self.swarm.begin(node)
        await self.until("a first exchange", WARM, lambda: all(node.committed() for node in self.nodes))
        await trio.sleep(1.0)
        await self.play()
        self.swarm.oracle.end()
        fate, seconds = self.outcome()
        return Verdict(fate, seconds, (*self.violations, *self.swarm.oracle.violations))

    def add(self, speed: float) -> NodeUnderTest:
        node = NodeUnderTest.first(self.swarm, speed)
        self.nodes.append(node)
        self.lives.append(node)
        return node

    async def until(self, what: str, seconds: float, condition: Callable[[], bool]) -> bool:
        with trio.move_on_after(seconds):
            while not condition():  # noqa: ASYNC110 - looked at from outside
                await trio.sleep(0.25)
            return True
        self.violations.append(f"{what} did not come within {seconds:.0f} s")
        return False

    async def recover(self, quiet: float) -> None:
        """Until the fault is over, all have exchanged again, and nothing was left behind."""
        await trio.sleep_until(self.over_at)
        if self.case.fault == "killed":
            await self.restarted.wait()
        since = trio.current_time()
        await self.until("another exchange", HORIZON, lambda: all(one.committed(since) and one.idle for one in self.nodes))
        for node in self.nodes:
            await node.loop.close(QUIET)
        await trio.sleep(quiet)
        for node in self.nodes:
            self.violations += [f"{what} left at node {node.number}: {left}" for what, left in node.left().items() if left]

    # --- the fault --------------------------------------------------------------------------------------

    def entered(self, machine: Exchange | Service, state: enum.Enum) -> None:
        """A state machine of one of the nodes is in `state` now."""
        if not self.armed or self.struck.is_set() or (side_of(machine), state.name) != (self.side, self.state):
            return
        self.struck.set()
        if isinstance(machine, Exchange):
            self.session = machine.session.hex()
        self.over_at = trio.current_time() + self.case.strike(self)

    def dialled(self, near: FaultyEnd) -> None:
        """A new stream: faults that wait for one are hung into it."""
        if not self.armed or near.protocol != self.protocol:
            return
        self._stream = near
        for side, hang in self._waiting:
            hang(self._end(near, side))
        self._waiting.clear()

    def on_stream(self, side: str, hang: Callable[[FaultyEnd], None]) -> None:
        """Call `hang` with the end that `side` ("own" or "other") writes to, now or once there is one."""
        if self._stream is None:
            self._waiting.append((side, hang))
        else:
            hang(self._end(self._stream, side))

    def _end(self, near: FaultyEnd, side: str) -> FaultyEnd:
        mine, other = (near, near.peer_end) if near.peer_end.remote == self.own.peer_id else (near.peer_end, near)
        return mine if side == "own" else other

    def kill(self, restart: float) -> None:
        """SIGKILL own; it is started again after `restart` seconds, from its disk."""
        node = self.own
        node.kill()
        self.swarm.nursery.start_soon(self._restart, node, restart)

    async def kill_after(self, seconds: float, restart: float) -> None:
        await trio.sleep(seconds)
        self.kill(restart)

    async def _restart(self, killed: NodeUnderTest, seconds: float) -> None:
        await trio.sleep(seconds)
        node = killed.again()
        self.nodes[node.number] = node
        self.lives.append(node)
        self.rejoin(node)
        self.restarted.set()

    def say_again(self, delay: float) -> None:
        """What own wrote on this stream comes once more after `delay` seconds, on a new stream."""
        if self._stream is not None:
            self.swarm.nursery.start_soon(self._say_again, delay, self._end(self._stream, "own"))

    async def _say_again(self, delay: float, end: FaultyEnd) -> None:
        await trio.sleep(delay)
        try:
            stream = await self.swarm.network.dial(self.own.port)(end.remote, self.protocol)
        except RemoteError:
            return  # it serves nothing of the kind
        with suppress(RemoteError):  # whoever hears it may say no
            await stream.write(bytes(end.record))
            await trio.sleep(QUIET / 2)
        await stream.reset()


def run_cell(make: Callable[[Swarm], Cell], seed: int) -> Verdict:
    """Run one cell; the same seed gives the same verdict."""

    async def main() -> Verdict:
        async with trio.open_nursery() as nursery:
            swarm = Swarm(Plan("faults", nodes=2, rounds=0, seed=seed, cheap=True), SCENARIO, nursery, Journal())
            swarm.limits = LIMITS
            cell = make(swarm)
            swarm.network = FaultyNetwork(SCENARIO.line, random.Random(f"{seed} network"), cell.dialled)
            with swarm.signing.checked(), state_changes(cell.entered):
                verdict = await cell.run()
                nursery.cancel_scope.cancel()
        return verdict

    return clock.run(main, seed)
