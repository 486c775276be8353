"""The fault matrix: every state of every side, and everything that can befall it there; and its table.

The rule: rows are the product's own tables of states, so a state added there is a row here, or cannot be reached and
fails. A cell holds what came of all ways in which its fault strikes; nothing is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.proto.serving import SERVING
from nolocod.proto.states import TABLE
from nolocod.studies.sim import donation, trial
from nolocod.studies.sim.faults import FAULTS, WAYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nolocod.studies.sim.faults import Way
    from nolocod.studies.sim.staging import Verdict

ROWS: tuple[tuple[str, str], ...] = (
    *((side, state.name) for side, states in TABLE.items() for state in states),
    *((side, state.name) for side, states in SERVING.items() for state in states),
)
"""Sides and states."""


@dataclass(frozen=True)
class Result:
    """What came of one way."""

    side: str
    state: str
    way: Way
    seed: int
    verdict: Verdict

    @property
    def name(self) -> str:
        return f"{self.side} {self.state}, {self.way.fault} ({self.way.name})"

    @property
    def replay(self) -> str:
        return f"nolocod simulate --faults {self.side} {self.state} '{self.way.fault}' --seed {self.seed}"


def known(word: str) -> bool:
    """Whether `word` is a side, a state or a fault."""
    return word in FAULTS or any(word in row for row in ROWS)


def strike(side: str, state: str, way: Way, seed: int = 0) -> Result:
    """One cell in one way."""
    try_one = donation.try_one if side in SERVING else trial.try_one
    return Result(side, state, way, seed, try_one(side, state, way, seed))


def run(wanted: Sequence[str] = (), seed: int = 0) -> Iterator[Result]:
    """Every cell in which all words of `wanted` occur, in every way."""
    for side, state in ROWS:
        for way in WAYS:
            if all(word in (side, state, way.fault) for word in wanted):
                yield strike(side, state, way, seed)


def table(results: Sequence[Result]) -> str:
    """Markdown: a row per side and state, a column per fault."""
    lines = [f"| side | state | {' | '.join(FAULTS)} |", "|---" * (len(FAULTS) + 2) + "|"]
    for side, state in ROWS:
        cells = [
            _cell([one for one in results if (one.side, one.state, one.way.fault) == (side, state, fault)]) for fault in FAULTS
        ]
        if any(cells):
            lines.append(f"| {side} | {state} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return ""
    if any(one.verdict.violations for one in results):
        return "**FAILED**"
    fates = list(dict.fromkeys(one.verdict.fate for one in results))
    return f"{', '.join(fates)}; {max(one.verdict.seconds for one in results):.0f} s"


def summary(results: Sequence[Result]) -> str:
    """One sentence with the figures."""
    cells = {(one.side, one.state, one.way.fault) for one in results}
    failed = sum(bool(one.verdict.violations) for one in results)
    exchanges = [one for one in results if one.side in TABLE]

    def count(fate: str) -> int:
        return sum(one.verdict.fate == fate for one in exchanges)

    return (
        f"{len(results)} strikes in {len(cells)} cells: {failed} failed. Of the {len(exchanges)} struck exchanges "
        f"{count('both')} were applied by both, {count('neither')} by neither, {count('doubt')} by one side with the other "
        f"in doubt, {count('lost')} by one side with the other killed before it could."
    )
