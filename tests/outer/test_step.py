"""The outer step against an independent float64 reference, written in plain Python from the paper's equation."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nolocod.outer import step
from nolocod.run.manifest import Outer

SETTINGS = Outer(alpha=0.5, beta=0.7, gamma=0.9)
WIDTH = 33

Vector = list[float]


class Reference:
    """N replicas stepped with Eq. 2 of arXiv 2506.10911 (signs of its Eq. 32), two tensors, plain floats."""

    def __init__(self, phis: list[Vector]) -> None:
        self.phi = [list(phi) for phi in phis]
        self.delta = [[0.0] * len(phi) for phi in phis]

    def step(self, thetas: list[Vector], groups: list[tuple[int, ...]]) -> None:
        old = [list(phi) for phi in self.phi]
        for group in groups:
            for k in range(len(old[0])):
                mean_change = sum(thetas[j][k] - old[j][k] for j in group) / len(group)
                mean_phi = sum(old[j][k] for j in group) / len(group)
                for i in group:
                    self.delta[i][k] = (
                        SETTINGS.alpha * self.delta[i][k]
                        + SETTINGS.beta * mean_change
                        + SETTINGS.gamma * (mean_phi - old[i][k])
                    )
                    self.phi[i][k] = old[i][k] + self.delta[i][k]


def one_tensor_step(phis: torch.Tensor, deltas: torch.Tensor, thetas: torch.Tensor, groups: list[tuple[int, ...]]) -> None:
    messages = [step.message(phi, theta, SETTINGS) for phi, theta in zip(phis, thetas, strict=True)]
    for group in groups:
        total = torch.stack([messages[j] for j in group]).sum(0)
        for i in group:
            step.step(phis[i], deltas[i], total, len(group), SETTINGS)


def pairs(rng: random.Random, n: int, size: int = 2) -> list[tuple[int, ...]]:
    order = rng.sample(range(n), n)
    return [tuple(order[start : start + size]) for start in range(0, n, size)]


@pytest.mark.parametrize("replicas", [4, 6, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.float64, 1e-14)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_tensor_form_is_the_paper_s(replicas: int, dtype: torch.dtype, tolerance: float, size: int) -> None:
    rng = random.Random(replicas)
    start = [[rng.gauss(0, 0.5) for _ in range(WIDTH)] for _ in range(replicas)]
    phis = torch.tensor(start, dtype=dtype)
    reference = Reference(phis.double().tolist())
    deltas = torch.zeros_like(phis)
    for _ in range(5):
        thetas = phis + 0.1 * torch.tensor([[rng.gauss(0, 1) for _ in range(WIDTH)] for _ in range(replicas)], dtype=dtype)
        # The reference goes its own way from the start: errors may add up over the steps.
        own = [
            [
                p + (t - q)
                for p, t, q in zip(reference.phi[i], thetas[i].double().tolist(), phis[i].double().tolist(), strict=True)
            ]
            for i in range(replicas)
        ]
        groups = pairs(rng, replicas, size)
        one_tensor_step(phis, deltas, thetas, groups)
        reference.step(own, groups)
    assert (phis.double() - torch.tensor(reference.phi, dtype=torch.float64)).abs().max() <= tolerance
    assert (deltas.double() - torch.tensor(reference.delta, dtype=torch.float64)).abs().max() <= tolerance


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 9), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_mean_momentum_is_kept_by_any_grouping(seed: int, replicas: int, sizes: list[int]) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    phis = torch.randn(replicas, WIDTH, generator=generator, dtype=torch.float64)
    deltas = torch.zeros_like(phis)
    for size in sizes:
        thetas = phis + 0.1 * torch.randn(replicas, WIDTH, generator=generator, dtype=torch.float64)
        expected = SETTINGS.alpha * deltas.mean(0) + SETTINGS.beta * (thetas - phis).mean(0)
        one_tensor_step(phis, deltas, thetas, pairs(rng, replicas, size))
        assert torch.allclose(deltas.mean(0), expected, atol=1e-12, rtol=0)


def test_partners_apply_the_same_sum_and_stay_mirror_images() -> None:
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(1000, generator=generator)
    phis, deltas = [phi.clone(), phi.clone()], [torch.zeros(1000), torch.zeros(1000)]
    thetas = [phi + 0.1 * torch.randn(1000, generator=generator) for _ in range(2)]
    first, second = (step.message(p, t, SETTINGS) for p, t in zip(phis, thetas, strict=True))
    step.step(phis[0], deltas[0], first + second, 2, SETTINGS)
    step.step(phis[1], deltas[1], second + first, 2, SETTINGS)
    assert torch.equal(phis[0], phis[1])
    assert not torch.equal(phis[0], phi)


@pytest.mark.parametrize("settings", [SETTINGS, Outer(alpha=0.2, beta=1.0, gamma=1.0)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_own_and_late_part_bring_theta_where_the_step_brings_phi(n: int, settings: Outer) -> None:
    generator = torch.Generator().manual_seed(n)
    phi, theta, delta, *others = torch.randn(3 + n - 1, WIDTH, generator=generator, dtype=torch.float64)
    s = step.message(phi, theta, settings)
    total = s + sum(others)
    moved, change = theta.clone(), theta - phi
    step.add_own_part(moved, delta, lambda: change, settings)
    assert torch.allclose(moved - phi, settings.alpha * delta + settings.beta * (theta - phi), atol=1e-14)
    moved += step.late_part(total, n, s)
    step.step(phi, delta, total, n, settings)
    assert torch.allclose(moved, phi, atol=1e-14)


def test_message_can_be_written_in_place() -> None:
    phi, theta = torch.tensor([1.0]), torch.tensor([2.0])
    out = torch.empty(1)
    assert step.message(phi, theta, SETTINGS, out) is out
    assert out.item() == pytest.approx(0.7 * 1 + 0.9 * 1)
