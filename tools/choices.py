"""What chose a run file's defaults, one setting at a time: the table `choices` of docs/evidence.md.

    python -m tools.choices [--reduced] [--workers N] [--kept FILE] [--into docs]

The rule: every trial is release 0.1's method but for the settings that its row and column name, on seeds that `python -m
tools.compare` does not tell. The outer step's settings were tried in runs twice as long, and lateness with the settings that
they chose; the other tables have those of `_LIKE`. All but the first, that of lateness and `_TODAY` train with AdamW and a
cosine, as runs of release 0.1 did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nolocod.studies.lab.methods import BEFORE, FIVE
from nolocod.studies.lab.trials import Trial
from tools.study import carry_out, parser_of, place_of
from tools.trials import RATES, TUNING_SEED, perform_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tools.trials import Book

_LIKE = Trial(BEFORE.name, 4, TUNING_SEED, 2e-3, steps=1500, points=1, alpha=0.2, beta=1.0, gamma=1.0)
_TINY = replace(_LIKE, model="tiny", learning_rate=4e-3)
_OLD, _NEW = (("adamw", "cosine"), ("adamw", "wsd")), (("muon", "cosine"), ("muon", "wsd"))
_INNER: dict[tuple[float, int], Any] = {
    (1e-3, TUNING_SEED): _OLD,
    (2e-3, TUNING_SEED): (_OLD[1], _NEW[1]),
    (4e-3, TUNING_SEED): (*_OLD, *_NEW),
    (8e-3, TUNING_SEED): (_OLD[1], _NEW[1]),
    (4e-3, TUNING_SEED + 1): (_OLD[0], _NEW[1]),
    (4e-3, TUNING_SEED + 2): (_OLD[0], _NEW[1]),
}
"""Optimizers and schedules by learning rate and seed."""
_FALLEN = 0.3
"""The last part of a run in which "wsd" went to zero when it was chosen."""
_SIZES = {"0.36 M parameters": _LIKE, "0.12 M": _TINY}
_LATE_LIKE = Trial(
    BEFORE.name, 4, 101, 4e-3, model="tiny", steps=1440, phase=48, points=1, optimizer="muon", schedule="wsd", decay=_FALLEN
)
_LATE = ((0, 1), (24, 1), (6, 4), (3, 8), (2, 12), (1, 24))
"""Inner steps that a merge comes late, and turns: on time, and on a line that is busy all the time."""
_OUTER = ((0.0, 1.0, 1.0), (0.2, 1.0, 1.0), (0.5, 0.7, 0.7), (0.4, 1.0, 1.0), (0.5, 0.7, 0.75))
_LIKELY = ((0.2, 1.0, 1.0), (0.4, 1.0, 0.84), (0.4, 1.0, 1.0), (0.5, 0.7, 0.7), (0.5, 1.0, 0.75))
_LESS_LIKELY = ((0.0, 1.0, 1.0), (0.5, 0.7, 1.0), (0.5, 1.0, 1.0), (0.6, 1.0, 0.64), (0.7, 1.0, 0.5))
_TODAY = replace(_TINY, method=FIVE.name, steps=3000, points=Trial.points, optimizer="muon", schedule="wsd")
"""A run file's defaults before NorMuon, when "wsd" fell in the last half."""
_AGAIN = {
    101: ((0.3, 0.7, 0.91), (0.4, 0.7, 0.84), (0.5, 0.5, 0.75), (0.5, 0.7, 0.75), *_LIKELY[2:]),
    102: _LIKELY[2:],
}
_LONG = {TUNING_SEED: sorted(_LIKELY + _LESS_LIKELY), TUNING_SEED + 1: _LIKELY}


@dataclass(frozen=True)
class Table:
    """Trials by row and column. `by_row`: the best of each row is looked for, instead of each column's."""

    text: str
    rows: str
    cells: dict[tuple[str, str], Trial]
    by_row: bool = False

    def to_text(self, book: Book) -> str:
        """A table in Markdown, the best in bold."""
        rows, columns = (list(dict.fromkeys(key[index] for key in self.cells)) for index in (0, 1))
        losses = {key: book[trial][-1].mean for key, trial in self.cells.items()}
        groups = rows if self.by_row else columns
        best = {min((loss, key) for key, loss in losses.items() if group in key)[1] for group in groups}

        def cell(row: str, column: str) -> str:
            if (row, column) not in losses:
                return ""
            shown = f"{losses[row, column]:.4f}"
            return f"**{shown}**" if (row, column) in best else shown

        return "\n".join(
            (
                f"\n{self.text}:\n",
                f"| {self.rows} | {' | '.join(columns)} |",
                "|---" * (1 + len(columns)) + "|",
                *(f"| {row} | {' | '.join(cell(row, column) for column in columns)} |" for row in rows),
            )
        )


