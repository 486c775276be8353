"""Every method of the lab on something tiny: replicas stay together as the method says, and nothing is done twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nolocod.lab import trials
from nolocod.lab.methods import BY_NAME
from nolocod.lab.trials import Book, Trial, perform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nolocod.trainer.rehearsal import Point

TINY = Trial("none", 2, 1, 1e-3, model="tiny", steps=16, phase=8, batch=1, sequence=16, held_out=1, points=2)
TOGETHER = {"all", "gradients"}
"""Schemes that leave all replicas with the same weights."""


@pytest.mark.parametrize("name", BY_NAME)
def test_each_method_trains_and_its_replicas_are_as_far_apart_as_it_says(name: str) -> None:
    last = perform(replace(TINY, method=name))[-1]
    assert 0 < last.averaged < 10
    assert last.mean <= last.worst
    if BY_NAME[name].scheme in TOGETHER:
        assert last.spread == 0
        assert last.mean == last.worst
    elif BY_NAME[name].scheme == "none":
        assert last.spread > 0


def test_the_same_trial_comes_out_the_same_and_another_seed_does_not() -> None:
    one, again, other = (perform(trial) for trial in (TINY, TINY, replace(TINY, seed=2)))
    assert one == again != other


class Here:
    """A pool of no processes, which counts what it does."""

    done: list[Trial]

    def __init__(self, workers: int) -> None:
        del workers

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def imap_unordered(
        self, work: Callable[[Trial], tuple[Trial, list[Point]]], left: Iterable[Trial]
    ) -> Iterator[tuple[Trial, list[Point]]]:
        for trial in left:
            self.done.append(trial)
            yield work(trial)


def test_a_book_does_nothing_twice_not_even_after_it_was_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Here.done = []
    monkeypatch.setattr(trials.multiprocessing, "get_context", lambda _: type("Context", (), {"Pool": Here}))
    kept, told, other = tmp_path / "kept" / "trials.jsonl", list[str](), replace(TINY, seed=2)
    book = Book(kept)
    book.perform([TINY, TINY], 2, told.append)
    assert Here.done == [TINY]
    Book(kept).perform([TINY, other], 2, told.append)
    assert Here.done == [TINY, other]
    again = Book(kept)
    again.perform([other, TINY], 2, told.append)
    assert len(Here.done) == len(told) == 2
    assert again.points(TINY) == book.points(TINY)
    with pytest.raises(KeyError):
        again.points(replace(TINY, seed=3))
