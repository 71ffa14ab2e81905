"""A small model, adapters for it and requests, for the tests of the local engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lora_harness.engines import Completion, GenerationRequest, SamplingParams

VOCAB, CONTEXT = 37, 48


def save_model(directory: Path) -> Path:
    """A dense Qwen3 of two layers with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def adapter_config(rank: int = 3, **changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "lora_dropout": 0.5,
        **changes,
    }


def adapter_tensors(model_dir: Path, config: Mapping[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random factors with the names and shapes PEFT itself gives them."""
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    peft_model = get_peft_model(base, LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    return {name: torch.randn(value.shape, generator=generator) * 0.3 for name, value in state.items()}


def request(
    length: int, *, seed: int, new: int = 12, temperature: float = 1.0, stop: tuple[int, ...] = ()
) -> GenerationRequest:
    prompt = np.random.default_rng(1000 + seed).integers(0, VOCAB, length)
    sampling = SamplingParams(max_new_tokens=new, temperature=temperature, stop_token_ids=frozenset(stop))
    return GenerationRequest(prompt_ids=tuple(prompt.tolist()), sampling=sampling, seed=seed)


def mixed_requests() -> list[GenerationRequest]:
    return [
        request(
            3 + 5 * (i % 4),
            seed=i,
            new=4 + 3 * (i % 3),
            temperature=(0.7, 1.0, 1.3)[i % 3],
            stop=(5, 6, 7, 8),
        )
        for i in range(17)
    ]


@torch.no_grad()
def teacher_forced(model: Any, asked: GenerationRequest, done: Completion) -> Tensor:
    """Log-probabilities of `done`, one unpadded forward pass without a cache."""
    ids = torch.tensor([*asked.prompt_ids, *done.token_ids])
    logits = model(input_ids=ids[None]).logits[0].double() / asked.sampling.temperature
    start = len(asked.prompt_ids)
    return torch.log_softmax(logits, -1)[torch.arange(start - 1, len(ids) - 1), ids[start:]]
