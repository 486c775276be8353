"""The fault matrix: every state of every side meets every fault; what came of it, as a table.

Rows are the product's own tables of states: a state that is added there is a row here, or it cannot be reached and fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nolocod.p2p.transport.stream import EXCHANGE, SNAPSHOT
from nolocod.proto.exchange_states import TABLE
from nolocod.proto.snapshot_states import SERVING
from tests.fault_matrix.cell import run_cell
from tests.fault_matrix.exchange_cell import ExchangeCell
from tests.fault_matrix.faults import CASES, FAULTS
from tests.fault_matrix.snapshot_cell import SnapshotCell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fault_matrix.cell import Verdict
    from tests.fault_matrix.faults import Case

ROWS: tuple[tuple[str, str], ...] = tuple(
    (side, state.name) for table in (TABLE, SERVING) for side, states in table.items() for state in states
)
"""Sides and states."""
_NUMBERS = {"offerer": 0, "answerer": 1, "donor": 0, "newcomer": 2}
"""Which node of a cell is on which side."""


@dataclass(frozen=True)
class Result:
    """What came of one case in one state."""

    side: str
    state: str
    case: Case
    seed: int
    verdict: Verdict

    @property
    def name(self) -> str:
        return f"{self.side} {self.state}, {self.case.fault} ({self.case.name})"

    @property
    def replay(self) -> str:
        return f"python -m tests.fault_matrix {self.side} {self.state} '{self.case.fault}' --seed {self.seed}"


def known(word: str) -> bool:
    """Whether `word` is a side, a state or a fault."""
    return word in FAULTS or any(word in row for row in ROWS)


def strike(side: str, state: str, case: Case, seed: int = 0) -> Result:
    """One case in one state; the same arguments give the same result."""
    cell, protocol = (SnapshotCell, SNAPSHOT) if side in SERVING else (ExchangeCell, EXCHANGE)
    make = partial(cell, side, state, case, number=_NUMBERS[side], protocol=protocol)
    return Result(side, state, case, seed, run_cell(make, seed))


def run(wanted: Sequence[str] = (), seed: int = 0) -> Iterator[Result]:
    """Every case of every cell in which all words of `wanted` occur."""
    for side, state in ROWS:
        for case in CASES:
            if all(word in (side, state, case.fault) for word in wanted):
                yield strike(side, state, case, seed)


def table(results: Sequence[Result]) -> str:
    """Markdown: a row per side and state, a column per fault."""
    lines = [f"| side | state | {' | '.join(FAULTS)} |", "|---" * (len(FAULTS) + 2) + "|"]
    for side, state in ROWS:
        cells = [
            _cell([one for one in results if (one.side, one.state, one.case.fault) == (side, state, fault)]) for fault in FAULTS
        ]
        if any(cells):
            lines.append(f"| {side} | {state} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return ""
    if any(one.verdict.violations for one in results):
        return "**FAILED**"
    fates = dict.fromkeys(one.verdict.fate for one in results)
    return f"{', '.join(fates)}; {max(one.verdict.seconds for one in results):.0f} s"


def summary(results: Sequence[Result]) -> str:
    """One sentence with the figures."""
    cells = {(one.side, one.state, one.case.fault) for one in results}
    failed = sum(bool(one.verdict.violations) for one in results)
    fates = [one.verdict.fate for one in results if one.side in TABLE]
    return (
        f"{len(results)} strikes in {len(cells)} cells: {failed} failed. Of the {len(fates)} struck exchanges "
        f"{fates.count('both')} were applied by both, {fates.count('neither')} by neither, {fates.count('doubt')} by one side "
        f"with the other in doubt, {fates.count('lost')} by one side with the other killed before it could."
    )
