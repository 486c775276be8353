"""How much of a step is computed at once: as much as memory takes, and the step is the same."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from nolocod.errors import ModelTooLargeError
from nolocod.run.manifest import Inner
from nolocod.trainer.inner import halved
from tests.support.trainer_parts import MODEL, make_replica, sealed_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nolocod.trainer.replica import Replica

LARGE = {**MODEL, "vocab_size": 32_000}
"""The logits of a window of 320 tokens take 41 MB, which malloc never takes from what was freed before."""


def test_halved_is_the_largest_power_of_two_below() -> None:
    assert [halved(count) for count in (2, 3, 4, 5, 8, 9, 24)] == [1, 2, 2, 4, 4, 8, 16]


@pytest.mark.parametrize("at_once", [1, 4, 5])
def test_a_step_is_the_same_however_much_of_it_is_computed_at_once(tmp_path: Path, at_once: int) -> None:
    sealed = sealed_run(inner=Inner(steps=4, batch=6, accumulation=2, sequence=32))
    whole, cut = make_replica(sealed, tmp_path), make_replica(sealed, tmp_path)
    whole.inner.at_once, cut.inner.at_once = 12, at_once
    windows = torch.from_numpy(whole.source.held_out(12))
    for replica in (whole, cut):
        replica.inner._differentiate(windows, replica.objective.weight(windows))
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
        one.grad = other.grad = None
    start = whole.theta.clone()
    for _ in range(3):
        whole.step()
        cut.step()
    assert cut.report() == pytest.approx(whole.report(), rel=1e-5)
    assert (cut.theta - whole.theta).norm() < 1e-2 * (whole.theta - start).norm()
    assert cut.source.position == whole.source.position
    assert cut.standing.tokens == whole.standing.tokens == 3 * 12 * 32


@contextmanager
def memory_left(size: int) -> Iterator[None]:
    """This process gets so many bytes more, and no others."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def large(folder: Path) -> Replica:
    return make_replica(sealed_run(model=LARGE, inner=Inner(steps=4, batch=4, sequence=320, optimizer="adamw")), folder)


def test_a_step_that_runs_out_of_memory_is_taken_in_smaller_parts(tmp_path: Path) -> None:
    first, second = large(tmp_path), large(tmp_path)
    second.inner.at_once = 1
    for replica in (first, second):
        replica.step()  # what the optimizer keeps is there now
    held_out = torch.from_numpy(first.source.held_out(1))
    first.inner._differentiate(held_out, first.objective.weight(held_out))  # as parts before the one that runs out leave it
    with memory_left(300 << 20):
        first.step()
    second.step()
    assert first.inner.at_once in (1, 2)
    assert (first.theta - second.theta).abs().max() < 1e-5
    assert first.source.position == second.source.position


def test_a_model_of_which_memory_takes_no_window_is_told(tmp_path: Path) -> None:
    replica = large(tmp_path)
    before = replica.theta.clone()
    with memory_left(5 << 20), pytest.raises(ModelTooLargeError, match="one window"):
        replica.step()
    assert torch.equal(replica.theta, before)


def test_what_cannot_fit_is_not_tried(tmp_path: Path) -> None:
    replica = make_replica(sealed_run(model=LARGE, inner=Inner(steps=4, batch=1 << 22, sequence=32)), tmp_path)
    assert 1 <= replica.inner.at_once < 1 << 22
    assert replica.inner.at_once & (replica.inner.at_once - 1) == 0
