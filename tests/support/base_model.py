"""A tiny model as it is published: a configuration, a tokenizer with a template, and weights in safetensors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

TEXT = " ".join(f"time and tide wait for no node number {number * number % 97}" for number in range(400))
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
    "rope_theta": 500000.0,
    "transformers_version": "4.45.0",
}
RUN_FILE = """
name = "further"
[model]
base = "{base}"
[data]
source = "text"
[inner]
optimizer = "adamw"
steps = 10
batch = 2
sequence = 32
learning_rate = 1e-4
[outer]
patience = 5.0
turns = 1
staleness = 5000
[evaluation]
batches = 2
"""


def publish(
    folder: Path, *, sharded: bool = False, template: str = "{{ messages }}", special: tuple[str, ...] = (), **changes: int
) -> Path:
    """Write it to `folder`, in bfloat16, a little trained; in several files if it is to be `sharded`. `template` and `special`
    are the tokenizer's; `changes` replace keys of its configuration."""
    config = CONFIG | changes
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "model_max_length": 64}
    about |= {"bos_token": special[0], "eos_token": special[1]} if special else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "README.md").write_text("not a part of it")
    model = _trained(torch.tensor(tokenizer.encode(TEXT).ids), config)
    model.to(torch.bfloat16).save_pretrained(folder, **({"max_shard_size": "20KB"} if sharded else {}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _trained(ids: torch.Tensor, config: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        model.float()  # in bfloat16, as it is configured, a step takes a processor ten times as long
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            starts = torch.randint(0, len(ids) - 33, (8,))
            batch = torch.stack([ids[start : start + 33] for start in starts.tolist()])
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model
