"""Causal core attention on torch's scaled_dot_product_attention, with megatron-core's signature."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.hosts.context_parallel import gather_sequence, zigzag_positions


class TorchCausalAttention(nn.Module):
    """Causal attention with grouped queries and no dropout. Right padding needs no mask; masks are refused.

    Under context parallelism a rank's queries attend to keys and values gathered from all ranks.

    Args:
        config: megatron-core's TransformerConfig.
        softmax_scale: factor on the scores; default 1 / sqrt(head size).
        pg_collection: megatron-core's process groups; `cp` is used under context parallelism.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        del (
            layer_number,
            attention_type,
            unused,
        )  # part of megatron-core's signature; nothing here depends on them
        if attn_mask_type != AttnMaskType.causal:
            raise LoraError(
                f"attention mask type {attn_mask_type.name}",
                reason="the torch reference host attends causally",
                cure="use Transformer Engine's attention on a GPU",
            )
        if config.attention_dropout:
            raise LoraError(
                "attention_dropout",
                reason="the torch reference host's attention does not have it",
                cure="set dropout to 0, or use Transformer Engine on a GPU",
            )
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]; CP: s / cp of this rank.

        Raises:
            LoraError: an explicit mask, a bias or packed sequences, none of which this host has.
        """
        causal = attn_mask_type in (None, AttnMaskType.causal)
        if not causal or attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise LoraError(
                "attention_mask, attention_bias or packed_seq_params",
                reason="the torch reference host attends causally over whole right-padded sequences",
                cure="pass None and pad on the right",
            )
        mask = None
        if self.cp_group is not None:
            key, value = (gather_sequence(x, self.cp_group) for x in (key, value))
            mine = zigzag_positions(key.shape[0], self.cp_group.rank(), self.cp_group.size())
            mask = (mine[:, None] >= torch.arange(key.shape[0])).to(query.device)
        repeats = query.shape[2] // key.shape[2]
        # Repeated, because torch has no fused CPU kernel for grouped heads (1.4 times slower at 1024 tokens).
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)
