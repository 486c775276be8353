"""NoLoCo beside the methods that it could be replaced by, at equal tokens: the tables `compare` of docs/evidence.md, gpu.md.

    python -m tools.compare [--reduced | --small | --gpu] [--workers N] [--kept FILE] [--kept-only] [--into docs]

The rule: the learning rate of each method is tuned for itself, on a budget that is the same for all (one seed, four
replicas, half the steps, the same rates), and on a GPU that of each inner optimizer, by one replica alone; then every method
trains on the same tokens in the same order for each seed, and what is told of two methods are differences on the same seed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nolocod.errors import DeviceError
from nolocod.run.manifest import Inner
from nolocod.studies.lab.methods import (
    BEFORE,
    BEFORE_BUSY,
    BUSY,
    BY_NAME,
    FIVE,
    FIVE_BUSY,
    FOUR_BITS,
    METHODS,
    OFTEN,
    OURS,
    VARIANTS,
    Method,
)
from nolocod.studies.lab.trials import Trial
from nolocod.trainer.model import pick_device
from tools.study import carry_out, parser_of, place_of
from tools.trials import RATES, TUNING_SEED, perform_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nolocod.studies.lab.multi_replica import Point
    from tools.trials import Book

_BESIDE = OFTEN.name
DILOCO, PAPER, NONE, PARALLEL = "DiLoCo", "NoLoCo, the paper's", "none", "data parallel"
PAIRS = (
    (BUSY.name, OURS.name, 0.003),
    (BUSY.name, BEFORE_BUSY.name, -0.12),
    (FOUR_BITS.name, BEFORE.name, -0.08),
    (FOUR_BITS.name, OFTEN.name, 0.01),
    (FOUR_BITS.name, OURS.name, 0.0),
    (FIVE_BUSY.name, FIVE.name, 0.003),
    (FIVE_BUSY.name, BEFORE_BUSY.name, -0.12),
    (OURS.name, BEFORE.name, -0.08),
    (OURS.name, OFTEN.name, 0.01),
    (OURS.name, DILOCO, 0.0),
    (OURS.name, "DiLoCo, Nesterov 0.9", 0.0),
    (OURS.name, PAPER, 0.0),
    (PAPER, DILOCO, 0.01),
    (PARALLEL, OURS.name, 0.0),
    (PARALLEL, OFTEN.name, 0.0),
    (OFTEN.name, NONE, 0.0),
    (OURS.name, NONE, 0.0),
    (OURS.name, "ours, in one part", 0.0),
    (BUSY.name, "ours, in one part, on a busy line", 0.0),
    (OURS.name, "ours, alpha 0.2, beta and gamma 1", 0.0),
    (OURS.name, "ours, beta 1, gamma 0.75", 0.0),
    (OURS.name, "pair averaging", 0.0),
    (OURS.name, "pair averaging, as ours is sent", 0.0),
)
"""What is claimed: the first one's loss is at most this share above the second's."""


@dataclass(frozen=True)
class Size:
    """How much is compared. `like` gives all that is the same for every trial."""

    replicas: tuple[int, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    """Learning rates that are tried for each method; a single one is taken; without any, that of `_KNOWN` for model and inner
    optimizer."""
    variants: bool
    """The variants of ours too, at the smallest count of replicas."""
    like: Trial
    methods: tuple[str, ...] = tuple(method.name for method in METHODS)
    beside: Size | None = None
    """What is compared with another model, or among more replicas."""
    alone: int = 0
    """So many steps of one replica alone try `rates`, for each inner optimizer; 0: each method's own replicas do."""


_SEEDS = (1, 2, 3)
_KNOWN = {"tiny": {"muon": 8e-3, "adamw": 4e-3}, "0.4m": {"muon": 4e-3, "adamw": 2e-3}}
"""The best learning rates of ours by model. NorMuon's are by trials that are not kept: of 0.12 M parameters on seeds 101 to
104, of 0.36 M by one replica alone (1,500 steps, seed 100: 1.6242, 1.6151 and 1.6262 at 0.002, 0.004 and 0.008)."""
_LIKE = Trial("none", 1, 0, 0.0)
_MAIN = (PARALLEL, OFTEN.name, OURS.name, BUSY.name, BEFORE.name, BEFORE_BUSY.name)
_SMALLER = Size((4,), _SEEDS, RATES, False, replace(_LIKE, model="tiny"), (*_MAIN, NONE))
_SECOND = replace(_SMALLER, rates=(), like=_LIKE, methods=_MAIN)
_MORE = replace(_SMALLER, replicas=(8, 16), rates=(), methods=(OFTEN.name, OURS.name, BUSY.name), beside=_SECOND)
SMALL = replace(_SMALLER, rates=(), methods=_MAIN, beside=_MORE)
"""Five to twelve hours of one core: 0.12 M parameters, at the inner optimizer's known rate, and 0.36 M."""
FULL = Size((4, 8, 16), _SEEDS, RATES, True, _LIKE, beside=_SMALLER)
_RATES_GPU = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
_LARGER = Size(
    (4,), (1,), _RATES_GPU, False,
    replace(_LIKE, model="125m", batch=8, sequence=512, steps=600, held_out=16, points=2, device="cuda"),
    (OFTEN.name, OURS.name, BUSY.name), alone=200,
)  # fmt: skip
GPU = Size(
    (4,), (1,), _RATES_GPU, False,
    replace(_LIKE, model="10m", batch=8, sequence=256, steps=1800, device="cuda"),
    (PARALLEL, OFTEN.name, OURS.name, BUSY.name, BEFORE.name, NONE), beside=_LARGER, alone=300,
)  # fmt: skip
"""What is compared where there is a GPU: 10.7 and 113 million parameters."""
REDUCED = Size(
    (4,), (1,), (4e-3,), False,
    replace(_LIKE, model="micro", steps=300, phase=20, sequence=32, held_out=16, points=1),
    (PARALLEL, OFTEN.name, OURS.name, NONE),
)  # fmt: skip
"""A minute. On seeds 1 to 3 data parallel ended 8 % below DiLoCo, DiLoCo 2 %, and ours 3 to 4 %, below none."""


