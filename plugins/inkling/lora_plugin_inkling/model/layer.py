"""One decoder layer."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn

from lora_plugin_inkling.model.attention import InklingAttention
from lora_plugin_inkling.model.dense_mlp import DenseMLP
from lora_plugin_inkling.model.fields import SLIDING, SPARSE, InklingFields
from lora_plugin_inkling.model.moe import InklingMoE
from lora_plugin_inkling.model.recompute import recomputes
from lora_plugin_inkling.model.short_conv import ShortConv
from lora_plugins_sdk.hosts.rms_norm import TorchRMSNorm


class InklingLayer(MegatronModule, BaseTransformerLayer):
    """Attention and MLP, each with a norm before, a short convolution after, and a skip connection around all.

    The attention of a sliding layer is named `sliding_attention`, that of a global one `self_attention`: their sizes
    differ. Sparse layers have a `pre_mlp_layernorm`, which router, routed and shared experts read.

    Args:
        config: megatron-core's TransformerConfig.
        layer_number: counted from 1 within this stage.
        fields: the model's own.
        pg_collection: megatron-core's process groups.
    """

    def __init__(
        self,
        config: Any,
        *,
        fields: InklingFields,
        pg_collection: Any,
        layer_number: int = 1,
        vp_stage: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        del unused  # part of megatron-core's signature; nothing here depends on it
        stage = pg_collection.pp.rank()
        self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage, stage)
        kind, mlp = fields.layer_types[self.layer_number - 1], fields.mlp_types[self.layer_number - 1]
        attention = InklingAttention(config, fields.attention[kind], pg_collection)
        self.attention_name = "sliding_attention" if kind == SLIDING else "self_attention"
        self.add_module(self.attention_name, attention)
        self.attn_sconv = self._conv(fields, pg_collection)
        self.pre_mlp_layernorm: nn.Module = nn.Identity()
        if mlp == SPARSE:
            self.pre_mlp_layernorm = TorchRMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
            self.mlp: nn.Module = InklingMoE(config, fields.shared, fields.route_scale, pg_collection)
        else:
            self.mlp = DenseMLP(config, pg_collection)
        self.mlp_sconv = self._conv(fields, pg_collection)

    def _conv(self, fields: InklingFields, pg_collection: Any) -> ShortConv:
        width = self.config.hidden_size
        return ShortConv(self.config, width, fields.kernel, split_channels=False, tp_group=pg_collection.tp)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """[s, b, h] -> ([s, b, h], None), as megatron-core's block calls a layer; SP: s / tp on both sides."""
        del unused
        attention = self.get_submodule(self.attention_name)
        hidden = hidden_states + self.attn_sconv(attention(hidden_states))
        return hidden + self.mlp_sconv(self._mlp(hidden)), None

    def _mlp(self, hidden: Tensor) -> Tensor:
        """Norm and MLP, of which selective recompute keeps the norm's output or nothing."""
        if isinstance(self.mlp, DenseMLP):
            if not (self.training and recomputes(self.config, "mlp")):
                return self.mlp(hidden)
            again: Any = checkpoint(self.mlp, False, hidden)
            return again
        if not (self.training and recomputes(self.config, "layernorm")):
            return self.mlp(self.pre_mlp_layernorm(hidden))
        norm = CheckpointWithoutOutput()
        out = self.mlp(norm.checkpoint(self.pre_mlp_layernorm, hidden))
        norm.discard_output_and_register_recompute(out)
        return out
