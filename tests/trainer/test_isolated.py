"""Documents of plain text that see none of those before them in their window."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from nolocod.errors import RunFileError, UnsupportedModelError
from nolocod.run.data import Data
from nolocod.run.manifest import Inner
from nolocod.trainer import founding, source
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.objective import Answers, NextToken, objective_of
from nolocod.trainer.prefetch import Prefetched
from nolocod.trainer.replica import open_replica
from nolocod.trainer.samples import BEGIN, ID, LEARNT, isolated
from nolocod.trainer.source import open_source
from tests.support.architectures import CASES
from tests.support.trainer_parts import sealed_run
from tests.trainer.test_hub import data_set
from tests.trainer.test_objective import BY_ITSELF, documents, likelihood, model_of

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
DATA = Data(source="jsonl", documents="isolated", held_out=0.2)
INNER = Inner(steps=4, batch=2, sequence=32)


def write_documents(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": f"document {number} " + "ab" * (number % 9)}) + "\n" for number in range(500)))
    return path


def test_marks_begin_a_document_behind_each_end_and_in_each_window() -> None:
    marked = isolated(np.array([[5, 0, 6, 7], [0, 0, 8, 0], [0, 0, 0, 0]]), 0)
    assert (marked & ID).tolist() == [[5, 0, 6, 7], [0, 0, 8, 0], [0, 0, 0, 0]]
    assert (marked & BEGIN != 0).tolist() == [
        [True, False, True, False],
        [True, False, True, False],
        [True, False, False, False],
    ]
    assert ((marked & LEARNT != 0) ^ (marked & BEGIN != 0)).all(), "nothing before a document tells its first token"


def test_a_model_that_does_not_isolate_what_shares_a_window_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="does not isolate documents"):
        objective_of(sealed_run(data=DATA).manifest, model_of("mamba2"))


def test_windows_of_empty_documents_have_something_to_learn() -> None:
    model, windows = model_of("llama"), torch.from_numpy(isolated(np.zeros((2, 33), dtype=np.int64), 0))
    objective = objective_of(sealed_run(data=DATA).manifest, model)
    assert objective.weight(windows) == 64
    assert math.isfinite(objective.loss(model, windows, CPU)[0].item())


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in BY_ITSELF])
def test_documents_in_one_window_have_the_loss_that_each_has_alone(kind: str) -> None:
    model = model_of(kind)
    ids = np.random.default_rng(0).integers(1, 256, (3, 33))
    ids[[0, 0, 1, 2], [4, 20, 11, 32]] = 0
    windows = torch.from_numpy(isolated(ids, 0))
    each = [likelihood(model, one) for one in documents(windows)]
    assert len(each) == 3 + 3, "the last end has nothing behind it"
    objective = objective_of(sealed_run(data=DATA).manifest, model)
    assert isinstance(objective, Answers)
    with torch.no_grad():
        loss, _ = objective.loss(model, windows, CPU)
    assert objective.weight(windows) == sum(length for _, length in each)
    wanted = -sum(total for total, _ in each) / objective.weight(windows)
    assert abs(loss.item() - wanted) < 1e-5 * max(1.0, wanted)


def test_without_the_choice_a_document_sees_those_before_it() -> None:
    data = Data(source="jsonl", documents="apart")
    assert isinstance(objective_of(sealed_run(data=data).manifest, model_of("llama")), NextToken)


def test_all_windows_of_a_source_are_marked_and_it_goes_on_where_it_was(tmp_path: Path) -> None:
    manifest = sealed_run(data=DATA, inner=INNER).manifest
    tokenizer, path = make_tokenizer(DATA), write_documents(tmp_path / "a.jsonl")
    found = open_source(manifest, tokenizer, "alice", path, tmp_path / "cache")
    taken, held, position = found.take(8), found.held_out(4), found.position
    for windows in (taken, held):
        assert (windows[:, 0] & BEGIN != 0).all()
        assert np.array_equal(windows, isolated(windows & ID, 0))
    wanted = found.take(4)
    again = open_source(manifest, tokenizer, "alice", path, tmp_path / "cache")
    again.seek(position)
    assert np.array_equal(again.take(4), wanted)


def test_windows_of_the_hub_are_marked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_set(tmp_path / "d")
    monkeypatch.setattr(source, "open_hub", lambda settings: dataset)
    data = Data(source="hub", dataset="a/b", documents="isolated", held_out=0.2)
    found = open_source(sealed_run(data=data, inner=INNER).manifest, make_tokenizer(data), "alice", None, tmp_path)
    assert isinstance(found, Prefetched)
    found.begin()
    for windows in (found.take(2), found.held_out(2)):
        assert np.array_equal(windows, isolated(windows & ID, 0))
    found.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_replica_learns_from_isolated_documents(tmp_path: Path, kind: str) -> None:
    sealed = sealed_run(model=CASES[kind] | {"model_type": kind}, data=DATA, inner=INNER)
    replica = open_replica(sealed, "alice", write_documents(tmp_path / "a.jsonl"), tmp_path / "cache")
    before = replica.evaluate()
    for _ in range(30):
        replica.step()
    assert math.isfinite(replica.report())
    assert replica.evaluate() < 0.9 * before


def test_a_tokenizer_without_an_end_of_text_isolates_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.WordLevel({"a": 0, "\n": 1}, unk_token="a")).to_str())
    model = 'model_type = "llama"\nhidden_size = 32\nnum_hidden_layers = 1\nnum_attention_heads = 2\nintermediate_size = 32'
    data = 'source = "text"\ntokenizer = "tokenizer.json"\ndocuments = "isolated"'
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\n[model]\n{model}\n[data]\n{data}\n')
    with pytest.raises(RunFileError, match="token that ends a text") as raised:
        founding.read(path)
    assert raised.value.remedy == 'Say "apart".'


def test_samples_are_isolated_always() -> None:
    with pytest.raises(ValueError, match="needs records, apart"):
        Data(source="jsonl", kind="chat", documents="isolated")
