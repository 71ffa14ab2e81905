"""Adapters on routed experts, whose kernels are Triton's. The base of a mixture of experts runs without hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from lora_sglang_cpu.hook import Hook


def compute_moe_lora_info(
    num_tokens: int,
    seg_indptr: torch.Tensor,
    lora_ranks: torch.Tensor,
    weight_indices: torch.Tensor,
    adapter_enabled: torch.Tensor | None,
    token_lora_mapping: torch.Tensor | None,
    max_len: int,
    bucket_len: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which adapter slots the batch uses [slots], and the slot of each token [tokens], -1 for the base model."""
    used = weight_indices.long()
    enabled = torch.zeros_like(lora_ranks, dtype=torch.int32)
    enabled[used] = (lora_ranks[used] > 0).to(torch.int32)
    slots = torch.repeat_interleave(weight_indices.to(torch.int32), seg_indptr.diff().long())
    slots = torch.where(lora_ranks[slots.long()] > 0, slots, -1)
    assert slots.shape == (num_tokens,), f"segments cover {len(slots)} of {num_tokens} tokens"
    return enabled, slots


def forward_with_lora(
    self: Any, hidden_states: torch.Tensor, topk_output: Any, lora_info: Any, **kwargs: Any
) -> torch.Tensor:
    """`FusedMoEWithLoRA._forward_with_lora`: dispatch, experts with their adapters, combine."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    layer = self.base_layer
    config = layer.moe_runner_config
    if config.activation != "silu" or config.gemm1_alpha is not None or config.apply_router_weight_on_input:
        raise NotImplementedError(f"adapters on experts on a CPU: plain silu-gated experts only, not {config}")
    dispatched = layer.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    output = run_experts(layer, dispatched.hidden_states, dispatched.topk_output, lora_info)
    return layer.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=output))


def run_experts(layer: Any, hidden: torch.Tensor, routes: Any, lora_info: Any) -> torch.Tensor:
    """Weighted sum of each token's experts [tokens, hidden], one expert and adapter slot after the other."""
    output = torch.zeros_like(hidden)
    for expert in routes.topk_ids.unique().tolist():
        if expert < 0:  # a dropped route
            continue
        tokens, choices = (routes.topk_ids == expert).nonzero(as_tuple=True)
        slots = lora_info.token_lora_mapping[tokens]
        for slot in slots.unique().tolist():
            chosen, choice = tokens[slots == slot], choices[slots == slot]
            x = hidden[chosen]
            gate, up = functional.linear(x, layer.w13_weight[expert]).chunk(2, dim=-1)
            if slot >= 0:
                rank = lora_info.max_lora_rank
                a, b = factors(lora_info.gate_up_lora_a_weights, lora_info.gate_up_lora_b_weights, slot, expert)
                gate_b, up_b = b.chunk(2, dim=0)
                gate = gate + x @ a[:rank].T @ gate_b.T
                up = up + x @ a[rank:].T @ up_b.T
            inner = functional.silu(gate) * up
            y = functional.linear(inner, layer.w2_weight[expert])
            if slot >= 0:
                a, b = factors(lora_info.down_lora_a_weights, lora_info.down_lora_b_weights, slot, expert)
                y = y + inner @ a.T @ b.T
            output.index_add_(0, chosen, y * routes.topk_weights[chosen, choice, None].to(y.dtype))
    return output


def factors(a: torch.Tensor, b: torch.Tensor, slot: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank or 2 * rank, in] and B [out, rank] of one expert; B holds the scaling already.

    A factor that all experts share (`experts_shared_outer_loras`) has one expert in its buffer.
    """
    return a[slot, expert if a.shape[1] > 1 else 0], b[slot, expert if b.shape[1] > 1 else 0]


HOOKS = (
    Hook(
        "sglang.srt.lora.backend.base_backend._compute_moe_lora_info",
        "(num_tokens, seg_indptr, lora_ranks, weight_indices, adapter_enabled, token_lora_mapping, max_len, "
        "bucket_len=None)",
        "Asserts that blocks of 256 tokens cover a segment, counted by the longest request, but the torch backend "
        "joins neighbours with the same adapter in one segment: three prompts of 150 tokens kill the scheduler.",
        compute_moe_lora_info,
    ),
    Hook(
        "sglang.srt.lora.layers.FusedMoEWithLoRA._forward_with_lora",
        "(self, hidden_states, topk_output, lora_info, **kwargs)",
        "Triton's runner asks for the GPU's name, and fails on None at the first request, with or without an adapter.",
        forward_with_lora,
    ),
)
