"""Learning-rate schedules at the points that matter."""

from __future__ import annotations

import math

import pytest

from lora_harness.config import OptimizerSection
from lora_harness.schedule import learning_rate


def rates(steps: int, **options) -> list[float]:
    optimizer = OptimizerSection(lr=2.0, **options)
    return [learning_rate(step, steps=steps, optimizer=optimizer) for step in range(steps)]


def test_constant():
    assert rates(3) == [2.0] * 3


def test_warmup_rises_linearly_and_never_starts_at_zero():
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_towards_min_lr_without_a_wasted_step():
    assert rates(4, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert rates(4, schedule="linear", min_lr=1.0) == pytest.approx([2.0, 1.75, 1.5, 1.25])


def test_cosine_after_warmup():
    found = rates(6, schedule="cosine", warmup_steps=2, min_lr=0.4)
    expected = [0.4 + 1.6 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert found == pytest.approx([1.0, 2.0, *expected])
