"""HF configs of models small enough for the conformance kit, and for the quickstart. Needs no torch."""

from __future__ import annotations

from typing import Any

# Uneven on purpose: the head is padded in HF and again under TP, window, extent and log scaling are shorter than a
# text, and no two widths of a layer are equal.
TINY_CONFIG: dict[str, Any] = {
    "model_type": "inkling_text",
    "vocab_size": 64,
    "unpadded_vocab_size": 61,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 10,
    "sliding_window_size": 7,
    "d_rel": 6,
    "rel_extent": 13,
    "log_scaling_n_floor": 5,
    "log_scaling_alpha": 0.3,
    "conv_kernel_size": 4,
    "intermediate_size": 36,
    "moe_intermediate_size": 28,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 3.0,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}

# Of queries and keys of unit length no score is above 1: log scaling from the first position on lets a fresh model
# choose. Both kinds of attention and of MLP are there.
QUICKSTART_CONFIG: dict[str, Any] = {
    "model_type": "inkling_text",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "sliding_window_size": 16,
    "d_rel": 16,
    "rel_extent": 16,
    "log_scaling_n_floor": 1,
    "log_scaling_alpha": 4.0,
    "conv_kernel_size": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 1.0,
    "max_position_embeddings": 64,
}
