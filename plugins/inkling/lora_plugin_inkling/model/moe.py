"""The sparse layers' MLP: routed experts on megatron-core's dispatcher, and shared ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from lora_plugin_inkling.model.router import SinkRouter
from lora_plugin_inkling.model.shared_experts import SharedExperts
from lora_plugins_sdk.hosts.torch_backend import spec_provider


class InklingMoE(MegatronModule):
    """Routed plus shared experts.

    Args:
        config: megatron-core's TransformerConfig.
        shared: number of shared experts.
        route_scale: factor on the weights of all experts.
        pg_collection: megatron-core's process groups.
    """

    def __init__(self, config: Any, shared: int, route_scale: float, pg_collection: Any) -> None:
        super().__init__(config=config)
        ranks, rank = pg_collection.ep.size(), pg_collection.ep.rank()
        count = config.num_moe_experts // ranks
        mine = list(range(rank * count, (rank + 1) * count))
        self.router = SinkRouter(config, shared, route_scale)
        self.experts = _grouped_experts(count, config, pg_collection)
        self.shared_experts = SharedExperts(config, shared, pg_collection)
        self.token_dispatcher = MoEAlltoAllTokenDispatcher(count, mine, config=config, pg_collection=pg_collection)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism s / tp on both sides."""
        weights, chosen, shared_weights = self.router(hidden)
        to = self.token_dispatcher
        tokens, weights = to.dispatch_preprocess(hidden, chosen, weights)
        tokens, weights = to.token_dispatch(tokens, weights)
        tokens, per_expert, weights = to.dispatch_postprocess(tokens, weights)
        routed, _ = self.experts(tokens, per_expert, weights)
        routed = to.combine_postprocess(to.token_combine(to.combine_preprocess(routed)))
        return routed + self.shared_experts(hidden, shared_weights)


def _grouped_experts(count: int, config: Any, pg_collection: Any) -> nn.Module:
    provider: Any = spec_provider()()
    if hasattr(megatron_experts, "GroupedMLPSubmodules"):  # 0.19 has a builder, 0.16 a module and its parts
        build = provider.grouped_mlp_modules(True)
    else:
        module, parts = provider.grouped_mlp_modules(True, False)
        build = partial(module, submodules=parts)
    return build(count, config, pg_collection=pg_collection)
