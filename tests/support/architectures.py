"""One tiny run of each architecture: from its run file to what `from_pretrained` loads.

`CASES` are those that docs/architectures.md names; `REFUSED` those that `create` refuses, with what it says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from nolocod.paths import DataDir
from nolocod.run.data import Data
from nolocod.run.manifest import Evaluation, Inner, Outer, seal
from nolocod.trainer import checkpoint, founding, offline
from nolocod.trainer.inner import mean_loss
from tests.support.trainer_parts import OWNER, make_replica, save

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Sealed
    from nolocod.trainer.replica import Replica

_DENSE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}

CASES: dict[str, dict[str, Any]] = {
    "llama": _DENSE | {"tie_word_embeddings": True, "rope_theta": 5e5},
    "mistral": _DENSE | {"sliding_window": 16},
    "qwen2": {key: value for key, value in _DENSE.items() if key != "head_dim"},
    "qwen3": _DENSE,
    "gemma": _DENSE,
    "gemma2": _DENSE | {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": _DENSE | {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gpt2": _GPT,
    "gpt_neox": {key: value for key, value in _DENSE.items() if key not in ("head_dim", "num_key_value_heads")},
    "phi3": {key: value for key, value in _DENSE.items() if key != "head_dim"} | {"pad_token_id": 0},
    "olmo2": {key: value for key, value in _DENSE.items() if key != "head_dim"} | {"pad_token_id": 0},
    "smollm3": _DENSE | {"pad_token_id": 0},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mixtral": _DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": _DENSE | _EXPERTS | {"num_experts": 8},
    "gpt_oss": _DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v3": {key: value for key, value in _DENSE.items() if key != "head_dim"}
    | _EXPERTS
    | {"num_key_value_heads": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "chunk_size": 16}
    | {"n_groups": 1},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2},
}
"""By `model_type`: with tied embeddings, buffers, sliding windows, dropout, experts, and states in place of attention."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}, "not causal"),
    "roberta": ({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}, "not causal"),
    "xlnet": ({"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64}, "not causal"),
    "t5": ({"d_model": 32, "num_layers": 1, "num_heads": 2}, "no causal language model"),
    "vit": ({}, "not a language model"),
    "gemma3": ({}, "not a language model"),
}
"""By `model_type`, and why."""


@dataclass(frozen=True)
class Life:
    """What came of one run. `resumed`: a node that was started again had the same weights as one that was not, to the bit.
    `exported`: by how much the loss of what was exported and loaded differs from the run's."""

    parameters: int
    before: float
    after: float
    resumed: bool
    exported: float


def run_file(folder: Path, model_type: str, model: dict[str, Any]) -> Path:
    """A run of this model; its configuration in a file of its own, as published ones are."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | model))
    path = folder / "run.toml"
    path.write_text('name = "tiny"\n[model]\nconfig = "config.json"\n')
    return path


def live(folder: Path, model_type: str, model: dict[str, Any]) -> Life:
    """Create a run, train two nodes, have them exchange, resume one, export it, load it."""
    manifest = msgspec.structs.replace(
        founding.read(run_file(folder, model_type, model))[0],
        data=Data(source="text"),
        inner=Inner(steps=4, batch=2, sequence=32, learning_rate=3e-3),
        outer=Outer(),
        evaluation=Evaluation(batches=2),
    )
    sealed = seal(manifest, OWNER)
    alice, bob = (make_replica(sealed, folder, name) for name in ("alice", "bob"))
    before = alice.evaluate()
    _train(alice, 8)
    _train(bob, 8)
    exchange(alice, bob)
    paths = DataDir(folder)
    save(alice, paths.checkpoints, "alice")
    again = _resumed(sealed, folder)
    for one in (alice, again):
        _train(one, 2)
    same = all(torch.equal(getattr(alice, name), getattr(again, name)) for name in ("theta", "phi", "delta"))
    _require_causal(again)
    offline.export(paths, sealed, folder / "out")
    return Life(alice.layout.size, before, alice.evaluate(), same, _difference(again, sealed, folder))


def _train(replica: Replica, steps: int) -> None:
    torch.manual_seed(7)  # of this process, which has both nodes; dropout draws from it
    for _ in range(steps):
        replica.step()
    replica.report()


def exchange(alice: Replica, bob: Replica) -> None:
    """About the whole model, in this process."""
    boxes = [torch.zeros(alice.plan.box_size, dtype=torch.uint8) for _ in range(2)]
    for replica, box in zip((alice, bob), boxes, strict=True):
        replica.prepare(box, 0)
    for replica, box in zip((alice, bob), reversed(boxes), strict=True):
        replica.inspect(box)
        replica.apply(box, 0)


def _resumed(sealed: Sealed, folder: Path) -> Replica:
    replica = make_replica(sealed, folder, "alice")
    found = checkpoint.find(DataDir(folder).checkpoints, sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    replica.restore(found.path, found.state)
    return replica


def _require_causal(replica: Replica) -> None:
    """What comes later changes nothing of what was said before: `founding` goes by what an architecture tells of itself."""
    one = torch.arange(32)[None] % 256
    other = one.clone()
    other[0, 16:] += 1
    with torch.no_grad():
        said = [replica.model.eval()(input_ids=ids).logits[0, :16] for ids in (one, other)]
    replica.model.train()
    assert torch.allclose(said[0], said[1], atol=1e-5)


def _difference(replica: Replica, sealed: Sealed, folder: Path) -> float:
    """Between the losses of the run's slow weights and of the exported model, on the same held-out text."""
    model = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).eval()
    windows = replica.source.held_out(4)
    replica.theta.copy_(replica.phi)
    replica.model.eval()
    own, exported = (mean_loss(one, windows, 4, torch.device("cpu")) for one in (replica.model, model))
    return abs(own - exported)
