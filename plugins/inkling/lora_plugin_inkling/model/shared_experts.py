"""The shared experts, which see every token, as one wide gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lora_plugin_inkling.model.gated_linears import column_linear, gated, row_linear


class SharedExperts(MegatronModule):
    """`sum_e weight_e * down_e(silu(gate_e) * up_e)`, each token with its own weights.

    The experts lie side by side in one MLP of `count * width` units: `linear_fc1` has the gates of all and the ups of
    all, split over TP like any other; `linear_fc2` sums over the experts as it sums over units.
    """

    def __init__(self, config: Any, count: int, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.width, self.tp_group = config.moe_ffn_hidden_size, pg_collection.tp
        self.linear_fc1 = column_linear(config, 2 * count * self.width, self.tp_group, norm=False)
        self.linear_fc2 = row_linear(config, count * self.width, self.tp_group)

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """hidden [s, b, h], weights [s, b, count] -> [s, b, h]; under sequence parallelism s / tp everywhere."""
        if self.config.sequence_parallel:
            weights = gather_from_sequence_parallel_region(
                weights, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            weights = copy_to_tensor_model_parallel_region(weights, group=self.tp_group)
        both, _ = self.linear_fc1(hidden)
        units = gated(both)
        mine = units.shape[-1]
        first = self.tp_group.rank() * mine
        expert_of_unit = torch.arange(first, first + mine, device=units.device) // self.width
        out, _ = self.linear_fc2(units * weights[..., expert_of_unit])
        return out
