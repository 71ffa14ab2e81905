"""Advantages of a group of completions of one prompt."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

# Added to the standard deviation: differences of the size of rounding noise are not blown up to +-1.
STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, kind: Literal["grpo", "dr_grpo"]) -> Tensor:
    """How much better each completion is than its group.

    ``grpo``: ``(r - mean) / (std + 1e-6)`` with the population standard deviation of the group (Shao et al.
    2024, DeepSeekMath, section 4.1). ``dr_grpo``: ``r - mean``, without the division that overweights prompts
    whose rewards are nearly all equal (Liu et al. 2025, Understanding R1-Zero-Like Training).

    Args:
        rewards: [groups, group_size], finite.
        kind: which of the two.

    Returns:
        [groups, group_size] fp32; exactly 0 in a group whose rewards are all equal.
    """
    assert rewards.dim() == 2, f"rewards must be [groups, group_size], not {list(rewards.shape)}"
    rewards = rewards.double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if kind == "grpo":
        centred = centred / (rewards.std(dim=1, keepdim=True, correction=0) + STD_EPSILON)
    # The mean of equal numbers may differ from them by a rounding step; such a group must not learn from it.
    degenerate = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return centred.masked_fill(degenerate, 0.0).float()


def degenerate_share(rewards: Tensor) -> float:
    """Share of groups that teach nothing because all their rewards are equal. `rewards`: [groups,
    group_size]."""
    return (rewards.amax(dim=1) == rewards.amin(dim=1)).double().mean().item()
