"""Attention without rotary positions: short convolutions on keys and values, and a learned relative bias."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from lora_plugin_inkling.model.fields import AttentionFields
from lora_plugin_inkling.model.recompute import recomputes
from lora_plugin_inkling.model.relative_bias import RelativeBias
from lora_plugin_inkling.model.short_conv import ShortConv
from lora_plugin_inkling.model.tensor_parallel import empty_weight, shared_by_heads
from lora_plugins_sdk.hosts.rms_norm import rms_norm
from lora_plugins_sdk.hosts.torch_backend import spec_provider


class HeadNorm(nn.Module):
    """RMSNorm of every head with one gain `weight` `[head_dim]` for all."""

    def __init__(self, config: Any, head_dim: int, tp_group: Any) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.tp_group = tp_group
        self.weight = empty_weight(head_dim, config=config)

    def forward(self, heads: Tensor) -> Tensor:
        """[..., head_dim] -> [..., head_dim]."""
        return rms_norm(heads, shared_by_heads(self.weight, self.tp_group), self.eps, zero_centered=False)


class InklingAttention(MegatronModule):
    """Norm, queries, keys, values and relative states, attention, output.

    The rows of `linear_qkvr` on a rank are its part of q, k, v and r, one after the other.

    Args:
        config: megatron-core's TransformerConfig.
        fields: sizes of this kind of layer.
        pg_collection: megatron-core's process groups.
    """

    def __init__(self, config: Any, fields: AttentionFields, pg_collection: Any) -> None:
        super().__init__(config=config)
        tp_group, ranks = pg_collection.tp, pg_collection.tp.size()
        self.fields = fields
        self.heads, self.groups = fields.heads // ranks, fields.groups // ranks
        keys = self.groups * fields.head_dim
        self.widths = [self.heads * fields.head_dim, keys, keys, self.heads * fields.d_rel]
        provider: Any = spec_provider()()
        options = dict(config=config, bias=False, is_expert=False, tp_group=tp_group)
        self.linear_qkvr = provider.column_parallel_layer_norm_linear()(
            config.hidden_size,
            ranks * sum(self.widths),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **options,
        )
        self.linear_proj = provider.row_parallel_linear()(
            fields.heads * fields.head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **options,
        )
        self.k_sconv = ShortConv(config, keys, fields.kernel, split_channels=True, tp_group=tp_group)
        self.v_sconv = ShortConv(config, keys, fields.kernel, split_channels=True, tp_group=tp_group)
        self.q_layernorm = HeadNorm(config, fields.head_dim, tp_group)
        self.k_layernorm = HeadNorm(config, fields.head_dim, tp_group)
        self.relative_bias = RelativeBias(config, fields.d_rel, fields.extent, tp_group)

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism s / tp on both sides."""
        mixed, _ = self.linear_qkvr(hidden)
        query, key, value, relative = mixed.split(self.widths, dim=-1)
        query = self.q_layernorm(query.unflatten(-1, (self.heads, -1)))
        key = self.k_layernorm(self.k_sconv(key).unflatten(-1, (self.groups, -1)))
        value = self.v_sconv(value).unflatten(-1, (self.groups, -1))
        bias = self.relative_bias(relative.unflatten(-1, (self.heads, -1)))
        if self.fields.log_floor is not None:
            growth = log_growth(query.shape[0], self.fields.log_floor, self.fields.log_alpha).to(query.device)
            query = (query.float() * growth[:, None, None, None]).to(query.dtype)
            bias = (bias.float() * growth[:, None]).to(bias.dtype)
        if self.training and recomputes(self.config, "core_attn"):
            attended: Any = checkpoint(self._attend, False, query, key, value, bias)
        else:
            attended = self._attend(query, key, value, bias)
        out, _ = self.linear_proj(attended)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d], bias [b, heads, s, s] -> [s, b, heads * d]."""
        key, value = (x.repeat_interleave(self.heads // self.groups, dim=2) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        positions = torch.arange(query.shape[2], device=query.device)
        distance = positions[:, None] - positions[None, :]
        hidden = distance < 0
        if self.fields.window is not None:
            hidden |= distance >= self.fields.window
        # Queries and keys are normalised, hence 1 / d and not 1 / sqrt(d).
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias.masked_fill(hidden, float("-inf")), scale=1 / self.fields.head_dim
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def log_growth(length: int, floor: int, alpha: float) -> Tensor:
    """Factor on the scores of each query, `[length]` in float32: for the n-th token 1 + alpha * log(n / floor), at
    least 1.
    """
    tokens_seen = torch.arange(1, length + 1, dtype=torch.float32)
    return 1 + alpha * (tokens_seen / floor).clamp(min=1).log()
