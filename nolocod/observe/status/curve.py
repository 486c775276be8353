"""A curve of bounded length: all of the past, ever coarser.

The rule: at most `POINTS` points. When they are full, neighbours become their mean, and from then on as many new values
make one point; so memory and the report's size stay the same over months, and no part of the past is forgotten.
"""

from __future__ import annotations

import math

POINTS = 240


class Curve:
    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._open: list[tuple[int, float]] = []
        self._stride = 1

    def add(self, x: int, y: float) -> None:
        """Note a value; one that is not finite is left out. `x` never falls."""
        if not math.isfinite(y):
            return
        self._open.append((x, y))
        if len(self._open) < self._stride:
            return
        self._points.append(_mean(self._open))
        self._open.clear()
        if len(self._points) >= POINTS:
            self._points = [_mean(self._points[at : at + 2]) for at in range(0, POINTS, 2)]
            self._stride *= 2

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Oldest first; the last may stand for fewer values than the others."""
        return (*self._points, *([_mean(self._open)] if self._open else []))


def _mean(points: list[tuple[int, float]]) -> tuple[int, float]:
    """Where they end, and their mean, with as many digits as anybody sees."""
    return points[-1][0], float(f"{sum(y for _, y in points) / len(points):.6g}")
