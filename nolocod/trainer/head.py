"""The last layer of a language model, and the loss of what it says, without all logits at once.

The rule: rows of hidden states are taken a few at a time, and their gradients computed with their loss, so that no more than
`CHUNK` bytes of logits (rows x vocabulary) are there. It is the loss of whole ones, to rounding. torch's own
`linear_cross_entropy` does so since 2.13, but its loss is in bfloat16 where it computes in that.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

CHUNK = 1 << 28
"""Bytes of logits in float32. Fewer rows would make it dearer to add up what they give the layer's gradient."""
_FLOAT16_ROWS, _FLOAT16_TIMES = 256, 32
"""A probability times so much is finer in it."""


class _Output:
    """What a model without its head may give: hidden states, and nothing else that is asked for."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: object) -> object:
        return self._hidden if index == 0 else ()


@contextmanager
def _replaced(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward  # of this object alone
    try:
        yield
    finally:
        del module.forward


def plain_head(model: Any) -> torch.nn.Linear | None:  # noqa: ANN401 - transformers has no common typed base
    """The layer whose output `model` gives as its logits; None where that is changed afterwards (a cap, a factor), or nobody
    knows. Nothing is computed."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return None
    hidden, logits = (torch.empty(1, 2, size, device=head.weight.device) for size in (head.in_features, head.out_features))
    ids = torch.zeros(1, 2, dtype=torch.int64, device=head.weight.device)
    body = _replaced(model.base_model, lambda *_, **__: _Output(hidden))
    # a model that asks its own body for more has whole logits, and one that computes where there are no values (meta)
    with suppress(AttributeError, TypeError, ValueError, RuntimeError), body, _replaced(head, lambda _: logits):
        if model(input_ids=ids).logits is logits:
            return head
    return None


@contextmanager
def losing(head: torch.nn.Linear, rows: Tensor | None, ids: Tensor) -> Iterator[None]:
    """What the model gives as its logits is the mean loss of `ids`, after the hidden states at `rows`; None for all."""

    def loss(hidden: Tensor) -> Tensor:
        states = hidden.flatten(0, -2)
        states = states if rows is None else states[rows]
        found: Tensor = _Loss.apply(states, head.weight, head.bias, ids, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return found

    with _replaced(head, loss):
        yield


class _Loss(torch.autograd.Function):
    """The mean cross entropy in nats of `ids` after `hidden` states (rows x width), by a layer's weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch leaves it untyped
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        learns: bool,
    ) -> Tensor:
        device = hidden.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        layer, added = weight.to(kind), None if bias is None else bias.to(kind)
        given, total = (hidden, weight, bias), torch.zeros((), device=hidden.device)
        wanted = [learns and need for need in ctx.needs_input_grad[:3]]
        found = [
            torch.zeros_like(one, dtype=torch.float32) if one is not None and want else None
            for one, want in zip(given, wanted, strict=True)
        ]
        by_states, by_weight, by_bias = found
        at_once = max(1, CHUNK // (4 * len(weight)))
        times = 1
        if kind == torch.float16:  # whose sums over more rows may be too large for it
            at_once, times = min(at_once, _FLOAT16_ROWS), _FLOAT16_TIMES
        for start in range(0, len(ids), at_once):
            rows = slice(start, start + at_once)
            states, said = hidden[rows].to(kind), ids[rows, None]
            with torch.autocast(device, enabled=False):
                logits = functional.linear(states, layer, added).float()
                logits -= logits.amax(1, keepdim=True)
                true = logits.gather(1, said)
                sums = logits.exp_().sum(1, keepdim=True)
                total += (sums.log() - true).sum()
                if not any(wanted):
                    continue
                wrong = logits.div_(sums).scatter_add_(1, said, torch.full_like(sums, -1))
                if by_bias is not None:
                    by_bias += wrong.sum(0)
                wrong = wrong.mul_(times).to(kind)
                if by_states is not None:
                    by_states[rows] = wrong @ layer
                if by_weight is not None and kind == by_weight.dtype:
                    by_weight.addmm_(wrong.mT, states)
                elif by_weight is not None:
                    by_weight += wrong.mT @ states
        for one in found[:2] if times > 1 else ():
            if one is not None:
                one /= times
        ctx.found, ctx.kinds, ctx.count = found, [None if one is None else one.dtype for one in given], len(ids)
        return total / len(ids)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - as above
        found, ctx.found = ctx.found, ()  # else autograd would copy them
        scale = upstream / ctx.count
        return (
            *(None if one is None else one.mul_(scale).to(kind) for one, kind in zip(found, ctx.kinds, strict=True)),
            None,
            None,
        )
