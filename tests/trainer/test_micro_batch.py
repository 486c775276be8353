"""How much of a step is computed at once: as much as memory takes, and the step is the same."""

from __future__ import annotations

import dataclasses
import resource
import socket
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from nolocod.errors import ModelTooLargeError
from nolocod.run.manifest import Inner
from nolocod.trainer import on_device
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.head import CHUNK
from nolocod.trainer.inner import halved, is_out_of_memory
from nolocod.trainer.model import BYTES_ON_HOST, ON_CPU, Layout, Place, bytes_on_device, check_memory, layout_of, read_config
from nolocod.trainer.worker import Worker
from tests.support.architectures import CASES
from tests.support.trainer_parts import MODEL, make_replica, sealed_run, setup_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nolocod.trainer.replica import Replica

LARGE = {**MODEL, "vocab_size": 32_000}
"""The logits of a window of 320 tokens take 41 MB, which malloc never takes from what was freed before."""


def test_halved_is_the_largest_power_of_two_below() -> None:
    assert [halved(count) for count in (2, 3, 4, 5, 8, 9, 24)] == [1, 2, 2, 4, 4, 8, 16]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_all_that_torch_says_where_memory_ran_out_is_known(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


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
    with memory_left(130 << 20):
        first.step()
    second.step()
    assert first.inner.at_once in (1, 2)
    assert (first.theta - second.theta).abs().max() < 1e-5
    assert first.source.position == second.source.position


def test_what_is_compiled_is_tried_out_with_as_much_as_memory_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make_replica(sealed_run(inner=Inner(steps=4, batch=8, sequence=32)), tmp_path)
    body, seen = replica.model.base_model, []
    whole = body.forward

    def forward(input_ids: torch.Tensor) -> object:
        seen.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("no memory left")
        return whole(input_ids=input_ids)

    monkeypatch.setattr(body, "forward", forward)
    replica.inner.try_out(32)
    assert (seen, replica.inner.at_once) == ([8, 4, 2], 2)


def test_a_model_of_which_memory_takes_no_window_is_told(tmp_path: Path) -> None:
    long = Inner(steps=4, batch=1, sequence=4096, optimizer="adamw")  # more than earlier tests may have left in the process
    replica = make_replica(sealed_run(model=LARGE, inner=long), tmp_path)
    before = replica.theta.clone()
    with memory_left(5 << 20), pytest.raises(ModelTooLargeError, match="one window"):
        replica.step()
    assert torch.equal(replica.theta, before)


def test_what_cannot_fit_is_not_tried(tmp_path: Path) -> None:
    replica = make_replica(sealed_run(model=LARGE, inner=Inner(steps=4, batch=1 << 22, sequence=32)), tmp_path)
    assert 1 <= replica.inner.at_once < 1 << 22
    assert replica.inner.at_once & (replica.inner.at_once - 1) == 0


def test_where_memory_takes_no_window_layers_are_computed_twice(tmp_path: Path) -> None:
    wide = {**MODEL, "num_hidden_layers": 4, "intermediate_size": 8192}  # 34 MB between matrices of a layer: as with LARGE
    sealed = sealed_run(model=wide, inner=Inner(steps=4, batch=2, sequence=1024, optimizer="adamw"))
    first, second = make_replica(sealed, tmp_path), make_replica(sealed, tmp_path)
    second.inner.at_once = 1
    for replica in (first, second):
        replica.step()
    assert not first.inner.spares_memory
    with memory_left(360 << 20):
        first.step()
    second.step()
    assert (first.inner.at_once, first.inner.spares_memory) == (1, True)
    assert (first.theta - second.theta).abs().max() < 1e-5


@pytest.mark.parametrize("kind", sorted(CASES))
def test_layers_that_are_computed_twice_give_the_same_weights(tmp_path: Path, kind: str) -> None:
    sealed = sealed_run(model=CASES[kind] | {"model_type": kind})
    first, second = make_replica(sealed, tmp_path), make_replica(sealed, tmp_path)
    assert first.inner.spare_memory()
    for replica in (first, second):
        torch.manual_seed(0)
        for _ in range(3):
            replica.step()
    assert torch.equal(first.theta, second.theta)
    assert first.evaluate() == second.evaluate()


def test_how_much_is_computed_at_once_follows_from_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = sealed_run(model=LARGE, inner=Inner(steps=4, batch=24, sequence=256))
    config = read_config(sealed.manifest, 256)
    layout = layout_of(config)
    assert (layout.plain_head, layout.states) == (True, 2 * 32)
    weights = bytes_on_device(layout, sealed.manifest, torch.float32) + BYTES_ON_HOST * layout.size
    token, logits = 4 * layout.states, 4 * 256 * 32_000

    def fitting(size: int, layout: Layout = layout) -> int:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=weights + size))
        return check_memory(layout, config.vocab_size, sealed.manifest, 0, ON_CPU)

    assert fitting(CHUNK + 24 * 256 * 17 * token) == 24
    assert fitting(CHUNK + 24 * 256 * 17 * token - 1) == 16
    assert fitting(logits + 256 * 17 * token) == 1
    assert fitting(logits + 256 * 17 * token - 1) == 0, "one, whose layers are computed twice"
    assert fitting(logits + 256 * token) == 0
    with pytest.raises(ModelTooLargeError):
        fitting(logits + 256 * token - 1)
    whole = dataclasses.replace(layout, plain_head=False)
    assert fitting(3 * logits + 256 * 17 * token, whole) == 1
    assert fitting(3 * logits + 256 * 17 * token - 1, whole) == 0


def test_a_gpu_computes_all_of_a_step_at_once_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's micro-batch is for those who have no more."""
    sealed, cuda = sealed_run(model=LARGE, inner=Inner(steps=4, batch=8, accumulation=6, sequence=256)), torch.device("cuda", 1)
    config = read_config(sealed.manifest, 256)
    layout = layout_of(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    weights = bytes_on_device(layout, sealed.manifest, torch.bfloat16)

    def fitting(windows: int) -> int:
        size = CHUNK + windows * 256 * 17 * 4 * layout.states
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (weights + size, 0))
        return check_memory(layout, config.vocab_size, sealed.manifest, 0, Place(cuda))

    assert [fitting(windows) for windows in (60, 48, 47, 32, 31)] == [48, 48, 32, 32, 16]


def test_the_trainer_is_told_to_spare_memory_and_may_use_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for spares in (False, True):
        worker = Worker(ChildEnd(socket.socketpair()[0].detach()), anonymous_file("boxes"))
        worker._load(setup_for(sealed_run(), tmp_path, spare_memory=spares, tf32=spares))
        assert worker._replica is not None
        assert worker._replica.inner.spares_memory == spares
        assert torch.backends.cuda.matmul.allow_tf32 == spares


def test_a_replica_for_which_one_window_hardly_fits_computes_layers_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "check_memory", lambda *_: 0)
    replica = make_replica(sealed_run(), tmp_path)
    assert (replica.inner.at_once, replica.inner.spares_memory) == (1, True)
