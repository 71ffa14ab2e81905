"""A small Inkling in transformers, perturbed so that every part of the layout shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugin_inkling import ARCHITECTURE

CONFIG: dict[str, Any] = dict(ARCHITECTURE.tiny_config)
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
