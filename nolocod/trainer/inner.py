"""One inner step of NorMuon and AdamW, or of AdamW alone, with clipping, on one replica. The loop of them is in worker.py.

The rule: a step talks to nobody. It reads no value back from the device per step; the loss and the
count of steps that were not finite are kept there and read when a report is due.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nolocod.errors import ModelTooLargeError, TrainerError
from nolocod.trainer.adapter import trained
from nolocod.trainer.loss_scale import LossScale
from nolocod.trainer.model import fast_kind, matrices_of, step_kind
from nolocod.trainer.muon import Muon
from nolocod.trainer.objective import NextToken
from nolocod.trainer.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.objective import Objective

_PATIENCE = 10
"""Steps in a row without a finite gradient before training is given up."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM, SQUARES = "momentum", "squares"
OF_MATRICES = (_MOMENTUM, SQUARES)
KINDS = (*_MOMENTS, *OF_MATRICES)
"""Of the optimizers' state: of what AdamW trains, and of matrices that NorMuon does."""
LOSS_SCALE = "loss_scale"
"""Beside it, in a checkpoint."""
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says where it has no class for it."""
_FLOOR = 0.1
"""The cosine decays to this share of the peak (arXiv 2506.10911, section 4)."""


def learning_rate(manifest: Manifest, round_number: int, steps_since_outer: int) -> float:
    """The learning rate of the next inner step.

    The position is counted in rounds, not in steps of this node, so that a newcomer inherits it with its
    donor's round; past as many boundaries as one outer step can be about it stands still.
    """
    inner, goal = manifest.inner, manifest.outer.rounds
    position = round_number * inner.steps + min(manifest.outer.turns * inner.steps, steps_since_outer)
    warmup = inner.warmup_rounds * inner.steps
    if position < warmup:
        return inner.learning_rate * min(1.0, (position + 1) / warmup)
    if goal == 0 or inner.schedule == "constant":
        return inner.learning_rate
    end = goal * inner.steps
    if inner.schedule == "wsd":  # never 0: whoever waits at the last boundary goes on at the last step's rate
        return inner.learning_rate * min(1.0, max(1.0, end - position) / (inner.decay * end))
    done = min(1.0, (position - warmup) / (end - warmup)) if end > warmup else 1.0
    return inner.learning_rate * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def recent_rate(manifest: Manifest, round_number: int, steps_since_outer: int) -> float:
    """What the distance between replicas follows: the learning rate halfway through this phase, or two outer steps of the whole
    model before if that was higher. What parted them then is not all merged yet, and "wsd" ends near 0."""
    half, before = steps_since_outer // 2, max(0, round_number - 2 * manifest.outer.turns)
    return max(learning_rate(manifest, one, half) for one in (before, round_number))


def make_adamw(parameters: Sequence[Tensor], manifest: Manifest, device: torch.device) -> torch.optim.AdamW:
    """AdamW as the manifest says; weight decay on matrices only. One kernel per step where torch has it."""
    inner = manifest.inner
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=inner.learning_rate, betas=(inner.beta1, inner.beta2), fused=fused)


def autocast(device: torch.device, kind: torch.dtype | None = None) -> contextlib.AbstractContextManager[Any]:
    """Multiply in `kind`, or in bfloat16 where a card has it; weights and optimizer stay float32."""
    if kind is None:
        kind = fast_kind(device) if device.type == "cuda" else torch.float32
    return contextlib.nullcontext() if kind == torch.float32 else torch.autocast(device.type, kind)


def pieces(windows: Tensor, batch: int, idle: int = 0) -> Iterator[tuple[Tensor, bool]]:
    """`windows`, `batch` of them at once, and whether they count. The last `idle` ones do not: shards are computed with by all
    devices at once, so whoever has less to compute goes along with those who have more."""
    counting = len(windows) - idle
    yield from ((windows[start : min(start + batch, counting)], True) for start in range(0, counting, batch))
    yield from ((windows[one : one + 1], False) for one in range(counting, len(windows)))


@torch.no_grad()
def sum_losses(
    model: torch.nn.Module, windows: Tensor, batch: int, device: torch.device, objective: Objective, idle: int = 0
) -> tuple[float, int]:
    """The sum of losses over all `windows` (count x (sequence + 1)), `batch` of them at once, and how much they count."""
    total, weight = 0.0, 0
    for part, counts in pieces(windows, batch, idle):
        with autocast(device):
            loss, _ = objective.loss(model, part, device)
        share = objective.weight(part) if counts else 0
        total, weight = total + loss.item() * share, weight + share
    return total, weight


def mean_loss(
    model: torch.nn.Module, windows: NDArray[np.int64], batch: int, device: torch.device, objective: Objective | None = None
) -> float:
    """The next token's without an objective."""
    total, weight = sum_losses(model, torch.from_numpy(windows), batch, device, objective or NextToken())
    return total / weight


