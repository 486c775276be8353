"""The stage for one cell of the fault matrix: simulated nodes, a tap on their states, and the one moment of the fault.

The rule: the fault strikes when the side that the cell is about enters the cell's state for the first time after `armed`,
and never again. What must hold is looked at from outside.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from nolocod.errors import RemoteError
from nolocod.proto.exchange import Exchange
from nolocod.studies.sim import clock
from nolocod.studies.sim.journal import Journal
from nolocod.studies.sim.swarm import Plan, Settings, Swarm
from nolocod.studies.sim.taps import side_of, tapped

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable

    from nolocod.proto.limits import Limits
    from nolocod.proto.serving import Service
    from nolocod.studies.sim.faults import Way
    from nolocod.studies.sim.network import End
    from nolocod.studies.sim.subjects import Subject

QUIET = 60.0
"""After which nothing may be left of anything that has ended: more than the longest wait of what has."""


@dataclass(frozen=True)
class Verdict:
    """What came of one strike. `fate`: in a word; `seconds`: the longest that it made anything take."""

    fate: str
    seconds: float
    violations: tuple[str, ...] = ()


@dataclass
class Stage:
    """One run; the scene (faults.Scene) of its fault. `number`: whose state it is about; `protocol`: on which streams."""

    side: str
    state: str
    way: Way
    swarm: Swarm
    number: int
    protocol: str
    nodes: list[Subject] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    over_at: float = 0.0
    armed: bool = False
    struck: trio.Event = field(default_factory=trio.Event)
    session: str = ""
    _streams: list[End] = field(default_factory=list)
    _waiting: list[tuple[str, Callable[[End], None]]] = field(default_factory=list)
    restarted: trio.Event = field(default_factory=trio.Event)
    lives: list[Subject] = field(default_factory=list)

    # --- the scene --------------------------------------------------------------------------------------

    @property
    def own(self) -> Subject:
        return self.nodes[self.number]

    def on_stream(self, side: str, hang: Callable[[End], None]) -> None:
        if self._streams:
            hang(self._end(self._streams[-1], side))
        else:
            self._waiting.append((side, hang))

    def kill(self, restart: float) -> None:
        victim = self.own
        victim.kill()
        self.restarted = trio.Event()
        self.swarm.nursery.start_soon(self._restart, victim, restart)

    def again(self, delay: float) -> None:
        if self._streams:
            self.swarm.nursery.start_soon(self._say_again, delay, self._end(self._streams[-1], "own"))

    def lasts(self, seconds: float) -> None:
        self.over_at = trio.current_time() + seconds

    def _end(self, near: End, side: str) -> End:
        """The end of a stream that `side` writes to; the one who dialled has `near`."""
        victim = self.own.peer_id
        mine, other = (near, near.peer_end) if near.peer_end.remote == victim else (near.peer_end, near)
        return mine if side == "own" else other

    async def _restart(self, victim: Subject, seconds: float) -> None:
        await trio.sleep(seconds)
        node = victim.again()
        self.nodes[victim.number] = node
        self.lives.append(node)
        self.revived(node)
        self.restarted.set()

    def revived(self, node: Subject) -> None:
        """`node` is in its next life, and is to join."""
        self.swarm.begin(node)

    async def _say_again(self, delay: float, end: End) -> None:
        """Without a word of our own: what was recorded, on a new stream."""
        await trio.sleep(delay)
        try:
            stream = await self.swarm.network.dial(self.own.port)(end.remote, self.protocol)
        except RemoteError:
            return  # it serves nothing of the kind
        with suppress(RemoteError):  # whoever hears it may say no
            await stream.write(bytes(end.record or b""))
            await trio.sleep(QUIET / 2)
        await stream.reset()

    async def run(self) -> Verdict:
        """Let it happen, and look at what came of it."""
        raise NotImplementedError

    def dialled(self, near: End) -> None:
        if not self.armed or near.protocol != self.protocol:
            return
        self._streams.append(near)
        near.record, near.peer_end.record = bytearray(), bytearray()
        for side, hang in self._waiting:
            hang(self._end(near, side))
        self._waiting.clear()

    def entered(self, machine: Exchange | Service, state: enum.Enum) -> None:
        """A state machine of one of the two is in `state` now."""
        if not self.armed or self.struck.is_set() or (side_of(machine), state.name) != (self.side, self.state):
            return
        self.struck.set()
        if isinstance(machine, Exchange):
            self.session = machine.session.hex()
        self.over_at = trio.current_time()
        self.way.strike(self)

    async def restarted_or_never(self) -> None:
        if self.way.fault == "killed":
            await self.restarted.wait()

    async def until(self, what: str, seconds: float, condition: Callable[[], bool]) -> bool:
        with trio.move_on_after(seconds):
            while not condition():  # noqa: ASYNC110 - looked at from outside
                await trio.sleep(0.25)
            return True
        self.violations.append(f"{what} did not come within {seconds:.0f} s")
        return False


def staged(make: Callable[[Swarm], Stage], cell: tuple[Settings, Limits, int]) -> Verdict:
    """Put a swarm on the stage and run it; `cell`: its settings, its limits, and the seed, which decides everything."""
    settings, limits, seed = cell

    async def main() -> Verdict:
        async with trio.open_nursery() as nursery:
            swarm = Swarm(Plan("faults", nodes=2, rounds=0, seed=seed, cheap=True), settings, nursery, Journal())
            swarm.limits = limits
            stage = make(swarm)
            swarm.network.dialled = stage.dialled
            with swarm.signing.checked(), tapped(stage.entered):
                verdict = await stage.run()
                nursery.cancel_scope.cancel()
        return verdict

    return clock.run(main, seed)
