"""An inner step reads nothing back from the device. On a processor what would is found by its operations; on a GPU by torch."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from nolocod.run.data import Data
from nolocod.run.manifest import Inner
from nolocod.trainer import objective
from nolocod.trainer.duty import Duty
from nolocod.trainer.model import Place
from nolocod.trainer.replica import open_replica
from tests.support.architectures import CASES
from tests.support.trainer_parts import make_replica, sealed_run, write_text
from tests.trainer.test_objective import model_of, windows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")
_ASK = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2", "bincount"}
"""Operations whose result, or its size, the host must know."""


class Watched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_", "index_put") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        by_count = name == "repeat_interleave" and kwargs.get("output_size") is None if kwargs else name == "repeat_interleave"
        if name in _ASK or by_mask or by_count:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with Watched() as found, monkeypatch.context() as patch:
        for name in ("tolist", "numpy"):  # no operations
            patch.setattr(torch.Tensor, name, lambda *_, name=name: found.asked.append(name))
        yield found


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("kind", CASES)
def test_an_inner_step_asks_the_device_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, optimizer: str
) -> None:
    inner = Inner(steps=4, batch=2, sequence=32, optimizer=optimizer)
    replica = make_replica(sealed_run(model=CASES[kind] | {"model_type": kind}, inner=inner), tmp_path)
    replica.step()  # the optimizer's state is there
    with watched(monkeypatch) as found:
        replica.step()
    assert found.asked == []


def test_transformers_would_ask_whether_rows_hold_several_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make_replica(sealed_run(), tmp_path)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", objective._asks)
    with watched(monkeypatch) as found:
        replica.step()
    assert found.asked


def test_what_is_known_is_known_of_one_thread_s_rows_alone() -> None:
    model, ids, positions = model_of("llama"), torch.arange(8)[None], torch.arange(8)[None] % 4
    objective.objective_of(sealed_run().manifest, model)
    with torch.no_grad(), objective._knowing(packed=False), ThreadPoolExecutor(1) as other:
        joined = model(input_ids=ids, position_ids=positions).logits
        apart = other.submit(torch.no_grad()(model), input_ids=ids, position_ids=positions).result().logits
    assert (joined - apart).abs().max() > 1e-3
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, position_ids=positions).logits, apart)


@pytest.mark.parametrize("kind", ["instruction", "preference"])
def test_nor_does_a_step_on_samples(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, windows = model_of("llama"), windows_of(pairs=kind == "preference")
    manifest = sealed_run(data=Data(source="jsonl", kind=kind)).manifest
    made = objective.objective_of(manifest, model)
    batch = objective._batch(windows, CPU, packed=True)  # in main memory: there may be asked
    monkeypatch.setattr(objective, "_batch", lambda *_, **__: batch)
    wanted = made.loss(model, windows, CPU)[1].item()
    with watched(monkeypatch) as found:
        loss = made.loss(model, windows, CPU)[1]
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    assert found.asked == []
    assert loss.item() == wanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_nor_on_a_gpu(tmp_path: Path, kind: str) -> None:
    sealed = sealed_run(model=CASES[kind] | {"model_type": kind})
    replica = open_replica(sealed, "alice", write_text(tmp_path), tmp_path / "cache", Place(torch.device("cuda")))
    duty = Duty()
    duty.step(replica)
    torch.cuda.set_sync_debug_mode("error")
    try:
        seconds = [duty.step(replica) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(0 < one < 60 for one in seconds)
    assert replica.report() > 0
