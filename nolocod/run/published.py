"""What a published config.json holds beside what its model is made of.

The rule: a key that means nothing to training is left out of the run, and whoever creates it is told so, by name. What would
have code fetched, or weights that are no plain numbers, is refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nolocod.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

_ABOUT_THE_FILE = (
    *("_name_or_path", "name_or_path", "_commit_hash", "architectures", "transformers_version", "transformers.js_config"),
    *("auto_map", "custom_pipelines", "unsloth_version", "unsloth_fixed", "is_llama_config", "model_max_length"),
)
"""Who wrote it, from where, and what code other programs should load: none is loaded here."""
_ABOUT_THE_NODE = (
    *("dtype", "torch_dtype", "use_cache", "use_bfloat16", "attn_implementation", "_attn_implementation"),
    *("_attn_implementation_autoset", "_flash_attn_2_enabled", "_experts_implementation", "experts_implementation"),
    *("cache_implementation", "gradient_checkpointing", "torchscript", "return_dict", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "chunk_size_feed_forward"),
)
"""The same for all runs, or each node's choice."""
_ABOUT_OTHER_TASKS = (
    *("task_specific_params", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "tokenizer_class"),
    *("prefix", "bad_words_ids", "tf_legacy_loss"),
)
_INERT = frozenset((*_ABOUT_THE_FILE, *_ABOUT_THE_NODE, *_ABOUT_OTHER_TASKS))

_REFUSED = {
    "trust_remote_code": "no code comes with a model here",
    "quantization_config": "quantized weights cannot be trained",
    "use_kernels": "it has code fetched",
    "kernel_config": "it has code fetched",
}

_ABOUT_DRAWING_TEXT = frozenset(
    (
        *("do_sample", "max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences", "temperature"),
        *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty", "early_stopping"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "sep_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "output_scores"),
        *("return_dict_in_generate", "suppress_tokens", "begin_suppress_tokens"),
    )
)
_SAID_ELSEWHERE = frozenset(("hidden_act", "max_window_layers", "n_ctx", "original_max_position_embeddings"))
"""Another key says it too, which the architecture reads."""
_INERT_AT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "tie_encoder_decoder", "is_decoder"), (False,)),
    **dict.fromkeys(("attention_bias", "rope_interleaved", "use_mrope", "use_sliding_window"), (False,)),
    **dict.fromkeys(("cross_attention_hidden_size", "sliding_window", "rope_scaling"), (None,)),
    "pruned_heads": ({}, None),
    "pretraining_tp": (1,),
}
"""What these values switch off is off."""


def without_inert(model: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """What of `model` a run may keep; `tell` gets one line for each key that is left out.

    Raises UnsupportedModelError, which names the key.
    """
    kept = {}
    for key, value in model.items():
        if key in _REFUSED and value not in (None, False):
            raise UnsupportedModelError(f"`model.{key}` is set: {_REFUSED[key]}.")
        if key in _INERT or key in _REFUSED or (key == "time_step_limit" and _is_unbounded(value)):
            tell(_line(key))
        elif not _is_finite(value):
            raise UnsupportedModelError(f"`model.{key}` holds a number that is not finite.")
        else:
            kept[key] = value
    return kept


def is_inert(key: str, value: object) -> bool:
    """Whether a key that the architecture does not know means nothing to it."""
    return key in _ABOUT_DRAWING_TEXT | _SAID_ELSEWHERE or value in _INERT_AT.get(key, ())


def without_unknown(model: dict[str, Any], known: set[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """The same for an architecture that knows the keys `known`; unknown ones that may mean something stay."""
    left_out = {key for key, value in model.items() if key not in known and is_inert(key, value)}
    for key in sorted(left_out):
        tell(_line(key))
    return {key: value for key, value in model.items() if key not in left_out}


def _line(key: str) -> str:
    return f"`model.{key}` is left out: it means nothing to training."


def _is_unbounded(value: object) -> bool:
    """Whether it is the span from 0 to infinity, which an architecture of that key has anyway, and JSON has no number for."""
    return isinstance(value, list) and value[:1] in ([0.0], [0]) and len(value) == 2 and not _is_finite(value[1])


def _is_finite(value: object) -> bool:
    """Whether all numbers in it are, as JSON has them or as transformers writes the others."""
    match value:
        case float():
            return math.isfinite(value)
        case dict():
            return "__float__" not in value and all(map(_is_finite, value.values()))
        case list():
            return all(map(_is_finite, value))
    return True
