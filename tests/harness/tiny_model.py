"""Tiny HF directories for harness tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, Qwen3Config, Qwen3ForCausalLM

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


def write_tiny_inkling(directory: Path, *, vocab_size: int = VOCAB, padding: int = 3, multimodal: bool = False) -> Path:
    """A random Inkling with a padded vocabulary, log scaling from an early position on, and no tokenizer; a multimodal
    one in the published layout."""
    options: dict[str, Any] = {**load_plugin(architecture="inkling").architecture.tiny_config}
    options |= {"vocab_size": vocab_size + padding, "unpadded_vocab_size": vocab_size}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    if multimodal:
        vision = {"patch_size": 4, "temporal_patch_size": 2, "n_layers": 4, "hidden_size": 4}
        audio = {"n_mel_bins": 4, "mel_vocab_size": 8}
        config = AutoConfig.for_model(
            "inkling_mm_model", text_config=config.to_dict(), vision_config=vision, audio_config=audio
        )
    family: Any = AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM
    model: Any = family.from_config(config)
    with torch.no_grad():
        weights = (one for one in (*model.named_parameters(), *model.named_buffers()) if one[1].is_floating_point())
        for name, weight in weights:
            norm_or_scale = "norm" in name or "global_scale" in name
            weight.copy_(weight + 0.2 * torch.randn_like(weight) if norm_or_scale else 0.15 * torch.randn_like(weight))
    model.save_pretrained(directory)
    return directory


def write_tiny_qwen3_moe(directory: Path, *, vocab_size: int = VOCAB) -> Path:
    """A random Qwen3-MoE with dense layers beside those with experts, without a tokenizer."""
    options: dict[str, Any] = {**load_plugin(architecture="qwen3_moe").architecture.tiny_config}
    options["vocab_size"] = vocab_size
    config = AutoConfig.for_model(options.pop("model_type"), **options, initializer_range=0.2)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def write_tiny_hybrid(directory: Path, *, vocab_size: int = VOCAB, multimodal: bool = False) -> Path:
    """A random model of gated delta nets, gated attention and experts, alone or with a tower, without a tokenizer."""
    options: dict[str, Any] = {
        **load_plugin(architecture="qwen36_moe").architecture.tiny_config,
        "vocab_size": vocab_size,
    }
    config = AutoConfig.for_model(options.pop("model_type"), **options, initializer_range=0.2)
    torch.manual_seed(0)
    if multimodal:
        text = config.to_dict()
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [1, 1, 0]}
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
        vision |= {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16}
        config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=vision, tie_word_embeddings=False)
    family: Any = AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM
    model: Any = family.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.fill_(-2.0)  # slow decays: fast ones make the log-probabilities sensitive to rounding
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory
