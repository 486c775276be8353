"""The fault matrix: its rows are the product's states, its cells hold, and it can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.p2p.exchange.doubts import Doubts
from nolocod.p2p.exchange.session import Session
from nolocod.proto.exchange_states import TABLE, State
from nolocod.proto.snapshot_states import SERVING
from nolocod.proto.types import Ended
from nolocod.studies.pages import Place
from tests.fault_matrix import matrix
from tests.fault_matrix.faults import CASES, FAULTS
from tests.fault_matrix.node import Receipts

if TYPE_CHECKING:
    from pathlib import Path

PART = 4
"""One cell of so many is run here, another one in each row; all are by `python -m tests.fault_matrix`."""


def test_every_state_of_the_product_has_a_row() -> None:
    states = {(side, state.name) for table in (TABLE, SERVING) for side, states in table.items() for state in states}
    assert set(matrix.ROWS) == states
    assert len(matrix.ROWS) == len(states)


@pytest.mark.parametrize("row", range(len(matrix.ROWS)), ids=lambda row: "-".join(matrix.ROWS[row]))
def test_a_part_of_the_matrix_holds(row: int) -> None:
    side, state = matrix.ROWS[row]
    for column, fault in enumerate(FAULTS):
        if (row + column) % PART == 0:
            cases = [case for case in CASES if case.fault == fault]
            result = matrix.strike(side, state, cases[row % len(cases)])
            assert not result.verdict.violations, f"{result.name}: {result.verdict.violations}. Again: {result.replay}"


@pytest.mark.parametrize("row", range(len(matrix.ROWS)), ids=lambda row: "-".join(matrix.ROWS[row]))
def test_kills_at_random_moments_of_every_state_are_survived(row: int) -> None:
    side, state = matrix.ROWS[row]
    for case in CASES:
        if case.fault == "killed" and case.name.startswith("within"):
            result = matrix.strike(side, state, case, seed=row)
            assert not result.verdict.violations, f"{result.name}: {result.verdict.violations}. Again: {result.replay}"


def test_a_product_that_forgets_its_vote_fails_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarted node would settle nothing: its partner applied, and it would never know."""
    monkeypatch.setattr(Receipts, "vote", lambda *_: None)
    results = [
        matrix.strike("answerer", "IN_DOUBT", case, seed) for seed in range(8) for case in CASES if case.fault == "killed"
    ]
    assert any(result.verdict.violations for result in results)


def test_the_same_seed_strikes_the_same_way() -> None:
    case = next(case for case in CASES if case.fault == "frozen, thawed")
    verdicts = [matrix.strike("answerer", "IN_DOUBT", case, seed).verdict for seed in (1, 1, 2)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0].seconds != verdicts[2].seconds


def test_one_side_applied_and_the_other_in_doubt_is_seen() -> None:
    case = next(case for case in CASES if (case.fault, case.name) == ("silence", "200 s"))
    verdict = matrix.strike("offerer", "DECIDED", case).verdict
    assert (verdict.fate, verdict.violations) == ("doubt", ())


def test_a_product_that_applies_in_doubt_fails_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Session.ended

    def hasty(session: Session) -> Ended:
        ended, machine = told(session), session.machine
        if machine.state is not State.IN_DOUBT:
            return ended
        return Ended("committed", ended.partner, ended.session, partner_standing=ended.partner_standing)

    monkeypatch.setattr(Session, "ended", hasty)
    results = [matrix.strike("offerer", "CONFIRMED", case) for case in CASES if case.fault in ("killed", "silence")]
    assert any(result.verdict.violations for result in results)
    assert "**FAILED**" in matrix.table(results)


def test_a_product_that_leaves_a_doubt_fails_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    async def indifferent(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Doubts, "_settle", indifferent)
    case = next(case for case in CASES if (case.fault, case.name) == ("silence", "200 s"))
    verdict = matrix.strike("offerer", "DECIDED", case).verdict
    assert verdict.fate == "doubt"
    assert any("is in doubt still" in violation for violation in verdict.violations)


def test_the_page_keeps_what_is_around_the_table(tmp_path: Path) -> None:
    case, page = CASES[0], tmp_path / "page.md"
    page.write_text("before\n<!-- faults -->\nold\n<!-- end -->\nafter\n")
    results = [matrix.strike("offerer", "COMMITTED", case)]
    Place(page, "faults", "Name it.").fill(f"{matrix.summary(results)}\n\n{matrix.table(results)}")
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    assert "1 strikes in 1 cells: 0 failed" in written
    assert written.count("| offerer | COMMITTED |") == 1
