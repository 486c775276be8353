"""The curve that a node keeps of its loss."""

from __future__ import annotations

import pytest

from nolocod.observe.status.state import POINTS, Curve


def test_few_values_are_kept_as_they_are() -> None:
    curve = Curve()
    for x, y in ((10, 5.5), (20, float("nan")), (30, float("inf")), (40, 5.25)):
        curve.add(x, y)
    assert curve.points == ((10, 5.5), (40, 5.25))


@pytest.mark.parametrize("values", [POINTS, POINTS + 1, 3 * POINTS + 7, 20_011])
def test_many_values_keep_their_mean_their_end_and_the_bound(values: int) -> None:
    curve = Curve()
    for x in range(1, values + 1):
        curve.add(x, float(x))
    points = curve.points
    assert len(points) <= POINTS
    assert points[-1][0] == values
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    begin = 0
    for x, y in points:  # each stands for all values since the one before: on a straight line, their middle
        assert y == pytest.approx((begin + 1 + x) / 2, rel=1e-4)
        begin = x
