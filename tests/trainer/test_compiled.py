"""Layers that torch compiles: the same training, and no less of it where there is no compiler."""

from __future__ import annotations

import socket
from functools import partialmethod
from typing import TYPE_CHECKING

import pytest
import torch
from torch import _dynamo, _inductor
from torch._dynamo.utils import counters

from nolocod.trainer import compiled, on_device
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.model import Place
from nolocod.trainer.replica import open_replica
from nolocod.trainer.worker import Worker
from tests.support.trainer_parts import sealed_run, setup_for, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 3


@pytest.fixture(autouse=True)
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with _dynamo.config.patch(recompile_limit=8):
        _dynamo.reset()
        counters.clear()
        yield
        _dynamo.reset()


def trained(folder: Path, *, compiles: bool) -> tuple[tuple[str, ...], list[float]]:
    """The devices, as they are told, and the losses of some steps and an evaluation."""
    place = Place(torch.device("cpu"), compiles=compiles)
    replica = open_replica(sealed_run(), "alice", write_text(folder), folder / "cache", place)
    found = []
    for _ in range(STEPS):
        replica.step()
        found.append(replica.report())
    return replica.devices, [*found, replica.evaluate()]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    names, losses = trained(tmp_path_factory.mktemp("usual"), compiles=False)
    assert names == ("cpu",)
    return losses


def test_a_compiled_model_learns_the_same_and_its_layers_share_one_form(
    tmp_path: Path, usual: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the code for the processor, which takes half a minute to make."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    assert trained(tmp_path, compiles=True) == (("cpu (compiled)",), pytest.approx(usual, rel=1e-4))
    assert 0 < counters["stats"]["unique_graphs"] <= 2, "to train and to evaluate, for all layers"


def test_without_a_compiler_it_computes_as_before(tmp_path: Path, usual: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inductor.config.cpp, "cxx", ("/nowhere/compiler",))
    assert trained(tmp_path, compiles=True) == (("cpu",), usual)
    assert counters["frames"]["total"], "it was tried"


@pytest.mark.parametrize("asked", [True, False])
def test_the_trainer_is_told_to(asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.nn.Module] = []
    monkeypatch.setattr(on_device, "compile_layers", lambda model, compute: found.append(model))
    worker = Worker(ChildEnd(socket.socketpair()[0].detach()), anonymous_file("boxes"))
    worker._load(setup_for(sealed_run(), tmp_path, compile=asked))
    assert len(found) == asked


def test_the_layers_of_a_model_are_its_longest_row_of_alike_modules() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.ReLU()])
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])

    model = Model()
    assert compiled.layers(model) == [*model.layers]
    assert compiled.layers(torch.nn.Linear(1, 1)) == []
