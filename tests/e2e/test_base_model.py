"""Three daemons go on with a published model; one of them has it from its peers alone."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nolocod.run.manifest import stored_manifest
from nolocod.trainer import offline
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.inner import mean_loss
from nolocod.trainer.source import open_source
from tests.support.base_model import RUN_FILE, TEXT, publish
from tests.support.swarm import ready

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Sealed
    from tests.support.swarm import Swarm


def loss_of(model: Path, sealed: Sealed, base: Path, text: Path) -> float:
    """Of a model as `from_pretrained` loads it, on the windows that `nolocod eval` takes from `text`."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    source = open_source(sealed.manifest, make_tokenizer(sealed.manifest.data, base), "", text, base)
    return mean_loss(loaded, source.held_out(4), 4, torch.device("cpu"))


def test_three_daemons_continue_a_published_model(swarm: Swarm, tmp_path: Path) -> None:
    base = publish(tmp_path / "base", sharded=True)
    first = swarm.daemon()
    (tmp_path / "run.toml").write_text(RUN_FILE.format(base=base))
    create = ["-m", "nolocod", "create", str(tmp_path / "run.toml"), "--data-dir", str(first.paths.root)]
    done = subprocess.run([sys.executable, *create], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "`model.architectures` is left out" in done.stderr
    first.run("start")
    swarm.wait("the first node tells its address", lambda: ready(first))
    join = ("join", "--bootstrap", first.address)
    given, newcomer = swarm.daemon().run(*join, "--base", str(base)), swarm.daemon().run(*join)
    swarm.wait_paired([first, given, newcomer], 2)
    assert (given.paths.base / "config.json").is_symlink()
    for path in newcomer.paths.base.iterdir():
        assert not path.is_symlink(), "had from peers"
        assert path.read_bytes() == (base / path.name).read_bytes()
    assert len(list(newcomer.paths.base.glob("*.safetensors"))) > 1
    swarm.stop(first, given, newcomer)
    sealed = stored_manifest(newcomer.paths)
    assert sealed is not None
    (text := tmp_path / "own.txt").write_text(TEXT)
    offline.export(newcomer.paths, sealed, tmp_path / "out")
    told = offline.evaluate(newcomer.paths, sealed, text)
    exported, before = (loss_of(one, sealed, newcomer.paths.base, text) for one in (tmp_path / "out", base))
    assert abs(exported - told) < 1e-4
    assert exported < before + 0.5 < 4.0, "what the base knew is not lost: another start is at 5.8"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"
