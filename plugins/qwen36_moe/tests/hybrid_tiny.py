"""A small Qwen3.5 MoE with random weights, as a HF directory: what every test here starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk import load_plugin

BATCH, TOKENS = 2, 96  # longer than one chunk (64) of the delta rule
CONFIG: dict[str, Any] = dict(load_plugin(architecture="qwen36_moe").architecture.tiny_config)
VOCABULARY: int = CONFIG["vocab_size"]


def make_checkpoint(directory: Path, **config: Any) -> Path:
    """Save a model in which every weight matters: what starts constant (norms, biases, decays) is perturbed."""
    from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Qwen3_5MoeTextConfig(**{**CONFIG, **config}))
    perturb(model)
    model.save_pretrained(directory)
    return directory


def perturb(model: Any) -> None:
    """Matrices of nearly unit gain, and vectors that differ from element to element.

    Decays are slow: with fast ones a head's output is at some tokens nearly zero, and the norm that follows makes
    rounding errors of it as large as the tolerance.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "A_log" in name:
                weight.copy_(-2 + 0.5 * torch.randn_like(weight))
            elif weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
            elif "conv1d" in name or "embed_tokens" in name:
                weight.copy_(0.5 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * 0.7 * weight.shape[-1] ** -0.5)


def hf_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def tokens() -> Tensor:
    """`[BATCH, TOKENS]`."""
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(7))
