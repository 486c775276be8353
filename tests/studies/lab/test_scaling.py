"""The models of time and of walks: held against formulas that are worked out by hand, and against the notes of others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import UsageError
from nolocod.studies.lab import crowds, figures, scaling
from nolocod.studies.lab.spread import Run, Spread
from nolocod.studies.lab.walks import COUNTS, Settings, Walk, walk
from nolocod.studies.pages import Place, filled

if TYPE_CHECKING:
    from pathlib import Path


FEW = (2, 4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[crowds.Row, ...]:
    """One swarm of each size, where the study has hundreds."""
    wanted = [crowd for crowd in crowds.crowds(FEW, (0.0,)) if crowd.seed == 0]
    return crowds.rows(crowds.record(tmp_path_factory.mktemp("crowds") / "kept.jsonl"), wanted, 1, lambda _text: None)


@pytest.fixture(scope="module")
def drawn(rows: tuple[crowds.Row, ...]) -> scaling.Scaling:
    return scaling.scaling(rows)


def at(drawn: scaling.Scaling, count: int, spread: float) -> scaling.Exchange:
    return next(one for one in drawn.exchanges if (one.count, one.spread) == (count, spread))


@pytest.mark.parametrize("count", [2, 64, 1024])
def test_without_spread_the_times_are_those_of_the_formulas(drawn: scaling.Scaling, count: int) -> None:
    one = at(drawn, count, 0.0)
    assert one.pair == pytest.approx(1)
    assert one.paper == pytest.approx(2)
    assert one.tree == pytest.approx(2 * math.log2(count))
    for fixed, ring in zip(drawn.fixed, one.rings, strict=True):
        assert ring == pytest.approx(2 * (count - 1) * (fixed + (1 - fixed) / count))


@pytest.mark.parametrize(("count", "ratio"), [(64, 8.7), (256, 12.6), (1024, 17.0)])
def test_a_tree_falls_behind_pairs_as_latencies_spread(drawn: scaling.Scaling, count: int, ratio: float) -> None:
    one = at(drawn, count, 1.0)
    assert one.tree / one.paper == pytest.approx(ratio, rel=0.08)


def test_pairs_take_as_long_whatever_the_number_of_nodes(drawn: scaling.Scaling) -> None:
    for spread in scaling.SPREADS:
        times = [one.pair for one in drawn.exchanges if one.spread == spread]
        assert max(times) < 1.1 * min(times)


def test_who_waits_for_all_waits_longer_the_more_there_are_and_pairs_do_not(drawn: scaling.Scaling) -> None:
    for unlike in (0.0, 0.3):
        rows = [one for one in drawn.idle if one.unlike == unlike]
        assert [one.everybody for one in rows] == sorted(one.everybody for one in rows)
        assert rows[-1].everybody > 3 * rows[-1].pairs
        assert rows[-1].pairs == pytest.approx(rows[0].pairs, abs=0.02)


def test_the_same_seed_draws_the_same(rows: tuple[crowds.Row, ...]) -> None:
    one, same, other = (scaling.scaling(rows, seed, FEW).to_json() for seed in (0, 0, 1))
    assert one == same != other


def test_exchanges_in_the_simulator_take_their_round_trips(rows: tuple[crowds.Row, ...], drawn: scaling.Scaling) -> None:
    """Every message has 80 ms on its way, and there are some that wait for one another."""
    assert [row.nodes for row in rows] == [*FEW]
    for row in rows:
        trips = row.seconds / 0.08
        assert 4 < trips < 20
        assert row.offers >= 1
        assert row.alone < 0.2
    seconds = [row.seconds for row in rows]
    assert f"| {FEW[1]} | 0 | {seconds[1]:.2f} | {seconds[1] / seconds[0]:.2f} |" in drawn.to_text()


def test_as_many_nodes_are_simulated_of_each_size() -> None:
    wanted = crowds.crowds(scaling.COUNTS, (0.5,))
    for count in scaling.COUNTS:
        assert sum(one.nodes for one in wanted if one.nodes == count) == max(256, count)
    assert len(set(wanted)) == len(wanted)
    assert wanted[0].nodes == max(scaling.COUNTS)


def test_walks_are_as_far_apart_as_was_worked_out() -> None:
    """Without momentum and at gamma = 1 a pair takes the mean of both: the variance of many is halved, and so is that of
    the changes that come in, v = v / 2 + beta^2 / 2."""
    beta = 0.7
    assert walk(64, Settings(0.0, beta, 1.0), seed=0).variance == pytest.approx(beta**2, rel=0.1)


@pytest.mark.parametrize(("alpha", "count", "inside", "outside"), [(0.5, 64, 1.35, 1.7), (0.0, 64, 1.8, 2.2)])
def test_outside_of_the_bound_many_replicas_drift_apart(alpha: float, count: int, inside: float, outside: float) -> None:
    assert not walk(count, Settings(alpha, 0.7, inside), seed=0).grows
    assert walk(count, Settings(alpha, 0.7, outside), seed=0).grows
    assert walk(2, Settings(alpha, 0.7, outside), seed=0).variance == 0  # two replicas cannot show it


def test_a_run_tells_its_correlation_and_slope() -> None:
    rates = (4e-3, 2e-3, 1e-3)
    run = Run(4, 1, 4e-3, rates, tuple(3 * rate for rate in rates))
    assert run.correlation == pytest.approx(1)
    assert run.slope == pytest.approx(2)


def test_slopes_between_runs_are_taken_seed_by_seed() -> None:
    runs = tuple(Run(4, seed, rate, (rate,), (rate ** (0.5 * seed),)) for seed in (1, 2) for rate in (1e-3, 2e-3, 4e-3))
    assert Spread((), (), runs, {}).slopes() == pytest.approx({1: 1.0, 2: 2.0})


def test_figures_come_out_the_same_each_time(drawn: scaling.Scaling, tmp_path: Path) -> None:
    result = Spread(
        tuple(Walk(count, alpha, gamma, 1.0, 2.5) for alpha in (0.0, 0.5) for gamma in (0.5, 1.0) for count in COUNTS),
        (Run(4, 1, 1e-3, (1e-3, 5e-4), (2e-3, 1e-3)),),
        tuple(Run(4, 1, rate, (rate,), (rate,)) for rate in (1e-3, 2e-3)),
        {0.7: (1e-3,)},
    )
    for name in ("one", "two"):
        figures.draw_scaling(drawn, tmp_path / f"scaling-{name}.svg")
        figures.draw_spread(result, tmp_path / f"spread-{name}.svg")
    for kind in ("scaling", "spread"):
        first, second = ((tmp_path / f"{kind}-{name}.svg").read_bytes() for name in ("one", "two"))
        assert first == second
        assert first.startswith(b"<?xml")
    assert "| 0.5 | 1 | 1.5 | 2.5 *grows* | 2.5 *grows* | 2.5 *grows* |" in result.to_text()


def test_a_study_fills_its_place(drawn: scaling.Scaling, tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    page.write_text("words\n<!-- scaling -->\nold\n<!-- end -->\n")
    Place(page, "scaling", "Name it.").fill(drawn.to_text())
    assert page.read_text() == f"words\n<!-- scaling -->\n{drawn.to_text().strip()}\n<!-- end -->\n"
    with pytest.raises(UsageError, match="no place <!-- spread -->"):
        Place(page, "spread", "Name it.")
    with pytest.raises(UsageError, match="cannot be read"):
        Place(tmp_path / "elsewhere" / "evidence.md", "scaling", "Name it.")


def test_only_the_tables_of_the_page_are_replaced() -> None:
    page = "words\n<!-- scaling -->\nold\nrows\n<!-- end -->\nmore\n<!-- spread -->\n<!-- end -->\n"
    assert filled(page, "scaling", "\nnew\\1\n") == page.replace("old\nrows", "new\\1")
    assert filled(page, "spread", "first") == page.replace("<!-- spread -->\n", "<!-- spread -->\nfirst\n")
    with pytest.raises(UsageError, match="no place <!-- compare -->"):
        filled(page, "compare", "new")
