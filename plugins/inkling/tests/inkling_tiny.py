"""A small Inkling in transformers, perturbed so that every part of the layout shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugin_inkling import ARCHITECTURE

CONFIG: dict[str, Any] = dict(ARCHITECTURE.tiny_config)
BATCH, TOKENS = 2, 24

# What a published config.json says of such a model: `intermediate_size` is an expert's width, layers are told by
# number, and the language model's part names no model type.
PUBLISHED_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "unpadded_vocab_size": 61,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "local_layer_ids": [0, 2, 3],
    "dense_mlp_idx": 2,
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
    "use_sconv": True,
    "sconv_kernel_size": 3,
    "dense_intermediate_size": 36,
    "intermediate_size": 28,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "shared_expert_sink": True,
    "route_scale": 2.5,
    "use_gate_bias": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_global_scale": True,
    "use_embed_norm": True,
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
    "logits_mup_width_multiplier": 3.0,
    "model_max_length": 48,
    "rms_norm_eps": 1e-4,
}
PUBLISHED_CONFIG: dict[str, Any] = {"model_type": "inkling_mm_model", "text_config": PUBLISHED_TEXT}


def in_transformers_words(text_config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a published config as transformers writes it after reading it."""
    from transformers import InklingTextConfig

    return dict(InklingTextConfig(**text_config).to_dict())


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
