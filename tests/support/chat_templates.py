"""Chat templates in the manner of published ones, and where the assistant's answers are in them, marked by hand."""

from __future__ import annotations

SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
)
"""The first two are those that begin and end a text."""

_CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}
{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_LLAMA3 = """\
{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}{% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}
{{- message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
_TRIMS = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate!') }}{% endif %}{% if message['role'] == 'user' %}
{{- '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' -}}
{% generation %}{{ message['content'].strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}
"""
_THINKS = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}
{% generation %}{% if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message['content'].split('</think>')[-1].lstrip('\\n') + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}
{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
MARKED = {"chatml": _CHATML, "llama3": _LLAMA3, "trims": _TRIMS, "thinks": _THINKS}
"""The third trims and knows nothing of asking, as those of Llama 2 and Mistral. In the fourth, as in Qwen 3's, the last answer
has a place for thoughts, and those before it lose theirs."""


def plain(name: str) -> str:
    """The template as it is published, without marks."""
    return MARKED[name].replace("{% generation %}", "").replace("{% endgeneration %}", "")