@dataclass(frozen=True)
class Claim:
    """Something that is said of the methods, and whether it held on every seed at every count of replicas."""

    text: str
    holds: bool
    seen: str


@dataclass(frozen=True)
class Comparison:
    """The last point of every trial: by (method, replicas), one for each seed. Replicas that train alone do not know how many
    they are: those of the lowest count are told beside the others' at every count."""

    rates: dict[str, float]
    ends: dict[tuple[str, int], list[Point]]
    size: Size
    beside: Comparison | None = None

    def to_text(self) -> str:
        """Tables in Markdown."""
        missing = [f"{one.name} at {count} replicas" for one, count in _all(self.size) if (one.name, count) not in self.ends]
        lines = [f"\nNot trained yet: {', '.join(missing)}."] if missing else []
        for count in self.size.replicas if self.ends else ():
            methods = self.methods_at(count)
            lines += [
                f"\n{count} replicas, {self.size.like.steps} inner steps each (bytes: of a node, per parameter and "
                f"{self.size.like.phase} inner steps):\n",
                f"| method | bytes | learning rate | mean replica | worst | averaged | against {_BESIDE}, each seed |",
                "|---|---|---|---|---|---|---|",
            ]
            lines += [self._row(name, count) for name in methods]
        if claims := self.claims():
            lines += ["\n| claim | holds | seen |", "|---|---|---|"]
            lines += [f"| {claim.text} | {'yes' if claim.holds else 'no'} | {claim.seen} |" for claim in claims]
        if self.beside is not None:
            like = self.beside.size.like
            what = "with other numbers of replicas" if like == self.size.like else f"with another model ({like.model})"
            seeds = ", ".join(map(str, self.beside.size.seeds))
            lines.append(f"\nThe same {what}, seeds {seeds}: {self.beside.to_text().lstrip()}")
        return "\n".join(lines)

    def methods_at(self, count: int) -> list[str]:
        """Those that are told at `count` replicas."""
        return [name for name in dict.fromkeys(name for name, _ in self.ends) if name == NONE or (name, count) in self.ends]

    def at(self, name: str, count: int) -> list[Point]:
        """One point for each seed."""
        return self.ends.get((name, count)) or self.ends[name, self.size.replicas[0]]

    def claims(self) -> list[Claim]:
        """What the paper says, and what we say of our defaults, where both sides were trained."""
        known = {name for name, _ in self.ends}
        below = [self._below(one, other, margin) for one, other, margin in PAIRS if {one, other} <= known]
        return [*below, *(self._closed(name) for name in (OURS.name, PAPER) if {name, _BESIDE, NONE} <= known)]

    def _below(self, one: str, other: str, margin: float) -> Claim:
        counts = [count for count in self.size.replicas if {one, other} <= set(self.methods_at(count))]
        found = [difference for count in counts for difference in self.differences(one, other, count)]
        what = f"at most {margin:.1%} above" if margin > 0 else f"at least {-margin:.0%} below" if margin else "below"
        return Claim(f"{one} is {what} {other}", max(found) < margin, f"{100 * min(found):+.2f} to {100 * max(found):+.2f} %")

    def _closed(self, name: str, share: float = 0.7) -> Claim:
        found = [self.gap_closed(name, count) for count in self.size.replicas]
        text = f"{name} closes at least {share:.0%} of the gap between none and {_BESIDE}"
        return Claim(text, min(found) >= share, ", ".join(f"{one:.0%}" for one in found))

    def _row(self, name: str, count: int) -> str:
        ends = self.at(name, count)
        compared = (_BESIDE, count) in self.ends
        differences = [100 * difference for difference in self.differences(name, _BESIDE, count)] if compared else []
        cells = [
            name,
            f"{BY_NAME[name].sent(count, self.size.like.phase):.3g}",
            f"{self.rates[name]:g}",
            *(f"{statistics.mean(getattr(end, kind) for end in ends):.4f}" for kind in ("mean", "worst", "averaged")),
            ", ".join(f"{one:+.2f} %" for one in differences),
        ]
        return f"| {' | '.join(cells)} |"

    def differences(self, one: str, other: str, count: int) -> list[float]:
        """Of the mean replica's loss, relative to `other`'s, seed by seed."""
        pairs = zip(self.at(one, count), self.at(other, count), strict=True)
        return [mine.mean / theirs.mean - 1 for mine, theirs in pairs]

    def gap_closed(self, name: str, count: int) -> float:
        """The share of the way from no communication to DiLoCo that averages as often."""
        none, diloco, own = (statistics.mean(end.mean for end in self.at(method, count)) for method in (NONE, _BESIDE, name))
        return (none - own) / (none - diloco)


