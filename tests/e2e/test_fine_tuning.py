"""Two daemons fine-tune a published model on chats, each on files of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from nolocod import cli
from nolocod.run.manifest import stored_manifest
from nolocod.trainer import offline
from nolocod.trainer.replica import open_replica
from tests.support.base_model import RUN_FILE, publish
from tests.support.chat_templates import SPECIAL, plain
from tests.support.swarm import ready

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.swarm import Swarm


def test_two_daemons_learn_to_answer(swarm: Swarm, tmp_path: Path) -> None:
    base = publish(tmp_path / "base", template=plain("chatml"), special=SPECIAL)
    chats = [[{"role": "user", "content": f"tide {n % 7}"}, {"role": "assistant", "content": "no node"}] for n in range(200)]
    chats += [[{"role": "user", "content": "wait " * 80}, {"role": "assistant", "content": "for no node"}]]
    lines = [json.dumps({"messages": one}) + "\n" for one in chats]
    (swarm.data / "chats.jsonl").write_text("".join(lines))
    text = RUN_FILE.format(base=base).replace('"text"', '"jsonl"\nkind = "chat"\nheld_out = 0.2')
    (tmp_path / "run.toml").write_text(text.replace("sequence = 32", "sequence = 64").replace("1e-4", "1e-3"))
    first = swarm.daemon()
    cli.main(["create", str(tmp_path / "run.toml"), "--data-dir", str(first.paths.root)])
    first.run("start")
    swarm.wait("the first node tells its address", lambda: ready(first))
    second = swarm.daemon().run("join", "--bootstrap", first.address, "--base", str(base))
    swarm.wait_paired([first, second], 2)
    swarm.stop(first, second)
    assert "of 201 samples 1 are left out, and 1 are cut" in second.tail(1000)
    sealed = stored_manifest(second.paths)
    assert sealed is not None
    before = open_replica(sealed, "", swarm.data, second.paths.cache, base=base).evaluate()
    assert offline.evaluate(second.paths, sealed, swarm.data) < 0.7 * before
    offline.export(second.paths, sealed, tmp_path / "out")
    asked = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        chats[0][:1], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\ntide 0<|im_end|>\n<|im_start|>assistant\n"
