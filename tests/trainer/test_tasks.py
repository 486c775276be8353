"""What `nolocod eval` finds out by the field's harness: tasks of one's own, and perplexity on texts."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nolocod.errors import DataError, TasksError
from nolocod.trainer.tasks import evaluate

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "Nobody waits for everybody.\n" * 20
CHOICES = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one over bytes, as `nolocod export` writes it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=1024, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def test_the_perplexity_of_a_text_is_the_models_own_loss_on_it(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(TEXT)
    results = evaluate(model, [], {"nobody": path})
    found = {row.metric: row.value for row in results.rows if row.task == "nobody"}
    ids = torch.tensor([list(("\n" + TEXT).encode())])  # the tokenizer has no token for a beginning
    with torch.no_grad():
        loss = float(AutoModelForCausalLM.from_pretrained(model)(input_ids=ids, labels=ids).loss)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-4)
    assert found["byte_perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
    results.write(tmp_path)
    assert json.loads((tmp_path / "eval.json").read_text())["rows"][0]["task"] == "nobody"
    assert "| nobody | bits_per_byte |" in (tmp_path / "eval.md").read_text()


def test_a_task_of_ones_own_is_evaluated_and_only_its_first_questions(model: Path, tmp_path: Path) -> None:
    questions = [{"question": f"{number}:", "choices": ["red", "blue"], "answer": number % 2} for number in range(12)]
    (tmp_path / "colours.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "colours.yaml").write_text(CHOICES % (tmp_path / "colours.jsonl"))
    rows = evaluate(model, ["colours"], {}, limit=10, more=tmp_path).rows
    assert [(row.task, row.metric, row.samples) for row in rows] == [("colours", "acc", 10)]
    assert 0 <= rows[0].value <= 1
    assert rows[0].error is not None


def test_what_cannot_be_evaluated_is_said_with_what_to_do(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager", lambda include_defaults, **given: TaskManager(include_defaults=False, **given)
    )
    with pytest.raises(TasksError, match="knows no task nonsense"):
        evaluate(model, ["nonsense"], {})
    with pytest.raises(DataError, match="is not a file"):
        evaluate(model, [], {"nobody": tmp_path / "nothing"})
    (tmp_path / "gone.yaml").write_text(CHOICES.replace("colours", "gone") % (tmp_path / "gone.jsonl"))
    with pytest.raises(TasksError, match="lm-eval failed"):
        evaluate(model, ["gone"], {}, more=tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(TasksError, match="not installed") as told:
        evaluate(model, [], {})
    assert told.value.remedy == 'pip install "nolocod[tasks]"'
