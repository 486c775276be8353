"""Three daemons teach a published model to answer, by an adapter beside it: nothing else is trained, exchanged and exported."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import TYPE_CHECKING

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nolocod.errors import FarWeightsError, HarmfulTensorError
from nolocod.run.manifest import stored_manifest
from nolocod.trainer import offline
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.inner import mean_loss
from nolocod.trainer.objective import objective_of
from nolocod.trainer.offline import last_tensor
from nolocod.trainer.source import open_source
from tests.support.base_model import RUN_FILE, publish
from tests.support.chat_templates import SPECIAL, plain
from tests.support.swarm import ready
from tests.support.trainer_parts import setup_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.swarm import Swarm

ADAPTER = '[adapter]\nkind = "lora"\nrank = 128\nalpha = 128.0\ntargets = ["q_proj", "o_proj", "up_proj", "down_proj"]\n'
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
SIZE = 2 * 2 * 128 * (256 + 256 + 256 + 512)
"""Of the adapter, over two layers: matrices for q and o, up and down."""
LEAN = 150e6


def test_three_daemons_teach_a_model_to_answer(swarm: Swarm, tmp_path: Path) -> None:
    from peft import PeftModel  # takes in bitsandbytes, and with that a compiler: six seconds of each process of ./test

    base = publish(tmp_path / "base", template=plain("chatml"), special=SPECIAL, **WIDE)
    chats = [[{"role": "user", "content": f"tide {n % 7}"}, {"role": "assistant", "content": "no node"}] for n in range(200)]
    chats += [[{"role": "user", "content": "wait " * 80}, {"role": "assistant", "content": "for no node"}]]
    (swarm.data / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    run_file = RUN_FILE.format(base=base).replace("1e-4", "2e-3").replace("sequence = 32", "sequence = 64")
    run_file = run_file.replace('"text"', '"jsonl"\nkind = "chat"\nheld_out = 0.2')
    swarm.rests = ()  # it is a larger model, and there is much to learn
    first = swarm.daemon()
    (tmp_path / "run.toml").write_text(run_file + ADAPTER)
    create = ["-m", "nolocod", "create", str(tmp_path / "run.toml"), "--data-dir", str(first.paths.root)]
    subprocess.run([sys.executable, *create], capture_output=True, check=True)
    first.run("start")
    swarm.wait("the first node tells its address", lambda: ready(first))
    everybody = [first, *(swarm.daemon().run("join", "--bootstrap", first.address) for _ in range(2))]
    for _ in range(3):  # of a node, the first have up to two bytes, as long as it learns fast
        swarm.wait_paired(everybody, 3)
    sent = []
    for daemon in everybody:
        report = daemon.report
        assert report is not None
        # The loss falls from 16 to 4 in three seconds. Who comes then may be given what a donor had before, and ask another.
        assert {error.code for error in report.errors} <= {HarmfulTensorError.entry.code, FarWeightsError.entry.code}
        sent += [row.sent / SIZE for row in report.exchanges if row.outcome == "committed"]
        assert psutil.Process(daemon.running.pid).memory_info().rss < LEAN
    assert 1 < median(sent) < 1.25, "a byte of each value, and once more of what could not be decoded: each matrix is 0.05"
    assert max(sent) < 2.03, "two at first, and of matrices that could not be decoded"
    swarm.stop(*everybody)
    assert "of 201 samples 1 are left out, and 1 are cut" in everybody[1].tail(1000)
    sealed = stored_manifest(first.paths)
    assert sealed is not None
    folders = [daemon.paths.checkpoints for daemon in everybody]
    assert last_tensor(folders[0], sealed, "phi").numel() == SIZE
    averaged = offline.averaged_loss(sealed, folders, swarm.data, tmp_path / "cache", first.paths.base)
    setup = setup_for(sealed, tmp_path, data=swarm.data, cache=tmp_path / "cache", base=first.paths.base)
    before, _ = offline.train_alone(setup, 0)
    assert averaged < 0.7 * before, f"at first {before:.3f}, the mean of the three {averaged:.3f}"
    offline.export(first.paths, sealed, tmp_path / "out")
    own = offline.evaluate(first.paths, sealed, swarm.data)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "out").eval()
    source = open_source(sealed.manifest, make_tokenizer(sealed.manifest.data, base), "", swarm.data, tmp_path / "cache")
    loaded = mean_loss(model, source.held_out(4), 2, torch.device("cpu"), objective_of(sealed.manifest, model))
    assert abs(loaded - own) < 1e-4
    offline.export(first.paths, sealed, tmp_path / "whole", merged=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    asked = tokenizer.apply_chat_template(chats[0][:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\ntide 0<|im_end|>\n<|im_start|>assistant\n"
