"""A small Qwen3 with random weights, as a HF directory, and adapters for it. What every test here starts from."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk import LoraConfig, PeftAdapter, RunFacts, derive_table, load_plugin, write_adapter

VOCABULARY = 301  # odd: padded under TP2
TARGETS = ("all-linear", "embed_tokens", "lm_head")
LORA = LoraConfig(rank=4, alpha=8, target_modules=TARGETS)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def make_checkpoint(directory: Path, **config: Any) -> Path:
    """Save a model with weights large enough that every part matters."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**CONFIG, **config}))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory


def hf_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def random_factors(config: Mapping[str, Any], lora: LoraConfig) -> dict[str, Tensor]:
    """PEFT tensors of one adapter, each drawn from a seed of its own; B is not zero."""
    table = derive_table(load_plugin(architecture="qwen3"), config, lora, RunFacts())
    factors = {}
    for row in table.rows:
        generator = torch.Generator().manual_seed(zlib.crc32(row.hf_name.encode()))
        factors[row.hf_name] = torch.randn(row.full_shape, generator=generator) * 0.1
    return factors


def make_adapter(directory: Path, checkpoint: Path, lora: LoraConfig = LORA) -> Path:
    """Save a random adapter for a checkpoint."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            *("embed_tokens", "lm_head"),
        ],
    }
    if lora.use_rslora:
        config["use_rslora"] = True
    tensors = random_factors(json.loads((checkpoint / "config.json").read_text()), lora)
    return write_adapter(PeftAdapter(tensors=tensors, config=config), directory)


def microbatches(count: int = 4, length: int = 8) -> list[Tensor]:
    """Token ids `[2, length + 1]` of each microbatch; the last column is a label only."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (2, length + 1), generator=generator) for _ in range(count)]


def positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)