def full() -> tuple[Table, ...]:
    """All tables."""
    return (
        Table(
            "By inner optimizer, schedule and learning rate, 0.12 M parameters, 4 replicas by the default outer step; wsd goes "
            f"to zero in the last {_FALLEN:.0%}",
            "optimizer, schedule",
            {
                (f"{optimizer}, {schedule}", f"{rate:g}, seed {seed}"): Trial(
                    BEFORE.name,
                    4,
                    seed,
                    rate,
                    model="tiny",
                    steps=1500,
                    points=1,
                    optimizer=optimizer,
                    schedule=schedule,
                    decay=_FALLEN if schedule == "wsd" else Trial.decay,
                )
                for (rate, seed), tried in _INNER.items()
                for optimizer, schedule in tried
            },
        ),
        _how_often(_SIZES),
        _outer(
            "By the outer step's settings, in runs twice as long as the others, every 25",
            (
                (f"{size}, seed {seed}", replace(like, steps=2 * like.steps, seed=seed), settings)
                for seed, settings in _LONG.items()
                for size, like in _SIZES.items()
            ),
        ),
        _outer(
            "By the outer step's settings, in runs as short as the others",
            (
                (f"{size}, every {like.inner_steps}", like, settings)
                for phase, settings in ((50, _OUTER[:3]), (24, _OUTER))
                for size, like in _each_size(_SIZES, phase)
            ),
        ),
        Table(
            "By the outer step's settings alpha, beta, gamma, once more with plain Muon and wsd to zero in the last half, "
            "0.12 M parameters, on time",
            "seed",
            {
                (f"{seed}", f"{alpha:g}, {beta:g}, {gamma:g}"): replace(_TODAY, seed=seed, alpha=alpha, beta=beta, gamma=gamma)
                for seed, settings in _AGAIN.items()
                for alpha, beta, gamma in settings
            },
            by_row=True,
        ),
        Table(
            "By how many of 24 inner steps a merge comes late, and in how many turns the model goes; 4 replicas by the default "
            "outer step, with Muon and wsd as above (the first: on time; the others: a line that is busy all the time)",
            "late, turns",
            {
                (f"{late}, {turns}", "0.12 M parameters, seed 101"): replace(_LATE_LIKE, late=late, fragments=turns)
                for late, turns in _LATE
            },
        ),
        _rates(
            "Learning rate by number of replicas, 0.12 M parameters",
            "replicas",
            {f"{count}": replace(_TINY, replicas=count) for count in (2, 4, 8)},
        ),
        _rates(
            "Learning rate by size of the model, 4 replicas",
            "parameters",
            {
                size: replace(_LIKE, model=model)
                for model, size in (("micro", "0.06 M"), ("tiny", "0.12 M"), ("0.4m", "0.36 M"))
            },
        ),
        _rates(
            "Learning rate by sequences in a batch, 0.12 M parameters, as many tokens in all and between two outer steps",
            "sequences of 64",
            {f"{batch}": replace(_TINY, batch=batch, steps=6000 // batch, phase=200 // batch) for batch in (2, 4, 8)},
        ),
    )


def reduced() -> tuple[Table, ...]:
    """One table, of a tiny model: minutes."""
    return (_how_often({"0.06 M parameters": replace(_LIKE, model="micro", steps=600)}),)


def _how_often(sizes: dict[str, Trial]) -> Table:
    text = "Held-out loss by inner steps between two outer steps, and by the bytes of it (1: the paper's pattern, every 50)"
    return Table(
        text,
        "inner steps, bytes",
        {
            (f"{like.inner_steps}, {50 / like.inner_steps / 8:.2f}", size): like
            for phase in (100, 50, 24, 12)
            for size, like in _each_size(sizes, phase)
        },
    )


def _each_size(sizes: dict[str, Trial], phase: int) -> Iterator[tuple[str, Trial]]:
    for size, like in sizes.items():
        yield size, replace(like, phase=phase)


def _outer(text: str, columns: Iterable[tuple[str, Trial, Iterable[tuple[float, float, float]]]]) -> Table:
    """`columns`: name, trial, and the settings that are tried in it."""
    cells = {
        (f"{alpha:g}, {beta:g}, {gamma:g}", column): replace(like, alpha=alpha, beta=beta, gamma=gamma)
        for column, like, settings in columns
        for alpha, beta, gamma in settings
    }
    return Table(text, "alpha, beta, gamma", cells)


def _rates(text: str, rows: str, likes: dict[str, Trial]) -> Table:
    """Each of `likes`, by its row, with every learning rate."""
    cells = {(row, f"{rate:g}"): replace(like, learning_rate=rate) for row, like in likes.items() for rate in RATES}
    return Table(text, rows, cells, by_row=True)


def choices(tables: tuple[Table, ...], book: Book, workers: int, tell: Callable[[str], None]) -> str:
    """Do what is not done yet; every table with its losses, in Markdown."""
    perform_all((trial for table in tables for trial in table.cells.values()), book, workers, tell)
    return "\n".join(table.to_text(book) for table in tables)


def main() -> None:
    parser = parser_of("choices", (__doc__ or "").splitlines()[0])
    parser.add_argument("--reduced", action="store_true", help="a few short trials")
    options = parser.parse_args()
    tables = reduced() if options.reduced else full()
    place = place_of(parser, options, "choices")
    carry_out(lambda book, workers, tell: choices(tables, book, workers, tell), options, place)


if __name__ == "__main__":
    main()
