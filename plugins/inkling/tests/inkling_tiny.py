"""A small Inkling in transformers, perturbed so that every part of the layout shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Window and extent are shorter than the text, positions pass the floor of the log scaling, and no two widths are equal.
CONFIG: dict[str, Any] = {
    "model_type": "inkling_text",
    "vocab_size": 64,
    "unpadded_vocab_size": 61,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
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
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 3.0,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
BATCH, TOKENS = 2, 24


def make_model(config: dict[str, Any] | None = None) -> Any:
    """transformers' model with weights drawn wide enough that norms, scales and biases matter."""
    from transformers import InklingForCausalLM, InklingTextConfig

    torch.manual_seed(0)
    fields = {key: value for key, value in (config or CONFIG).items() if key != "model_type"}
    model = InklingForCausalLM(InklingTextConfig(**fields)).eval()
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            norm_or_scale = "norm" in name or "global_scale" in name
            weight.copy_(weight + 0.2 * torch.randn_like(weight) if norm_or_scale else 0.15 * torch.randn_like(weight))
    return model


def save_checkpoint(directory: Path) -> Path:
    """The model as a HF directory."""
    make_model().save_pretrained(directory)
    return directory


def tokens() -> Tensor:
    """Token ids `[b, s]`."""
    return torch.randint(0, CONFIG["unpadded_vocab_size"], (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
