"""One cell of the fault matrix that is about an exchange: two nodes, one fault in one state, and what came of it.

The rule: the fault strikes in the second exchange, so that momentum is not zero; then the two are left alone until they
have taken another step together. Everything that must hold is looked at from outside, by the oracle's own formula and by
what both sides told and stored.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import trio

from nolocod.errors import DiskFullError, LostStepsError, UnacknowledgedError
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto.limits import Limits
from nolocod.proto.types import describe
from nolocod.studies.sim.replica import Course
from nolocod.studies.sim.staging import QUIET, Stage, Verdict, staged
from nolocod.studies.sim.subjects import Subject
from nolocod.studies.sim.swarm import Settings

if TYPE_CHECKING:
    from nolocod.studies.sim.faults import Way

LIMITS = Limits(chunk_bytes=16, chunks_per_request=3)
SETTINGS = Settings(course=Course(inner_steps=20, step_seconds=1.0), staleness=50)
SPEEDS = (1.0, 1.3)
"""Seconds per inner step: the first node is at its boundary first, so it is the one who offers."""
WARM = 200.0
HORIZON = 1500.0
"""Seconds after the fault is over within which the next exchange must be committed."""
_LONGEST = LIMITS.exchange_seconds + LIMITS.doubt_seconds + LIMITS.dial_seconds

Fate = Literal["both", "neither", "doubt", "lost"]
"""Who applied an exchange. Doubt: one side, and the other counts it as in doubt. Lost: one side, while the other was
killed before it could; either its restart tells of lost steps, or the one who applied tells that nobody acknowledged."""


class Trial(Stage):
    """Two nodes, of whom the first offers."""

    def prepare(self) -> None:
        """Make the next exchange one that comes to the state that is asked for."""
        answerer = self.nodes[1]
        answerer.busy_once = self.state == "CLOSED"
        answerer.replica.reject_once = self.state == "ABORTED"

    async def run(self) -> Verdict:
        swarm = self.swarm
        self.nodes = [Subject.first(swarm, speed) for speed in SPEEDS]
        self.lives = list(self.nodes)
        for node in self.nodes:
            swarm.begin(node)
        await self.until("a first exchange", WARM, lambda: all(node.committed() for node in self.nodes))
        await trio.sleep(1.0)
        tasks = trio.lowlevel.current_statistics().tasks_living
        self.armed = True
        self.prepare()
        if await self.until("the state", WARM, self.struck.is_set):
            await trio.sleep_until(self.over_at)
            await self.restarted_or_never()
            since = trio.current_time()
            await self.until(
                "another exchange", HORIZON, lambda: all(node.committed(since) and node.idle for node in self.nodes)
            )
            for node in self.nodes:
                await node.rounds.close(QUIET)
            await trio.sleep(QUIET)
            self._look_for_leaks(tasks)
        swarm.oracle.end()
        fates = {session: self._fate(session) for session in sorted({s for life in self.lives for s in life.told})}
        longest = max((ended.seconds for life in self.lives for ended in life.told.values()), default=0.0)
        if longest > _LONGEST:
            self.violations.append(f"an exchange took {longest:.0f} s, the limits allow {_LONGEST:.0f}")
        return Verdict(fates.get(self.session, "neither"), longest, tuple(self.violations + swarm.oracle.violations))

    # --- what must hold ---------------------------------------------------------------------------------

    def _look_for_leaks(self, tasks: int) -> None:
        for node in self.nodes:
            for what, left in node.left().items():
                if left:
                    self.violations.append(f"{what} left at the {'answerer' if node.number else 'offerer'}: {left}")
        now = trio.lowlevel.current_statistics().tasks_living
        if now > tasks:
            self.violations.append(f"{now} tasks, {tasks} before")

    def _fate(self, session: str) -> Fate:
        """Whether one exchange was applied by both, or by neither, or by one side in a way that is told."""
        sides = [[life for life in self.lives if life.number == number] for number in (0, 1)]
        applied = [any(session in life.steps for life in lives) for lives in sides]
        if all(applied):
            self._compare(session, [next(life for life in lives if session in life.steps) for lives in sides])
            return "both"
        if not any(applied):
            return "neither"
        one, other = sides if applied[0] else sides[::-1]
        told = next((life.told[session] for life in other if session in life.told), None)
        if told is not None:
            if told.outcome != "in_doubt":
                self.violations.append(f"{session[:8]} was applied by one side, and is {told.outcome} for the other")
            elif not any(life.killed for life in self.lives) and not any(session in life.settled for life in other):
                self.violations.append(f"{session[:8]} is in doubt still, though the two have met since")
            return "doubt"
        if not any(life.killed for life in other):
            self.violations.append(f"{session[:8]} was applied by one side, and the other never told its end")
        unacknowledged = any(life.told[session].error == UnacknowledgedError.entry.code for life in one if session in life.told)
        if not (unacknowledged or any(LostStepsError.entry.code in life.troubles for life in other)):
            self.violations.append(f"{session[:8]} was applied by one side, lost by the other, and counted by neither")
        return "lost"

    def _compare(self, session: str, both: list[Subject]) -> None:
        """The bytes that were applied are those that both signed for, and the two receipts are one."""
        if not both[0].told[session].initiator:  # in other exchanges of the trial it may be the second node that offers
            both = both[::-1]
        first, second = (node.receipts.find(bytes.fromhex(session)) for node in both)
        if first is None:
            self.violations.append(f"{session[:8]} has no receipt at the offerer")
            return
        if second is None:
            if DiskFullError.entry.code not in both[1].troubles:
                self.violations.append(f"{session[:8]} has no receipt at the answerer, whose disk was not full")
        elif first.content != second.content:
            self.violations.append(f"{session[:8]} has two different receipts")
        first.check()
        for node, side in zip(both, first.parsed.sides, strict=True):
            size, sent = node.replica.outbox.size, node.told[session]
            if (root := describe(memoryview(node.steps[session]), LIMITS.chunk_bytes).root) != side.root:
                self.violations.append(f"{session[:8]}: {root.hex()[:8]} was sent, {side.root.hex()[:8]} is in the receipt")
            if sent.received != size or sent.sent < size:
                self.violations.append(f"{session[:8]}: {sent.sent} bytes out and {sent.received} in, of {size}")


def try_one(side: str, state: str, way: Way, seed: int) -> Verdict:
    """Run one cell in one way; the same arguments give the same verdict."""
    make = partial(Trial, side, state, way, number=0 if side == "offerer" else 1, protocol=EXCHANGE)
    return staged(make, (SETTINGS, LIMITS, seed))
