"""Tiny HF directories for harness tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lora_plugins_sdk import load_plugin

VOCAB = 53


def write_tiny_qwen3(directory: Path, *, layers: int = 2, vocab_size: int = VOCAB) -> Path:
    """A random Qwen3 whose norms are no identity, without a tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def write_tiny_hybrid(directory: Path, *, vocab_size: int = VOCAB) -> Path:
    """A random model of gated delta nets, gated attention and experts, without a tokenizer."""
    options = {**load_plugin(architecture="qwen36_moe").architecture.tiny_config, "vocab_size": vocab_size}
    torch.manual_seed(0)
    config = AutoConfig.for_model(options.pop("model_type"), **options, initializer_range=0.2)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.fill_(-2.0)  # slow decays: fast ones make the log-probabilities sensitive to rounding
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory
