"""What a model can do, by the field's own measure: the tasks of `lm-eval` (EleutherAI's harness), and perplexity on texts.

The rule: a folder that `from_pretrained` reads is evaluated, as anybody else would; nothing of the run is needed. Perplexity is
the harness's `loglikelihood_rolling`, so that it is counted per byte and word too, and models of other tokenizers compare.
"""

from __future__ import annotations

import math
import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from transformers import AutoTokenizer

from nolocod.disk import write_whole
from nolocod.errors import DataError, TasksError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_METRICS = ("bits_per_byte", "byte_perplexity", "word_perplexity")


class Row(msgspec.Struct, frozen=True):
    """One figure. `error` is its standard error, None where the harness gives none."""

    task: str
    metric: str
    value: float
    error: float | None
    shots: int
    samples: int


class Results(msgspec.Struct, frozen=True):
    """What was found, and by which versions."""

    rows: tuple[Row, ...]
    versions: dict[str, str]

    def to_text(self) -> str:
        """A table in Markdown."""
        rows = ["| task | metric | value | ± | shots | samples |", "|---|---|---|---|---|---|"]
        for row in self.rows:
            error = "" if row.error is None else f"{row.error:.4f}"
            rows.append(f"| {row.task} | {row.metric} | {row.value:.4f} | {error} | {row.shots} | {row.samples} |")
        return "\n".join([*rows, "", "By " + ", ".join(f"{name} {number}" for name, number in self.versions.items()) + "."])

    def write(self, folder: Path) -> None:
        """As `eval.json` and `eval.md`."""
        write_whole(folder / "eval.json", msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        write_whole(folder / "eval.md", self.to_text().encode() + b"\n")


def evaluate(
    model: Path, tasks: Sequence[str], texts: Mapping[str, Path], *, shots: int | None = None, limit: int | None = None,
    device: str = "cpu", batch: int = 8, more: Path | None = None,
) -> Results:  # fmt: skip
    """Evaluate the model in the folder `model` on `tasks` of the harness, with those described in the folder `more`, and its
    perplexity on each of `texts`, files by name.

    Raises TasksError where the harness is missing, knows no such task, or cannot have its data; DataError for a text.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise TasksError(f"lm-eval is not installed: {error}.", remedy='pip install "nolocod[tasks]"') from error
    for path in texts.values():
        if not path.is_file():
            raise DataError(f"{path} is not a file.", remedy="Name a file of text: --text NAME=FILE.")
    for all_of_them in (False, True):  # to read the harness's own takes many seconds
        known = TaskManager(include_path=str(more) if more else None, include_defaults=all_of_them)
        if not (unknown := [task for task in tasks if not known.match_tasks([task])]):
            break
    else:
        raise TasksError(f"lm-eval knows no task {', '.join(unknown)}.")
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    settings = {"device": device, "dtype": "float32", "batch_size": batch, **_prefix(tokenizer)}
    opened = HFLM(pretrained=str(model), tokenizer=tokenizer, backend="causal", **settings)
    wanted = [*tasks, *(_perplexity(name, path) for name, path in texts.items())]
    try:
        found: Any = lm_eval.simple_evaluate(
            opened, tasks=wanted, num_fewshot=shots, limit=limit, task_manager=known, log_samples=False, bootstrap_iters=1000
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # of `datasets` and the hub
        raise TasksError(f"lm-eval failed: {' '.join(str(error).split())[:300]}") from error
    versions = {name: version(name) for name in ("lm_eval", "transformers", "torch")}
    return Results(tuple(_rows(found)), versions)


def _prefix(tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers has no common typed base
    """What comes before a text: the tokenizer's own token; where it has none, a line break."""
    if tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None:
        return {}
    return {"prefix_token_id": tokenizer.encode("\n", add_special_tokens=False)[0]}


def _perplexity(name: str, path: Path) -> dict[str, Any]:
    """A task of the harness: the whole file as one document."""
    return {
        "task": name, "dataset_path": "text", "test_split": "test", "output_type": "loglikelihood_rolling",
        "dataset_kwargs": {"data_files": {"test": str(path.resolve())}, "sample_by": "document"},
        "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": one, "aggregation": "bits_per_byte" if one == "bits_per_byte" else "weighted_perplexity",
             "higher_is_better": False} for one in _METRICS
        ],
    }  # fmt: skip


def _rows(found: Any) -> list[Row]:  # noqa: ANN401 - the harness's own dictionary
    rows = []
    for task, figures in found["results"].items():
        samples, shots = found["n-samples"].get(task, {}).get("effective", 0), found["n-shot"].get(task, 0)
        for key, value in figures.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = figures.get(f"{metric}_stderr,{chosen}")
            told = metric if chosen == "none" else f"{metric} ({chosen})"
            known = error if isinstance(error, float) and math.isfinite(error) else None
            rows.append(Row(task, told, float(value), known, shots, samples))
    return rows
