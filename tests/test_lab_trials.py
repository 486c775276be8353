"""Every method of the lab on something tiny: replicas stay together as the method says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nolocod.lab.methods import BY_NAME
from nolocod.lab.trials import Trial, perform

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
