"""A learned bias on attention scores, by distance, mixed by every query head for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora_plugin_inkling.model.tensor_parallel import empty_weight, shared_by_heads


class RelativeBias(nn.Module):
    """`bias[query, key] = state[query] @ proj[:, query - key]`, zero at distances of `extent` and more.

    Parameter `proj` `[d_rel, extent]`.
    """

    def __init__(self, config: Any, d_rel: int, extent: int, tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.proj = empty_weight(d_rel, extent, config=config)

    def forward(self, states: Tensor) -> Tensor:
        """Relative states [s, b, heads, d_rel] -> [b, heads, s, s]; entries past the diagonal mean nothing."""
        by_distance = states.permute(1, 2, 0, 3) @ shared_by_heads(self.proj, self.tp_group)
        positions = torch.arange(states.shape[0], device=states.device)
        distance = positions[:, None] - positions[None, :]
        extent = self.proj.shape[1]
        index = distance.clamp(0, extent - 1).expand(*by_distance.shape[:2], -1, -1)
        return by_distance.gather(-1, index).masked_fill(distance >= extent, 0.0)
