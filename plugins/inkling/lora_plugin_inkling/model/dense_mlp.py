"""The gated MLP of the dense layers."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lora_plugin_inkling.model.gated_linears import column_linear, gated, row_linear
from lora_plugin_inkling.model.tensor_parallel import empty_weight


class DenseMLP(MegatronModule):
    """Norm, `down(silu(gate) * up)`, times one learned `global_scale` `[1]`."""

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        width, tp_group = config.ffn_hidden_size, pg_collection.tp
        self.linear_fc1 = column_linear(config, 2 * width, tp_group, norm=True)
        self.linear_fc2 = row_linear(config, width, tp_group)
        self.global_scale = empty_weight(1, config=config, sequence_parallel=config.sequence_parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism s / tp on both sides."""
        both, _ = self.linear_fc1(hidden)
        out, _ = self.linear_fc2(gated(both))
        return out * self.global_scale
