"""What the suite keeps to on any machine."""

from __future__ import annotations

import os

import torch


def test_a_gpu_is_hidden_unless_its_tests_are_asked_for() -> None:
    """Here and from processes that tests start; `-m gpu` alone, which leaves this test out, does not."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()
