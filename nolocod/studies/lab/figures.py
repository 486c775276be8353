"""The figures of docs/evidence.md, as SVG: the same results give the same bytes.

The rule: a figure shows what a table beside it says, and nothing else. matplotlib is an extra (`pip install
nolocod[figures]`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from nolocod.studies.lab.compare import Comparison
    from nolocod.studies.lab.scaling import Scaling
    from nolocod.studies.lab.spread import Spread

_MARKS = ("o", "s", "^", "v", "D", "P", "X", "*")


class Canvas:
    """One SVG file with some axes side by side."""

    def __init__(self, count: int, width: float = 5.0, height: float = 3.6) -> None:
        """UsageError if matplotlib is not installed."""
        try:
            import matplotlib as mpl
            from matplotlib import pyplot
        except ImportError as error:
            raise UsageError("figures need matplotlib.", remedy="pip install 'nolocod[figures]'") from error
        mpl.use("svg")
        mpl.rcParams |= {
            "svg.hashsalt": "nolocod",
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
        }
        self._figure, axes = pyplot.subplots(1, count, figsize=(width * count, height), squeeze=False, layout="constrained")
        self.axes: list[Axes] = list(axes[0])

    def write(self, path: Path) -> None:
        """Write and close."""
        from matplotlib import pyplot

        self._figure.savefig(path, metadata={"Date": None})
        pyplot.close(self._figure)


def draw_scaling(scaling: Scaling, path: Path) -> None:
    """Time of an outer step, and idle time, by number of nodes (arXiv 2506.10911, figure 5, with rings)."""
    spreads = sorted({one.spread for one in scaling.exchanges})
    canvas = Canvas(len(spreads) + 1, 4.0)
    for axes, spread in zip(canvas.axes, spreads, strict=False):
        rows = [one for one in scaling.exchanges if one.spread == spread]
        counts = [one.count for one in rows]
        axes.plot(counts, [one.tree for one in rows], marker="^", label="tree all-reduce")
        for index, fixed in enumerate(scaling.fixed):
            times = [one.rings[index] for one in rows]
            axes.plot(counts, times, "s-" if index else "s--", label=f"ring, {fixed:.0%} of a message fixed")
        axes.plot(counts, [one.paper for one in rows], marker="v", label="pair, there and back")
        axes.plot(counts, [one.pair for one in rows], marker="o", label="pair, both at once (ours)")
        axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="messages", title=f"times vary by {spread:g} of the mean")
    canvas.axes[0].legend()
    for unlike in sorted({one.unlike for one in scaling.idle}):
        rows_idle = [one for one in scaling.idle if one.unlike == unlike]
        counts = [one.count for one in rows_idle]
        everybody, pairs = ([100 * getattr(one, kind) for one in rows_idle] for kind in ("everybody", "pairs"))
        canvas.axes[-1].plot(counts, everybody, marker="^", label=f"all wait for all, nodes vary by {unlike:g}")
        canvas.axes[-1].plot(counts, pairs, marker="o", label=f"pairs that wait, nodes vary by {unlike:g}")
    canvas.axes[-1].set(xscale="log", xlabel="nodes", ylabel="% of the time", title="waiting for others", ylim=(0, None))
    canvas.axes[-1].legend(loc="upper left", fontsize=7)
    canvas.write(path)


def draw_spread(spread: Spread, path: Path) -> None:
    """The stability bound on walks, and the spread of trained replicas beside their learning rate."""
    canvas = Canvas(3)
    stable, course, between = canvas.axes
    many = max(walk.count for walk in spread.walks)
    for alpha, mark in zip(sorted({walk.alpha for walk in spread.walks}), _MARKS, strict=False):
        rows = [walk for walk in spread.walks if walk.alpha == alpha and walk.count == many]
        stable.plot(
            [walk.gamma / walk.bound for walk in rows],
            [walk.variance for walk in rows],
            marker=mark,
            label=f"alpha = {alpha:g}",
        )
    stable.axvline(1.0, color="black", linestyle=":", linewidth=1)
    stable.set(
        yscale="log", ylim=(0.1, 1e4), xlabel="gamma / 2 (1 - alpha²)", ylabel="variance", title=f"walks of {many} replicas"
    )
    stable.legend()
    for run, mark in zip(spread.runs, _MARKS * len(spread.runs), strict=False):
        course.plot(
            run.rates, run.spreads, mark, markersize=3, linestyle="none", label=f"{run.replicas} replicas, seed {run.seed}"
        )
    course.set(xlabel="learning rate of the moment", ylabel="spread of a weight", title="within trained runs")
    course.legend(fontsize=6)
    for (seed, slope), mark in zip(spread.slopes().items(), _MARKS, strict=False):
        runs = [run for run in spread.by_rate if run.seed == seed]
        between.plot(
            [run.peak for run in runs], [run.mean**2 for run in runs], marker=mark, label=f"seed {seed}: slope {slope:.2f}"
        )
    between.set(
        xscale="log", yscale="log", xlabel="highest learning rate", ylabel="variance of a weight", title="between trained runs"
    )
    between.legend()
    canvas.write(path)


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Held-out loss of the mean replica by method, each seed a point."""
    counts = comparison.size.replicas
    canvas = Canvas(len(counts), 4.6, 3.8)
    for axes, count in zip(canvas.axes, counts, strict=True):
        names = comparison.methods_at(count)
        for row, name in enumerate(reversed(names)):
            losses = [end.mean for end in comparison.at(name, count)]
            axes.plot(losses, [row] * len(losses), "o", markersize=4, color="C0")
            axes.plot([sum(losses) / len(losses)], [row], "|", markersize=12, color="black")
        axes.set(
            yticks=range(len(names)), yticklabels=list(reversed(names)), xlabel="nats per token", title=f"{count} replicas"
        )
    canvas.write(path)
