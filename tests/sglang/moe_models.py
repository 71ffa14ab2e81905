"""Small models with experts, and adapters on them with what transformers says of base plus adapter.

Run these in a process that never imports SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from handmade_adapter import HandmadeAdapter


def make_qwen3_moe(folder: str) -> None:
    """Qwen3-MoE with random fp32 weights: 2 layers, 8 experts of which 2 a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    fields: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields)).float().save_pretrained(folder)


def add_experts(adapter: HandmadeAdapter, layer: int, config: Any, layout: str) -> None:
    """Factors on gate, up and down of every routed expert of a layer.

    Args:
        adapter: Gets them.
        layer: Number of the layer.
        config: Of the text model.
        layout: `per_expert` (one pair for each), `packed` (stacked), or `shared_outer` (stacked; one A for gate and
            up, one B for down, common to all experts).
    """
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    experts = f"layers.{layer}.mlp.experts"
    both, down = f"model.{experts}.gate_up_proj", f"model.{experts}.down_proj"
    if layout == "per_expert":
        for expert in range(count):
            adapter.add(f"{experts}.{expert}.gate_proj", both, inner, hidden, expert=expert)
            adapter.add(f"{experts}.{expert}.up_proj", both, inner, hidden, expert=expert, first_row=inner)
            adapter.add(f"{experts}.{expert}.down_proj", down, hidden, inner, expert=expert)
        return
    outer = 1 if layout == "shared_outer" else count
    adapter.add(f"{experts}.gate_proj", both, inner, hidden, experts_a=outer, experts_b=count)
    adapter.add(f"{experts}.up_proj", both, inner, hidden, experts_a=outer, experts_b=count, first_row=inner)
    adapter.add(f"{experts}.down_proj", down, hidden, inner, experts_a=count, experts_b=outer)


def add_attention(adapter: HandmadeAdapter, layer: int, config: Any, output_gate: bool = False) -> None:
    """Factors on q, k, v and o of a layer; with an output gate q has twice the rows, query and gate of each head."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes = {
        "q_proj": (2 * query if output_gate else query, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
    }
    for name, (out_dim, in_dim) in shapes.items():
        module = f"layers.{layer}.self_attn.{name}"
        adapter.add(module, f"model.{module}.weight", out_dim, in_dim)


def qwen3_moe_adapter(model: str, layout: str) -> HandmadeAdapter:
    """Attention and routed experts of every layer."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    adapter = HandmadeAdapter()
    for layer in range(config.num_hidden_layers):
        add_attention(adapter, layer, config)
        add_experts(adapter, layer, config, layout)
    return adapter


def save_qwen3_moe_adapter(model: str, folder: str, layout: str) -> None:
    """Write `qwen3_moe_adapter` for SGLang."""
    qwen3_moe_adapter(model, layout).save(folder, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])


def qwen3_moe_logprobs(model: str, sequences: Sequence[Sequence[int]], layout: str | None) -> list[list[float]]:
    """Log-probabilities of tokens 1.. with the adapter of this layout merged into the weights."""
    return merged_logprobs(model, sequences, None if layout is None else qwen3_moe_adapter(model, layout))


def merged_logprobs(
    model: str, sequences: Sequence[Sequence[int]], adapter: HandmadeAdapter | None
) -> list[list[float]]:
    """Log-probabilities of tokens 1.. by transformers with the adapter merged into the weights."""
    import transformers
    from transformers_reference import logprobs_of

    architectures = transformers.AutoConfig.from_pretrained(model).architectures
    assert architectures
    model_class = getattr(transformers, architectures[0])
    net = model_class.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    if adapter is not None:
        adapter.merge(net)
    return logprobs_of(net, sequences)
