"""Writes docs/architectures.md: one tiny run of each architecture, from its run file to what `from_pretrained` loads.

python -m tools.architectures
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import transformers

from tests.support.architectures import CASES, REFUSED, Life, live

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architectures.md"
_HEAD = """\
# Architectures

Made by `python -m tools.architectures` with transformers {version}; do not edit. `tests/trainer/test_architectures.py`
runs the same.

`model_type` names an architecture of `transformers` that predicts the next token. Each of these went through a whole
run with a tiny configuration: `create`, inner steps on two nodes, an exchange with `modulo8`, a checkpoint, `export`,
`from_pretrained`. *Resumed*: a node that was started again had the same weights as one that was not, to the bit.
*Exported*: by how much the loss of the exported model differs from the run's, in nats per token. The loss is held out,
before and after ten inner steps. Others that `transformers` knows may work too: `create` looks at them in the same way.

| `model_type` | parameters | loss | resumed | exported |
|---|---|---|---|---|
"""
_REFUSED = """
`create` refuses what no node could train, by name:

| `model_type` | why |
|---|---|
"""
_TAIL = """
A mixture of experts is trained with the loss that balances its experts, times its `router_aux_loss_coef`; losses that
are told do not hold it. Every node sees some experts less than others: what no token reached has a gradient of zero.

## A published config.json

`config` in `[model]` names one; keys beside it count before the file's:

    [model]
    config = "Llama-3.2-1B/config.json"
    num_hidden_layers = 8

`create` tells each key that it leaves out because it means nothing to training: who wrote the file, what code other
programs should load (`auto_map`), how text is drawn, what each node chooses for itself (`torch_dtype`,
`attn_implementation`). It refuses `trust_remote_code`, quantized weights, and keys that the architecture does not know.
"""


def row(model_type: str, life: Life) -> str:
    resumed = "exactly" if life.resumed else "**differs**"
    loss = f"{life.before:.2f} → {life.after:.2f}"
    return f"| `{model_type}` | {life.parameters:,} | {loss} | {resumed} | {life.exported:.0e} |"


def main() -> None:
    rows = []
    for model_type, model in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(model_type, live(Path(folder), model_type, model)))
    refused = [f"| `{model_type}` | {why} |" for model_type, (_, why) in REFUSED.items()]
    page = (
        _HEAD.format(version=transformers.__version__) + "\n".join(rows) + "\n" + _REFUSED + "\n".join(refused) + "\n" + _TAIL
    )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
