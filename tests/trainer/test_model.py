"""What a run's `[model]` may say, with the newest transformers that is allowed and with the oldest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nolocod.errors import RunFileError
from nolocod.run.manifest import Manifest
from nolocod.trainer.model import layout_of, read_config
from tests.support.trainer_parts import MODEL

OLDEST = Path(sys.prefix, "oldest")
"""Where tools/setup.sh puts the oldest transformers that pyproject.toml allows."""
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64}
QWEN2 = {**MODEL, "model_type": "qwen2", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}


def test_layers_lie_in_their_order() -> None:
    config = read_config(Manifest(name="x", model={**MODEL, "num_hidden_layers": 11}), 256)
    numbers = [int(name.split(".")[2]) for name in layout_of(config).names if name.startswith("model.layers.")]
    assert numbers == sorted(numbers)
    assert max(numbers) == 10


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"model_type": "nonsense"}, "model_type"),
        ({**MODEL, "hiden_size": 3}, "hiden_size"),
        ({**MODEL, "hidden_size": "large"}, "hidden_size"),
        ({**MODEL, "hidden_size": 33}, "hidden size"),
        ({**MODEL, "vocab_size": 100}, "vocab_size"),
        ({**MODEL, "vocab_size": "many"}, "vocab_size"),
        ({"model_type": "vit"}, "not a language model"),
        ({"model_type": "t5"}, "no causal language model"),
    ],
)
def test_a_bad_model_is_named_by_its_key(model: dict[str, object], says: str) -> None:
    with pytest.raises(RunFileError, match=says):
        layout_of(read_config(Manifest(name="x", model=model), 256))


@pytest.mark.parametrize("model", [MODEL, GPT2, QWEN2, {**GPT2, "hidden_size": 64}], ids=["llama", "gpt2", "qwen2", "alias"])
def test_what_an_architecture_is_made_of_may_be_said(model: dict[str, object]) -> None:
    assert layout_of(read_config(Manifest(name="x", model=model), 256)).size > 10_000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, "eager") for key in ("attn_implementation", "_attn_implementation", "experts_implementation")],
        *[(key, True) for key in ("trust_remote_code", "use_kernels", "kwargs", "self")],
        *[("_name_or_path", "model"), ("auto_map", {"AutoConfig": "evil.Config"}), ("name_or_path", "model")],
        *[("quantization_config", {"quant_method": "awq"}), ("kernel_config", {"RMSNorm": "kernel"})],
        *[("architectures", ["Other"]), ("torchscript", True), ("transformers_version", "1.0"), ("cls", "dict")],
    ],
)
def test_what_would_fetch_or_choose_code_is_no_key(key: str, value: object) -> None:
    with pytest.raises(RunFileError, match=f"`model.{key}` is not a key"):
        read_config(Manifest(name="x", model={**MODEL, key: value}), 256)


def test_the_oldest_transformers_builds_and_refuses_the_same() -> None:
    if not OLDEST.is_dir():
        pytest.skip("tools/setup.sh has not put the oldest transformers there")
    root = Path(__file__).parents[2]
    (least,) = re.findall(r'"transformers>=([\d.]+)"', (root / "pyproject.toml").read_text())
    path = os.environ | {"PYTHONPATH": f"{OLDEST}:{root}"}
    version = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.run(version, env=path, capture_output=True, text=True, check=True).stdout.startswith(f"{least}.")
    names = "may_be_said or is_no_key or published_configurations or mixtral or mamba2"
    files = [__file__, *(str(Path(__file__).with_name(name)) for name in ("test_founding.py", "test_architectures.py"))]
    these = ["-k", names, "-p", "no:cacheprovider", "-q", *files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *these], env=path, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
