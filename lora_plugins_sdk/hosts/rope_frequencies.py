"""The frequencies of rotary positions, in transformers' own arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lora_plugins_sdk.hosts.rope import Llama3Scaling, Rope, YarnScaling


def inverse_frequencies(rope: Rope, rotated: int) -> Tensor:
    """Angle by which each pair of a head's elements turns from one position to the next, fp32 `[rotated / 2]`.

    A scaled pair turns slower by its factor; between slow and fast pairs the two are mixed. The formulas are those of
    Llama 3.1 and of YaRN (Peng et al. 2023, section 3.2), as transformers' `modeling_rope_utils` has them.

    Args:
        rope: the model's rotary positions.
        rotated: elements of a head that are rotated.
    """
    unscaled = 1.0 / rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if rope.scaling is None:
        return unscaled
    if isinstance(rope.scaling, Llama3Scaling):
        kept = _llama3_share(rope.scaling, unscaled)
    else:
        kept = _yarn_share(rope.scaling, rope.theta, rotated)
    return unscaled / rope.scaling.factor * (1 - kept) + unscaled * kept


def _llama3_share(scaling: Llama3Scaling, unscaled: Tensor) -> Tensor:
    """1 for pairs that stay as they are, 0 for slow ones; linear in the number of turns between."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / unscaled)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _yarn_share(scaling: YarnScaling, theta: float, rotated: int) -> Tensor:
    """1 for pairs that stay as they are, 0 for slow ones; linear in the number of the pair between."""

    def pair(turns: float) -> float:
        """The pair that turns so often in the longest sequence of the first training."""
        length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotated * math.log(length) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(rotated // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
