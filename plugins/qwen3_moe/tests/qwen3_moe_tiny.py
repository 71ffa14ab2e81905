"""A small Qwen3-MoE with random weights, as a HF directory: what every test here starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_plugins_sdk import load_plugin

BATCH, TOKENS = 2, 24
CONFIG: dict[str, Any] = dict(load_plugin(architecture="qwen3_moe").architecture.tiny_config)
VOCABULARY: int = CONFIG["vocab_size"]
# Everything that a config can say otherwise: experts in layer 1 alone, positions as in the published long contexts.
OTHER: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if key != "head_dim"},
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
    "hidden_size": 40,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


def make_checkpoint(directory: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    """Save a model in which every weight matters."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
            elif "embed_tokens" in name:
                weight.copy_(0.3 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * 0.9 * weight.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def hf_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def tokens() -> Tensor:
    """`[BATCH, TOKENS]`."""
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(7))


def save_tensors(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A HF directory of these tensors, whatever their names."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
