"""The parameters of a model that comes from its owner's program: what a manifest pins of it, and how another one differs.

The rule: names, kinds of numbers and shapes, in the model's own order, so that whoever brings another model is told what
differs first. What the model computes is no part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OWN = "own"
"""The key of `[model]`, and its only one."""


class OwnParameter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One of them. Weights that nodes exchange are float32; a loop computes in what it likes (torch.autocast)."""

    name: Annotated[str, Meta(pattern=r"^[\w.-]{0,256}\Z")]
    dtype: Literal["float32"]
    shape: tuple[Annotated[int, Meta(gt=0, lt=1 << 40)], ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


def own_model(parameters: Iterable[tuple[str, str, Sequence[int]]]) -> dict[str, Any]:
    """The `[model]` that pins these (name, kind of numbers, shape)."""
    return {OWN: [[name, dtype, list(shape)] for name, dtype, shape in parameters]}


def own_parameters(model: dict[str, Any]) -> tuple[OwnParameter, ...]:
    """What `model` pins. Raises ValueError, or msgspec's, if it is no such model."""
    found = msgspec.convert(model[OWN], tuple[OwnParameter, ...])
    if len(model) > 1 or not found or len({one.name for one in found}) < len(found):
        raise ValueError("`model.own` lists a model's parameters by different names, and nothing stands beside it")
    return found


def first_difference(pinned: Sequence[OwnParameter], given: Sequence[tuple[str, str, Sequence[int]]]) -> str:
    """How the parameters `given` (name, or "" if it is not known; kind of numbers; shape) first differ; "" if they do not."""
    for number, (one, (name, dtype, shape)) in enumerate(zip(pinned, given, strict=False)):
        if (name or one.name, dtype, tuple(shape)) != (one.name, one.dtype, one.shape):
            return f"parameter {number} is {name} {dtype} {list(shape)} here, and {one} in the run."
    if len(given) < len(pinned):
        return f"the run's {pinned[len(given)]} is missing ({len(given)} parameters here, {len(pinned)} in the run)."
    if len(given) > len(pinned):
        name, dtype, shape = given[len(pinned)]
        return f"the run has no {name} {dtype} {list(shape)} ({len(given)} parameters here, {len(pinned)} in the run)."
    return ""
