"""What inner steps make small: the next token's loss on text, that of answers alone, or DPO's on pairs of answers.

The rule: an objective is a mean over what it counts (windows of text, tokens that are learnt, pairs), so that windows computed
in parts have the same mean. A document sees none of those before it in its window: positions begin anew with each, by which
`transformers` keeps them apart in attention; a model that does not is given each document by itself.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import masking_utils

from nolocod.errors import UnsupportedModelError
from nolocod.trainer.bus import sent
from nolocod.trainer.head import losing, plain_head
from nolocod.trainer.samples import BEGIN, ID, LEARNT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nolocod.run.manifest import Manifest

_APART = 1e-5
"""Of the largest logit: how far the logits of a document may be from those that it has alone."""


_packed: ContextVar[bool | None] = ContextVar("packed", default=None)
_asks: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices


class Objective(Protocol):
    """Windows are int64, count x (sequence + 1), in main memory."""

    def weight(self, windows: Tensor) -> int:
        """How much these count in a mean over more."""
        ...

    def loss(self, model: torch.nn.Module, windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The mean loss, and with what a mixture of experts adds to it."""
        ...


def cross_entropy(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """Mean next-token loss in nats of `windows` (int64, batch x (sequence + 1)), by whole logits."""
    return functional.cross_entropy(model(input_ids=windows[:, :-1]).logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def _mean(
    model: torch.nn.Module, head: torch.nn.Linear | None, rows: Tensor | None, ids: Tensor, **given: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean loss of `ids`, which the logits at `rows` say (None: all), and with what a mixture of experts adds to it so that
    all get tokens. `head`: the model's, if it is a plain one."""
    if head is not None:
        with losing(head, rows, ids):
            loss, added = _run(model, **given)
    else:
        logits, added = _run(model, **given)
        logits = logits.flatten(0, 1)
        loss = functional.cross_entropy((logits if rows is None else logits[rows]).float(), ids)
    return loss, loss if added is None else loss + added


def _is_taken(name: str, model: torch.nn.Module) -> bool:
    return name in inspect.signature(model.forward).parameters


def _parted(positions: Tensor) -> Tensor:
    """By number, in which document of its row each token is."""
    return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def _documents(positions: Tensor) -> Tensor | None:
    """In place of what transformers asks the device, and waits for: whether rows hold several documents. We know."""
    packed = _packed.get()
    if packed is None:
        return _asks(positions)
    return _parted(positions) if packed else None


@contextmanager
def _knowing(*, packed: bool) -> Iterator[None]:
    """That rows of what is computed hold several documents, or do not."""
    known = _packed.set(packed)
    try:
        yield
    finally:
        _packed.reset(known)


def _run(model: torch.nn.Module, **given: Tensor) -> tuple[Tensor, Tensor | None]:
    """The logits, and what a mixture of experts adds to the loss (arXiv 2101.03961, Eq. 4), times the configuration's
    `router_aux_loss_coef`; None of models without that."""
    share = getattr(model.config, "router_aux_loss_coef", None)
    asked = {"output_router_logits": True} if share and _is_taken("output_router_logits", model) else {}
    with _knowing(packed="position_ids" in given):
        output = model(**given, **asked)
    if not asked:
        return output.logits, None
    return output.logits, None if output.aux_loss is None else share * output.aux_loss


class NextToken:
    """Every token of a text, with all before it in its window."""

    def __init__(self, head: torch.nn.Linear | None = None) -> None:
        """`head`: the model's, if it is a plain one (head.py)."""
        self._head = head

    def weight(self, windows: Tensor) -> int:
        return len(windows)

    def loss(self, model: torch.nn.Module, windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        windows = sent(windows, device)
        return _mean(model, self._head, None, windows[:, 1:].flatten(), input_ids=windows[:, :-1])


@dataclass(frozen=True)
class _Batch:
    """Windows of samples as a model takes them, and the tokens that are learnt, one after another."""

    given: dict[str, Tensor]
    """Input ids and, where documents share a row, their positions."""
    places: Tensor
    """Whose logits, of all rows one behind another, say the token that is learnt ..."""
    ids: Tensor
    """... and which it is ..."""
    documents: Tensor
    """... and in which document, of those with such tokens ..."""
    answers: int
    """... which are so many."""


def _batch(windows: Tensor, device: torch.device, *, packed: bool) -> _Batch:
    if not packed:
        flat = windows.flatten()
        ends = [*(flat & BEGIN).nonzero().flatten().tolist(), len(flat)]
        parts = [flat[start:end] for start, end in pairwise(ends)]
        windows = pad_sequence([part for part in parts if (part & LEARNT).any()], batch_first=True)
    begins, ids = windows & BEGIN != 0, windows & ID
    here = torch.arange(windows.shape[1]).expand_as(windows)
    positions = here - torch.where(begins, here, 0).cummax(1).values
    learnt = (windows & LEARNT != 0)[:, 1:].flatten()
    _, documents = torch.unique(begins.flatten().cumsum(0).view_as(windows)[:, 1:].flatten()[learnt], return_inverse=True)
    given = {"input_ids": ids[:, :-1].contiguous()} | ({"position_ids": positions[:, :-1].contiguous()} if packed else {})
    found = learnt.nonzero().flatten(), ids[:, 1:].flatten()[learnt], documents
    places, learnt_ids, among = (sent(one, device) for one in found)
    there = {name: sent(one, device) for name, one in given.items()}
    return _Batch(there, places, learnt_ids, among, len(documents.unique()))


class Answers:
    """The tokens that are marked as learnt, each with those before it in its document."""

    def __init__(self, head: torch.nn.Linear | None = None, *, packed: bool) -> None:
        self._head = head
        self._packed = packed

    def weight(self, windows: Tensor) -> int:
        return int((windows & LEARNT != 0).sum())

    def loss(self, model: torch.nn.Module, windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        batch = _batch(windows, device, packed=self._packed)
        return _mean(model, self._head, batch.places, batch.ids, **batch.given)


class Preferences:
    """Direct preference optimisation (arXiv 2305.18290, Eq. 7): -log sigma(beta (log-ratio of the chosen answer - log-ratio of
    the rejected one)), the ratio being that of the answer's probabilities by the model and by `reference`, which stays."""

    def __init__(self, reference: torch.nn.Module, beta: float, *, packed: bool) -> None:
        self._reference = reference
        self._beta = beta
        self._packed = packed

    def weight(self, windows: Tensor) -> int:
        learnt, began = windows & LEARNT != 0, (windows & BEGIN != 0).flatten().cumsum(0).view_as(windows)
        return len(torch.unique(began[learnt])) // 2

    def loss(self, model: torch.nn.Module, windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        batch = _batch(windows, device, packed=self._packed)
        own, added = self._likelihoods(model, batch)
        with torch.no_grad():
            first, _ = self._likelihoods(self._reference, batch)
        chosen, rejected = (own - first).view(-1, 2).unbind(1)
        loss = -functional.logsigmoid(self._beta * (chosen - rejected)).mean()
        return loss, loss if added is None else loss + added

    def _likelihoods(self, model: torch.nn.Module, batch: _Batch) -> tuple[Tensor, Tensor | None]:
        """The logarithm of each answer's probability."""
        logits, added = _run(model, **batch.given)
        each = -functional.cross_entropy(logits.flatten(0, 1)[batch.places].float(), batch.ids, reduction="none")
        answers = each.new_zeros(batch.answers)
        return answers.index_add(0, batch.documents, each), added


def objective_of(manifest: Manifest, model: torch.nn.Module) -> Objective:
    """What the run makes small. `model` has its first weights, which are the reference of preferences: a copy is kept."""
    masking_utils.find_packed_sequence_indices = _documents
    if not manifest.data.isolates:
        return NextToken(plain_head(model))
    packed = keeps_apart(model)
    if manifest.data.kind == "text" and not packed:  # one by one, they would be rows as long as the longest
        cause = f"a {manifest.model['model_type']} does not isolate documents that share a window."
        raise UnsupportedModelError(cause, remedy='Say `documents = "apart"` in the run file, or choose another model.')
    if manifest.data.kind == "preference":
        frozen = {id(one): one for one in model.parameters() if not one.requires_grad}  # beside an adapter: no second base
        reference = copy.deepcopy(model, frozen).eval().requires_grad_(False)
        return Preferences(reference, manifest.data.beta, packed=packed)
    return Answers(plain_head(model), packed=packed)


@torch.no_grad()
def keeps_apart(model: Any) -> bool:  # noqa: ANN401 - transformers has no common typed base
    """Whether positions that begin anew keep a document from those before it in its row: tried on eight tokens."""
    if not _is_taken("position_ids", model):
        return False
    device, was_training = next(model.parameters()).device, model.training
    ids = torch.arange(8, device=device)[None] % model.config.vocab_size
    model.eval()
    both = model(input_ids=ids, position_ids=torch.arange(8, device=device)[None] % 4).logits[:, 4:]
    alone = model(input_ids=ids[:, 4:], position_ids=torch.arange(4, device=device)[None]).logits
    model.train(was_training)
    return bool((both - alone).abs().max() <= _APART * alone.abs().max())
