"""How fast a device multiplies matrices: what inner steps are measured by (MFU), and planned with."""

from __future__ import annotations

import time

import torch

from nolocod.trainer.model import step_kind

_SECONDS = 0.5
_SIDE, _SIDE_THERE = 1024, 8192
"""Of the matrices whose product tells a device's speed, and of those on a GPU, which takes large ones to fill it."""


def speed(device: torch.device) -> float:
    """Floating-point operations per second of a matrix product on `device`, in the type that training computes in there."""
    side = _SIDE_THERE if device.type == "cuda" else _SIDE
    one = torch.randn(side, side, dtype=step_kind(device), device=device)

    def multiply() -> None:
        one @ one
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a tenth of a percent of so large a product

    multiply()  # the first one loads what computes
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        multiply()
        done += 1
    return done * 2.0 * side**3 / (time.perf_counter() - began)
