"""Group advantages against plain Python."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_harness.advantages import STD_EPSILON, degenerate_share, group_advantages


def obvious(group: list[float], kind: str) -> list[float]:
    mean = statistics.fmean(group)
    if len(set(group)) == 1:
        return [0.0] * len(group)
    divisor = statistics.pstdev(group) + STD_EPSILON if kind == "grpo" else 1.0
    return [(reward - mean) / divisor for reward in group]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@settings(deadline=None)
@given(
    rewards=st.integers(2, 6).flatmap(
        lambda size: st.lists(
            st.lists(st.floats(-10, 10, width=32), min_size=size, max_size=size), min_size=1, max_size=5
        )
    )
)
def test_equals_plain_python(kind, rewards):
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), kind)
    expected = torch.tensor([obvious(group, kind) for group in rewards])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_equal_rewards_give_exactly_zero_even_where_their_mean_rounds(kind):
    group = [0.1, 0.1, 0.1]
    assert sum(group) / 3 != 0.1  # the case that makes a rounding error look like a signal
    advantages = group_advantages(torch.tensor([group, [7.0] * 3], dtype=torch.float64), kind)
    assert advantages.tolist() == [[0.0] * 3, [0.0] * 3]


def test_rewards_that_differ_by_rounding_noise_are_not_blown_up():
    advantages = group_advantages(torch.tensor([[0.5, 0.5 + 1e-12]], dtype=torch.float64), "grpo")
    assert advantages.abs().max() < 1e-5


def test_dr_grpo_keeps_the_size_of_the_difference():
    narrow, wide = group_advantages(torch.tensor([[0.0, 0.1], [0.0, 1.0]]), "dr_grpo")
    torch.testing.assert_close(wide, 10 * narrow)


def test_degenerate_share():
    assert degenerate_share(torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.5, 0.5]])) == 0.75
