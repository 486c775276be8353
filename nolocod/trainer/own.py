"""The replica in the process of somebody's own training loop: its parameters, its optimizer, its inner steps.

The rule: the parameters stay the caller's objects, and their values become views of one flat tensor, as in any replica; what
the run needs beyond them is made here. Who computes the gradients, on what text and how, is the caller's matter.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nolocod.errors import CheckpointError, ParametersDifferError, RunFileError, TrainerError, on_one_line
from nolocod.run.own import OwnParameter, first_difference, own_parameters
from nolocod.trainer.adapter import trained
from nolocod.trainer.base_model import initial
from nolocod.trainer.capture import Plan
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.model import Layout, bare, flatten, layout_of, read_config
from nolocod.trainer.replica import Replica
from nolocod.trainer.windows import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from nolocod.proto.types import Applied
    from nolocod.run.manifest import Manifest, Sealed

_FADES = 0.99
"""Of the highest learning rate lately, with each inner step: what parted replicas then is not all merged yet."""
_REST, _LARGE = "own", "own."
"""Names in a checkpoint: of the optimizer's small state, and of its tensors before their index and key."""


def named(parameters: Iterable[Tensor | tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those that are trained, each once, with their names; "" where only tensors are given."""
    pairs = [one if isinstance(one, tuple) else ("", one) for one in parameters]
    return [*{id(tensor): (name, tensor) for name, tensor in pairs if tensor.requires_grad}.values()]


def facts(parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """What a manifest pins of them."""
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in parameters]


def run_model(manifest: Manifest, base: Path | None) -> torch.nn.Module:
    """The run's model with the weights that it starts from, on the CPU. RunFileError where it is its owner's own."""
    return initial(manifest, read_config(manifest, make_tokenizer(manifest.data, base).vocabulary), base)


def _pinned(manifest: Manifest, base: Path | None) -> tuple[Sequence[OwnParameter], Layout]:
    """The run's parameters in the model's order, and as they lie in the flat tensor."""
    if manifest.is_own:
        own = own_parameters(manifest.model)
        return own, Layout(tuple(one.name for one in own), tuple(one.shape for one in own), (), 0)
    config = read_config(manifest, make_tokenizer(manifest.data, base).vocabulary)
    model = bare(config, manifest.adapter)
    pinned = [OwnParameter(name, "float32", tuple(one.shape)) for name, one in trained(model).items()]
    return pinned, layout_of(config, manifest.adapter)


class CallersSteps:
    """The caller's inner steps, and its optimizer's state (replica.Steps)."""

    def __init__(self, optimizer: torch.optim.Optimizer, at_once: int) -> None:
        self._optimizer = optimizer
        self.at_once = at_once  # as the run says: it cuts its own batches
        self._losses: list[Tensor | float] = []

    def tell(self, loss: Tensor | float) -> None:
        """Of the step that is taken; read when a report is due."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def report(self) -> float:
        """The mean of what was told since the last report; NaN if nothing was."""
        losses, self._losses = self._losses, []
        return sum(float(loss) for loss in losses) / len(losses) if losses else math.nan

    @property
    def optimizer_steps(self) -> int:
        return 0  # the optimizer's own state has it

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state_dict: its float32 tensors by name, and all else in a few bytes."""
        told: dict[str, Any] = self._optimizer.state_dict()
        large = {
            f"{_LARGE}{index}.{key}": value
            for index, entry in told["state"].items()
            for key, value in entry.items()
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32
        }
        small = {
            index: {key: value for key, value in entry.items() if f"{_LARGE}{index}.{key}" not in large}
            for index, entry in told["state"].items()
        }
        rest = io.BytesIO()
        torch.save({**told, "state": small}, rest)
        return large | {_REST: torch.frombuffer(bytearray(rest.getbuffer()), dtype=torch.uint8)}

    def restore(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Put back what `moments` gave. CheckpointError if it is another optimizer's."""
        try:
            told = torch.load(io.BytesIO(moments[_REST].numpy().tobytes()), weights_only=True)
            for name, tensor in moments.items():
                if name.startswith(_LARGE):
                    index, _, key = name.removeprefix(_LARGE).partition(".")
                    told["state"][int(index)][key] = tensor.clone()
            self._optimizer.load_state_dict(told)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"it is not of this optimizer ({on_one_line(error, 200)}).") from error


class NoText:
    """The text of a loop that brings its own (windows.Source)."""

    position = Position()

    def seek(self, position: Position) -> None:
        pass

    def take(self, count: int) -> NDArray[np.int64]:
        return np.empty((0, 0), dtype=np.int64)

    held_out = take


class OwnReplica(Replica):
    """Of the run `sealed`, over `parameters` (`named`) that `optimizer` trains, in the order of the run's model; their values
    become the run's as soon as there are any.

    `evaluate` gives a held-out loss. Raises ParametersDifferError, and is then without effect.
    """

    def __init__(
        self,
        sealed: Sealed,
        base: Path | None,
        parameters: Sequence[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        evaluate: Callable[[], float] | None,
    ) -> None:
        pinned, layout = _pinned(sealed.manifest, base)
        if difference := first_difference(pinned, facts(parameters)):
            raise ParametersDifferError(difference)
        devices = {tensor.device for _, tensor in parameters}
        if len(devices) > 1:
            raise RunFileError(f"the parameters lie on {len(devices)} devices.", remedy="Train the model on one.")
        self.manifest = sealed.manifest
        self.device = devices.pop()
        self.name = str(self.device)
        self._tensors = {one.name: tensor for one, (_, tensor) in zip(pinned, parameters, strict=True)}
        self._optimizer = optimizer
        self._held_out = evaluate
        self._highest_rate = 0.0
        self.inner = self.steps = CallersSteps(optimizer, sealed.manifest.inner.batch)
        self.source = NoText()
        with torch.no_grad():
            theta = flatten(self._tensors, layout, torch.empty(layout.size, device=self.device))
        self._lay_out(sealed, layout, Plan.of(sealed.manifest, layout), theta)
        self.weights.ahead.give_back()  # a caller's steps could not ask for it

    @property
    def tokens_per_step(self) -> int:
        return 0  # nobody knows

    @property
    def can_evaluate(self) -> bool:
        return self._held_out is not None

    def count(self, loss: Tensor | float | None = None) -> None:
        """The caller took an inner step."""
        super().count()
        self.rate = float(self._optimizer.param_groups[0]["lr"])
        self._highest_rate = max(self.rate, _FADES * self._highest_rate)
        if loss is not None:
            self.steps.tell(loss)

    def recent_rate(self) -> float:
        return self._highest_rate or 1.0

    def evaluate(self) -> float:
        """What the caller's function gives; 0 without one, which no donor's weights are worse than."""
        if self._held_out is None:
            return 0.0
        with torch.no_grad():
            return float(self._held_out())

    def capture(self, subject: int) -> None:
        self._check_views()
        super().capture(subject)

    def solo(self, run_round: int = 0, subject: int | None = None) -> Applied:
        self._check_views()
        return super().solo(run_round, subject)

    def _check_views(self) -> None:
        for name, view in self.layout.split(self.theta):
            if self._tensors[name].data_ptr() != view.data_ptr():
                remedy = "Move or convert the model before NoLoCo gets its parameters, and not after."
                raise TrainerError(f"{name} was moved away from where NoLoCo had put it.", remedy=remedy)
