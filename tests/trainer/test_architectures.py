"""Every architecture of docs/architectures.md lives through a whole run; what cannot is refused by name before there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nolocod.errors import RunFileError
from nolocod.trainer import founding
from tests.support.architectures import CASES, REFUSED, live, run_file


@pytest.mark.parametrize("model_type", CASES)
def test_an_architecture_lives_from_create_to_from_pretrained(tmp_path: Path, model_type: str) -> None:
    life = live(tmp_path, model_type, CASES[model_type])
    assert life.after < life.before
    assert life.resumed
    assert life.exported < 1e-4


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_no_node_could_train_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    model, why = REFUSED[model_type]
    with pytest.raises(RunFileError, match=f"'{model_type}'.*{why}|{why}"):
        founding.read(run_file(tmp_path, model_type, model))


def test_the_page_names_them_all() -> None:
    named = re.findall(r"^\| `(\w+)` \|", (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(), re.MULTILINE)
    assert [name for name in named if name != "model_type"] == [*CASES, *REFUSED]
