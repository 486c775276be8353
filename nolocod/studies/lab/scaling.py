"""`nolocod lab scaling`: what waiting costs as a swarm grows, for pairs, rings and trees.

The rule: two sources, told apart. The product's own exchanges in the simulator (`crowds.py`); and, as there is no other
method in the product, a model of times, drawn many times from a seed. There a message takes a lognormal time
with mean 1 (latency and bytes together; `spread` is its standard deviation), whoever sends it and whatever else is on
the line. Times are of one outer step, in such messages:

- pair, ours: both send at once, each waits for the other's message.
- pair, the paper's: one sends to the other, and gets the mean back.
- tree all-reduce: sums go up a binary tree and the mean comes down; done when its last leaf has it.
- ring all-reduce: 2 (N - 1) messages of a Nth of the model each, and each waits for its neighbour's one before
  (arXiv 1909.09756 has the pattern). A message has a part that its size does not shrink, `fixed`.

Compare arXiv 2506.10911, section 5.3 and figure 5, which has the tree and the pair, and leaves the ring out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from nolocod.studies.lab.crowds import Row

    Times = NDArray[np.float64]

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FEW = (2, 4, 8, 16)
SPREADS = (0.0, 0.5, 1.0)
FIXED = (0.0, 0.05)
_DRAWS = 200
_INNER_STEPS = 50


@dataclass(frozen=True)
class Exchange:
    """Mean time of one outer step among `count` nodes, in messages; of rings one per value of FIXED."""

    count: int
    spread: float
    pair: float
    paper: float
    tree: float
    rings: tuple[float, ...]


@dataclass(frozen=True)
class Idle:
    """The share of the time that a node waits for others at an outer step, where its inner steps take lognormal times.

    `noise`: standard deviation of one inner step's time over its mean; `unlike`: of the nodes' own means.
    """

    count: int
    noise: float
    unlike: float
    everybody: float
    pairs: float


@dataclass(frozen=True)
class Scaling:
    """`fixed`: the parts of a message that its size does not shrink, one for each of an Exchange's rings; `crowds`: what was
    simulated."""

    fixed: tuple[float, ...]
    exchanges: tuple[Exchange, ...]
    idle: tuple[Idle, ...]
    crowds: tuple[Row, ...]

    def to_text(self) -> str:
        """Tables in Markdown."""
        rings = " | ".join(f"ring, {fixed:.0%} fixed" for fixed in self.fixed)
        lines = [
            "\nTime of one outer step, in messages of the whole model (mean of the draws):\n",
            f"| nodes | spread | pair, ours | pair, the paper's | tree | tree / pair, the paper's | {rings} |",
            "|---|---|---|---|---|---|" + "---|" * len(self.fixed),
        ]
        for one in self.exchanges:
            shown = (one.pair, one.paper, one.tree, one.tree / one.paper, *one.rings)
            lines.append(f"| {one.count} | {one.spread:g} | {' | '.join(f'{value:.2f}' for value in shown)} |")
        lines += [
            f"\nShare of the time that a node waits for others, {_INNER_STEPS} inner steps between outer steps that take no "
            "time themselves (where training goes on meanwhile nobody waits, whatever the row):\n",
            "| nodes | steps vary by | nodes vary by | all wait for all | pairs that wait |",
            "|---|---|---|---|---|",
        ]
        lines += [f"| {i.count} | {i.noise:g} | {i.unlike:g} | {i.everybody:.1%} | {i.pairs:.1%} |" for i in self.idle]
        lines += [
            "\nThe product's own exchanges in the simulator, 80 ms from node to node (from offer to commit, mean):\n",
            "| nodes | latencies vary by | seconds of an exchange | over that of 2 | offers for each | outer steps alone |",
            "|---|---|---|---|---|---|",
        ]
        fewest = {row.spread: row.seconds for row in sorted(self.crowds, key=lambda row: -row.nodes)}
        for row in self.crowds:
            shown = (row.seconds, row.seconds / fewest[row.spread], row.offers)
            cells = " | ".join(f"{value:.2f}" for value in shown)
            lines.append(f"| {row.nodes} | {row.spread:g} | {cells} | {row.alone:.1%} |")
        return "\n".join(lines)

    def to_json(self) -> str:
        parts = {"exchanges": self.exchanges, "idle": self.idle, "crowds": self.crowds}
        return json.dumps({name: [vars(one) for one in some] for name, some in parts.items()})


def scaling(crowds: tuple[Row, ...], seed: int = 0, counts: tuple[int, ...] = COUNTS) -> Scaling:
    """Draw all that is a model's for `counts` of nodes; the same seed gives the same figures."""
    rng = np.random.default_rng(seed)
    exchanges = tuple(_exchange(rng, count, spread) for spread in SPREADS for count in counts)
    idle = tuple(_idle(rng, count, noise, unlike) for noise, unlike in ((0.5, 0.0), (0.5, 0.3)) for count in counts)
    return Scaling(FIXED, exchanges, idle, crowds)


def _exchange(rng: np.random.Generator, count: int, spread: float) -> Exchange:
    def times(*shape: int) -> Times:
        return lognormal(rng, spread, shape)

    pairs = times(20_000, 2)
    return Exchange(
        count,
        spread,
        pair=float(pairs.max(1).mean()),
        paper=float(pairs.sum(1).mean()),
        tree=float(np.mean([_tree(times, count) for _ in range(_DRAWS)])),
        rings=tuple(float(np.mean([_ring(times, count, fixed) for _ in range(max(2, 2048 // count))])) for fixed in FIXED),
    )


def lognormal(rng: np.random.Generator, spread: float, shape: tuple[int, ...]) -> Times:
    """Draw times with mean 1 and standard deviation `spread`."""
    variance = np.log1p(spread**2)
    return rng.lognormal(-variance / 2, np.sqrt(variance), shape)


def _tree(times: Callable[..., Times], count: int) -> float:
    """When the last leaf has the mean: `count` is a power of two."""
    ready = np.zeros(count)
    while len(ready) > 1:  # a parent is one of its two children, and waits for the other's sum
        own, other = ready[::2], ready[1::2]
        ready = np.maximum(own, other + times(len(other)))
    while len(ready) < count:
        ready = np.concatenate([ready, ready + times(len(ready))])
    return float(ready.max())


def _ring(times: Callable[..., Times], count: int, fixed: float) -> float:
    """When the last node has the last piece. A node sends a piece once it has sent the one before and got its neighbour's."""
    whole = fixed + (1 - fixed) / count
    ready = np.zeros(count)
    for _ in range(2 * (count - 1)):
        sent = ready + whole * times(count)
        ready = np.maximum(sent, np.roll(sent, 1))
    return float(ready.max())


def _idle(rng: np.random.Generator, count: int, noise: float, unlike: float) -> Idle:
    """Who waits for everybody waits for the slowest of all; a pair's members for the slower of the two."""
    speeds = lognormal(rng, unlike, (_DRAWS, count))
    phases = speeds * lognormal(rng, noise, (_DRAWS, count, _INNER_STEPS)).sum(2)
    slower = phases.reshape(_DRAWS, count // 2, 2).max(2)
    return Idle(
        count,
        noise,
        unlike,
        everybody=float(1 - phases.mean() / phases.max(1).mean()),
        pairs=float(1 - phases.mean() / slower.mean()),
    )
