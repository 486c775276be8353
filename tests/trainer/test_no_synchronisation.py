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
from nolocod.trainer.capture import Weights
from nolocod.trainer.duty import Duty
from nolocod.trainer.model import Place
from nolocod.trainer.replica import open_replica
from tests.support.architectures import CASES
from tests.support.trainer_parts import make_replica, sealed_run, write_text
from tests.trainer.test_objective import model_of, windows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from nolocod.trainer.replica import Replica

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


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
def test_what_goes_to_a_card_has_no_gaps(monkeypatch: pytest.MonkeyPatch, pairs: bool, packed: bool) -> None:
    """Torch would bring it by memory that is not pinned, and wait."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(objective, "sent", lambda one, device: sent.append(one) or one)
    objective._batch(windows_of(pairs=pairs), CPU, packed=packed)
    assert len(sent) >= 4
    assert all(one.is_contiguous() for one in sent)


def take_outer_step(replica: Replica, asking: Callable[[int], AbstractContextManager[object]]) -> None:
    """A paired one, with the inner step in it that follows; `asking`: so often at most, what is between two inner steps."""
    outbox, inbox = (torch.zeros(replica.plan.box_size, dtype=torch.uint8) for _ in range(2))
    with asking(1):  # for its seed, which is drawn in main memory
        replica.capture(0)
        replica.train_on()
    replica.write(outbox)
    inbox.copy_(outbox)
    replica.inspect(inbox)
    with asking(0):
        replica.step()
    replica.take_step(inbox, b"")
    with asking(0):
        replica.merge(1, 0.0)


@pytest.mark.parametrize("longest", [None, 1e-3, 1e3])
def test_nor_does_an_outer_step_between_inner_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: float | None
) -> None:
    monkeypatch.setattr(Weights, "is_far", True)  # as on a GPU
    replica = make_replica(sealed_run(), tmp_path)
    replica.clip_change = longest
    replica.step()
    with Watched() as found:
        take_outer_step(replica, contextlib.nullcontext)
    assert len(found.asked) > 2, "beside training"

    @contextlib.contextmanager
    def asking(most: int) -> Iterator[None]:
        with watched(monkeypatch) as found:
            yield
        assert found.asked == ["_local_scalar_dense"] * most

    take_outer_step(replica, asking)


@pytest.mark.gpu
def test_nor_does_an_outer_step_ask_a_gpu(tmp_path: Path) -> None:
    text, place = write_text(tmp_path), Place(torch.device("cuda"))
    replica = open_replica(sealed_run(), "alice", text, tmp_path / "cache", place)
    replica.step()

    @contextlib.contextmanager
    def asking(_: int) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    take_outer_step(replica, contextlib.nullcontext)  # all that is made once is there
    take_outer_step(replica, asking)
    before, outer = replica.theta.cpu().clone(), replica.manifest.outer
    own = outer.alpha * replica.delta - (1 - outer.beta) * (before - replica.phi)
    replica.capture(0)
    replica.train_on()
    torch.testing.assert_close(replica.theta.cpu(), before + own, rtol=0, atol=1e-5)
    replica.discard()
    torch.testing.assert_close(replica.theta.cpu(), before, rtol=0, atol=1e-6)
    replica.solo()
    assert torch.equal(replica.theta.cpu(), replica.phi)


@pytest.mark.gpu
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
