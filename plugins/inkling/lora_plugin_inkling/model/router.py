"""The router: sigmoid scores choose, and the shared experts are a sink in the softmax that weights."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from lora_plugin_inkling.model.tensor_parallel import empty_weight


class SinkRouter(MegatronModule):
    """Chooses experts and weights them and the shared ones, in float32.

    The top k of `sigmoid(logits) + expert_bias` are chosen. Weights are a softmax over `logsigmoid(logits)` of the
    chosen and of the shared experts together, times `route_scale * global_scale`; the bias takes no part in them.

    Parameters: `weight` `[experts + shared, h]`, `global_scale` `[1]`, `expert_bias` `[experts]` (never trained).

    Args:
        config: megatron-core's TransformerConfig.
        shared: number of shared experts.
        route_scale: factor on all weights.
    """

    def __init__(self, config: Any, shared: int, route_scale: float) -> None:
        super().__init__(config=config)
        self.experts, self.top_k = config.num_moe_experts, config.moe_router_topk
        self.route_scale = route_scale
        split = config.sequence_parallel
        self.weight = empty_weight(self.experts + shared, config.hidden_size, config=config, sequence_parallel=split)
        self.global_scale = empty_weight(1, config=config, sequence_parallel=split)
        self.expert_bias = empty_weight(self.experts, config=config).requires_grad_(False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] -> weights [s * b, experts] (zero where not chosen), chosen [s * b, experts], weights of the shared
        experts [s, b, shared].
        """
        logits = nn.functional.linear(hidden.float(), self.weight.float())
        routed, shared = logits.split([self.experts, logits.shape[-1] - self.experts], dim=-1)
        chosen = (routed.sigmoid() + self.expert_bias.float()).topk(self.top_k, dim=-1, sorted=False).indices
        competing = torch.cat([routed.gather(-1, chosen), shared], dim=-1)
        weights = nn.functional.logsigmoid(competing).softmax(dim=-1) * self.route_scale * self.global_scale.float()
        of_chosen, of_shared = weights.to(hidden.dtype).split([self.top_k, shared.shape[-1]], dim=-1)
        table = of_chosen.new_zeros(routed.shape).scatter(-1, chosen, of_chosen)
        mask = torch.zeros_like(routed, dtype=torch.bool).scatter(-1, chosen, True)
        return table.flatten(0, 1), mask.flatten(0, 1), of_shared
