"""A cell that is about an exchange: two nodes, of which the first offers.

The fault strikes in the second exchange, so that momentum is not zero. What must hold is checked by the oracle's own
formula and by what both sides told and stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from nolocod.errors import DiskFullError, LostStepsError, UnacknowledgedError
from nolocod.proto.types import describe
from tests.fault_matrix.cell import LIMITS, QUIET, WARM, Cell

if TYPE_CHECKING:
    from tests.fault_matrix.node import NodeUnderTest

_LONGEST = LIMITS.exchange_seconds + LIMITS.doubt_seconds + LIMITS.dial_seconds


class ExchangeCell(Cell):
    """Fates: who applied the exchange: "both" or "neither". "doubt": one side, and the other counts it as in doubt.
    "lost": one side, while the other was killed before it could; either its restart tells of lost steps, or the one who
    applied tells that nobody acknowledged."""

    async def play(self) -> None:
        tasks = trio.lowlevel.current_statistics().tasks_living
        self.armed = True
        answerer = self.nodes[1]
        answerer.busy_once = self.state == "CLOSED"
        answerer.replica.reject_once = self.state == "ABORTED"
        if await self.until("the state", WARM, self.struck.is_set):
            await self.recover(QUIET)
            now = trio.lowlevel.current_statistics().tasks_living
            if now > tasks:
                self.violations.append(f"{now} tasks, {tasks} before")

    def outcome(self) -> tuple[str, float]:
        fates = {session: self._fate(session) for session in sorted({s for life in self.lives for s in life.told})}
        longest = max((ended.seconds for life in self.lives for ended in life.told.values()), default=0.0)
        if longest > _LONGEST:
            self.violations.append(f"an exchange took {longest:.0f} s, the limits allow {_LONGEST:.0f}")
        return fates.get(self.session, "neither"), longest

    def _fate(self, session: str) -> str:
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
        if other[-1].receipts.find(bytes.fromhex(session)) is None:
            self.violations.append(f"{session[:8]} was applied by one side, and the other never learnt of it after its restart")
        unacknowledged = any(life.told[session].error == UnacknowledgedError.entry.code for life in one if session in life.told)
        if not (unacknowledged or any(LostStepsError.entry.code in life.troubles for life in other)):
            self.violations.append(f"{session[:8]} was applied by one side, lost by the other, and counted by neither")
        return "lost"

    def _compare(self, session: str, both: list[NodeUnderTest]) -> None:
        """The bytes that were applied are those that both signed for, and the two receipts are one."""
        if not both[0].told[session].initiator:  # in other exchanges of the cell it may be the second node that offers
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
            size, sent = len(node.steps[session]), node.told[session]
            if (root := describe(memoryview(node.steps[session]), LIMITS.chunk_bytes).root) != side.root:
                self.violations.append(f"{session[:8]}: {root.hex()[:8]} was sent, {side.root.hex()[:8]} is in the receipt")
            if sent.received != size or sent.sent < size:
                self.violations.append(f"{session[:8]}: {sent.sent} bytes out and {sent.received} in, of {size}")