def compare(size: Size, book: Book, workers: int, tell: Callable[[str], None], *, trains: bool = True) -> Comparison:
    """Do what is not done yet, unless it is not to train, and compare."""

    def perform(trials: Iterable[Trial]) -> None:
        if trains:
            perform_all(trials, book, workers, tell)

    methods = list(dict.fromkeys(method for method, _ in _all(size)))
    rates = {method.name: size.rates[0] if size.rates else _KNOWN[size.like.model][method.optimizer] for method in methods}
    if len(size.rates) > 1:
        perform(trial for method in methods for trial in _tuning(method, size))
        rates |= {method.name: best for method in methods if (best := _best(method, size, book))}
    trials = {(method.name, count): list(_seeds(method, count, rates, size)) for method, count in _all(size)}
    perform(trial for some in trials.values() for trial in some)
    ends = {key: [book[trial][-1] for trial in some] for key, some in trials.items() if all(trial in book for trial in some)}
    beside = None if size.beside is None else compare(size.beside, book, workers, tell, trains=trains)
    return Comparison(rates, ends, size, beside)


def _all(size: Size) -> Iterator[tuple[Method, int]]:
    for count in size.replicas:
        for method in (BY_NAME[name] for name in size.methods):
            if method.at_each_count or count == size.replicas[0]:
                yield method, count
    if size.variants:
        for method in VARIANTS:
            yield method, size.replicas[0]


def _tuning(method: Method, size: Size) -> Iterator[Trial]:
    if size.alone:
        tuned, count = replace(BY_NAME[NONE], optimizer=method.optimizer, schedule=method.schedule), 1
    else:
        tuned, count = BY_NAME[method.tuned_as or method.name], size.replicas[0]
    like = replace(size.like, steps=size.alone or size.like.steps // 2, points=1)
    for rate in size.rates:
        yield _trial(tuned, like, replicas=count, seed=TUNING_SEED, learning_rate=rate)


def _best(method: Method, size: Size, book: Book) -> float | None:
    """None if none was tried."""
    tried = [trial for trial in _tuning(method, size) if trial in book]
    return min(tried, key=lambda trial: book[trial][-1].mean).learning_rate if tried else None


def _seeds(method: Method, count: int, rates: dict[str, float], size: Size) -> Iterator[Trial]:
    for seed in size.seeds:
        yield _trial(method, size.like, replicas=count, seed=seed, learning_rate=rates[method.name])


def _trial(method: Method, like: Trial, **changes: Any) -> Trial:  # noqa: ANN401 - a Trial's
    decay = Inner().decay if method.schedule == "wsd" else like.decay  # which means nothing there, and names a kept trial
    return replace(like, method=method.name, optimizer=method.optimizer, schedule=method.schedule, decay=decay, **changes)


def main() -> None:
    parser = parser_of("compare", (__doc__ or "").splitlines()[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--reduced", action="store_true", help="a minute: a smaller model, fewer trials")
    sizes.add_argument("--small", action="store_true", help="five to twelve hours of one core: 0.12 M parameters, and 0.36 M")
    sizes.add_argument("--gpu", action="store_true", help="10 and 113 M parameters on this machine's GPU")
    parser.add_argument("--kept-only", action="store_true", help="show what is kept, and train nothing")
    options = parser.parse_args()
    name = "compare-gpu" if options.gpu else "compare-small" if options.small else "compare"
    place = place_of(parser, options, name, "gpu.md" if options.gpu else "evidence.md")
    size = GPU if options.gpu else SMALL if options.small else REDUCED if options.reduced else FULL
    trains = not options.kept_only
    try:
        pick_device(size.like.device if trains else "cpu")
    except DeviceError as error:
        parser.error(f"{error.cause} Leave out --gpu to compare small models on the CPU.")
    carry_out(lambda book, workers, tell: compare(size, book, workers, tell, trains=trains).to_text(), options, place)


if __name__ == "__main__":
    main()