def is_out_of_memory(error: Exception) -> bool:
    """Whether a computation failed for want of memory, on whatever device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(one in str(error) for one in _OUT_OF_MEMORY)


def halved(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1


class Steps(Protocol):
    """Whoever takes the inner steps, as reports and checkpoints know it."""

    at_once: int

    @property
    def optimizer_steps(self) -> int: ...
    def report(self) -> float: ...
    def moments(self) -> dict[str, Tensor]: ...
    def restore(self, moments: Mapping[str, Tensor], steps: int) -> None: ...


class Inner:
    """Takes inner steps on `model`."""

    def __init__(
        self, model: torch.nn.Module, manifest: Manifest, device: torch.device, at_once: int, objective: Objective
    ) -> None:
        """`at_once`: windows that are computed together at first, and halved for good where memory does not take them. 0 is
        one, whose layers are computed twice, as they are in the end where memory does not take one otherwise."""
        self.at_once = max(1, at_once)
        here = self._here(trained(model))
        by_muon = matrices_of(model) if manifest.inner.optimizer == "muon" else {}
        rest = [parameter for name, parameter in sorted(here.items()) if name not in by_muon]
        self.optimizer = make_adamw(rest, manifest, device)
        self._muon = self._make_muon([here[name] for name in by_muon], [one.shape for one in by_muon.values()])
        self._model = model
        self._objective = objective
        self._settings = manifest.inner
        self._device = device
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._all = [*self._parameters, *(here[name] for name in by_muon)]
        self._kind = step_kind(device)
        self._scale: LossScale | None = None
        self._scaled = False  # now, or until float16 was left
        self._can_skip = bool(self.optimizer.defaults["fused"])
        self._shared: Tensor | None = None  # all gradients, and behind them the loss, where a step has parts
        self._add: Callable[[Tensor], None] | None = None
        self.pace: Pace | None = None
        """Where a step has parts."""
        self.make_room: Callable[[], bool] = lambda: False
        """Asked where memory ran out, before less is computed at once: whether there is more now."""
        self._zero = torch.zeros((), device=device)
        self._loss = torch.zeros((), device=device)
        self._finite = torch.zeros((), device=device)
        self._skipped = torch.zeros((), device=device)  # in a row, up to now
        self.spares_memory = False
        if not at_once:
            self.spare_memory()

    def scale_loss(self) -> None:
        """Scale the loss from now on, as on all devices that take a step together if one of them computes in float16."""
        self._scale, self._scaled = LossScale(self._device), True

    def share(self, add: Callable[[Tensor], None]) -> None:
        """Take a part of each step from now on: `add` gives all who take it the sum of their tensors.

        Gradients lie in one tensor then, as theta does, so that one sum is all that a step waits for.
        """
        self._add, self.pace = add, Pace(self._device)
        self._shared = torch.zeros(sum(one.numel() for one in self._all) + 1, device=self._device)
        parts = torch.split(self._shared[:-1], [one.numel() for one in self._all])
        for parameter, part in zip(self._all, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def spare_memory(self) -> bool:
        """Compute layers twice from now on, so that no more is kept of them than what they are given. False if it is so
        already, or transformers cannot do it with this model."""
        if self.spares_memory or not getattr(self._model, "supports_gradient_checkpointing", False):
            return False
        enable = getattr(self._model, "activation_checkpointing_enable", None) or self._model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # type: ignore[operator] # by its old name in older releases of transformers
        self.spares_memory = True
        return True

    def try_out(self, tokens: int) -> None:
        """Compute with windows of so many tokens as in a step, but without the head, and forget what comes of it."""
        while not self._tried_out(tokens):
            self._compute_less()

    def _tried_out(self, tokens: int) -> bool:
        """False if memory ran out."""
        ids = torch.zeros((self.at_once, tokens), dtype=torch.int64, device=self._device)
        body = self._model.base_model
        assert isinstance(body, torch.nn.Module)
        try:
            with autocast(self._device, self._kind):
                states = body(input_ids=ids)[0]
            states.float().sum().backward()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self._clear()
        return True

    def step(self, windows: Tensor, rate: float, weight: int | None = None, idle: int = 0) -> None:
        """Take one step on `windows` at learning rate `rate`. ModelTooLargeError if memory does not take one of them.

        `weight`: of all windows of the step (Objective), where these are a part of them, and the last `idle` for nothing.
        """
        if self.pace is not None:
            self.pace.begin()
        while (total := self._differentiate(windows, weight or self._objective.weight(windows), idle)) is None:
            self._clear()
            if not self.make_room():
                self._compute_less()
        if self.pace is not None:
            self.pace.end(len(windows))
        total, norm = self._gather(total)
        is_finite = (norm + total).isfinite()
        finite = is_finite.float()
        broken = 1 - finite
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # The fused kernel leaves everything as it is where `found_inf` is 1: no value crosses to the host.
        self.optimizer.found_inf = broken  # type: ignore[attr-defined] # as torch's GradScaler sets it
        if self._can_skip or finite.item():
            self.optimizer.step()
        self._muon.step(rate, self._settings.weight_decay, finite)
        self._clear()
        self._loss += torch.where(is_finite, total, self._zero)
        self._finite += finite
        if self._scale is None:
            self._skipped = (self._skipped + 1) * broken
            return
        self._scale.follow(finite)
        if self._scale.is_spent:
            self._leave_float16()

    def _leave_float16(self) -> None:
        self._scale = None
        if self._kind == torch.float16:
            self._kind = torch.float32

    def _here(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
        """What this device has of them."""
        return dict(parameters)

    def _make_muon(self, matrices: list[Tensor], shapes: list[torch.Size]) -> Muon:
        return Muon(matrices, shapes)

    def _compute_less(self) -> None:
        if self.at_once > 1:
            self.at_once = halved(self.at_once)
        elif not self.spare_memory():
            raise ModelTooLargeError("memory ran out with one window at a time.")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _gather(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Have the gradient of all parts of a step, clipped; returns their loss, and the gradient's norm before."""
        self._fill()
        if self._shared is not None and self._add is not None:
            self._shared[-1] = total
            self._add(self._shared)
            total = self._shared[-1].clone()
        return total, torch.nn.utils.clip_grad_norm_(self._all, self._settings.clip)

    def _fill(self) -> None:
        """Have a gradient of this device's part, as it is without a scale."""
        for parameter in self._parameters:
            if parameter.grad is None:  # an expert without a token: Adam has one count of steps for all
                parameter.grad = torch.zeros_like(parameter)
        if self._scale is not None:
            self._scale.remove([one.grad for one in self._all if one.grad is not None])

    def _clear(self) -> None:
        if self._shared is None:
            self._model.zero_grad(set_to_none=True)
        else:
            self._shared.zero_()

    def _differentiate(self, windows: Tensor, weight: int, idle: int = 0) -> Tensor | None:
        """Leave the gradient of what `windows` are of a mean loss over `weight`, which is returned; None if memory ran out."""
        total = self._zero
        try:
            for part, counts in pieces(windows, self.at_once, idle):
                with autocast(self._device, self._kind):
                    loss, balanced = self._objective.loss(self._model, part, self._device)
                share = self._objective.weight(part) / weight if counts else 0.0
                if self._scale is not None:
                    balanced = balanced * self._scale.factor
                (balanced * share).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
                total = total + loss.detach() * share
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return total

    def report(self) -> float:
        """Return the mean loss of the finite steps since the last report (NaN if there was none).

        Raises TrainerError when many steps in a row were not finite.
        """
        loss, finite, skipped = torch.stack([self._loss, self._finite, self._skipped]).tolist()
        if skipped >= _PATIENCE:
            raise TrainerError(
                f"{int(skipped)} inner steps in a row had no finite gradient.",
                remedy="The run's learning rate may be too high for this model; the node restarts from its checkpoint.",
            )
        self._loss.zero_()
        self._finite.zero_()
        return loss / finite if finite else math.nan

    def moments(self) -> dict[str, Tensor]:
        """The optimizers' state by name ("exp_avg.3": of parameter 3, "momentum.3" and "squares.3": of matrix 3), Adam's
        from its first step on; and the loss's scale."""
        return {f"{kind}.{index}": tensor for kind in KINDS for index, tensor in self.state(kind).items()} | self._scale_state()

    def _scale_state(self) -> dict[str, Tensor]:
        """The scale's, if there is one or was."""
        return {LOSS_SCALE: torch.zeros(3) if self._scale is None else self._scale.state} if self._scaled else {}

    def state(self, kind: str) -> dict[int, Tensor]:
        """Those of one of the KINDS, by the index of the parameter or matrix."""
        if kind in OF_MATRICES:
            return dict(enumerate(self._muon.momentum if kind == _MOMENTUM else self._muon.squares))
        states = {index: self.optimizer.state.get(parameter) for index, parameter in enumerate(self._parameters)}
        return {index: state[kind] for index, state in states.items() if state}

    @property
    def optimizer_steps(self) -> int:
        """Steps that Adam counts (skipped ones are not counted)."""
        state = self.optimizer.state.get(self._parameters[0])
        return int(state["step"].item()) if state else 0

    def restore(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Put back what `moments` and `optimizer_steps` gave."""
        scale = moments.get(LOSS_SCALE)
        if scale is not None and self._scale is not None:
            if scale.any():
                self._scale.restore(scale)
            else:
                self._leave_float16()
        for index, parameter in enumerate(self._parameters):
            if f"{_MOMENTS[0]}.{index}" in moments:
                step = torch.tensor(float(steps), dtype=torch.float32, device=self._device)
                # Copies: what is mapped would keep a file's space on the disk long after newer ones have replaced it.
                state = {kind: moments[f"{kind}.{index}"].to(self._device, copy=True) for kind in _MOMENTS}
                self.optimizer.state[parameter] = {"step": step} | state
        for index, momentum in enumerate(self._muon.momentum):
            momentum.copy_(moments[f"{_MOMENTUM}.{index}"])
        for index, squares in enumerate(self._muon.squares):
            if (kept := moments.get(f"{SQUARES}.{index}")) is not None:  # Muon alone, as before, has none
                squares.copy_(kept)
