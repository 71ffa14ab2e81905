"""Qwen3.5 and Qwen3.6 MoE: sites and the rest of the base, as data."""

from __future__ import annotations

from lora_plugins_sdk import Architecture, Concat, Projection, Site, SiteKind

ARCHITECTURE = Architecture(
    name="qwen36_moe",
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    fallbacks={"head_dim": "256"},
    # Uneven on purpose: an odd vocabulary is padded under TP, and no two widths of one layer are equal.
    tiny_config={
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 61,
        "hidden_size": 36,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    sites=(
        Site(
            path="output_layer",
            kind=SiteKind.COLUMN,
            pack=Concat(pad=True),
            projections=(Projection(hf="lm_head", in_dim="hidden_size", out_dim="vocab_size"),),
            all_linear=False,
        ),
    ),
)
