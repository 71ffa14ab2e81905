"""A small model of gated delta nets, gated attention and experts on the torch host, without any plugin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.hosts.gpt import build_gpt, transformer_config
from lora_plugins_sdk.hosts.rope import Rope
from lora_plugins_sdk.hosts.sizes import hybrid_size_fields
from lora_plugins_sdk.testing import current_run

HF = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_conv_kernel_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    vocab_size=11,
    max_position_embeddings=32,
)
MODEL = dict(
    normalization="RMSNorm",
    layernorm_zero_centered_gamma=True,
    qk_layernorm=True,
    attention_output_gate=True,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=[1, 0],
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    moe_shared_expert_gate=True,
    moe_router_load_balancing_type="none",
)


def build_hybrid(**overrides: Any) -> Any:
    """This rank's model, weights uninitialised."""
    run, dims = current_run(), ModelDims(HF)
    config = transformer_config(run, dtype=torch.float32, model=hybrid_size_fields(dims) | MODEL, overrides=overrides)
    return build_gpt(config, run, dims, rope=Rope(theta=10000.0, percent=0.25))


def train_hybrid(**overrides: Any) -> Tensor:
    """One forward and backward; the gradient of the embedding's output."""
    model = build_hybrid(**overrides)
    draw = torch.Generator().manual_seed(current_run().dp_rank)
    for weight in model.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
        weight.requires_grad_(False)
    embedded: list[Tensor] = []

    def start_of_graph(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_(True))
        return embedded[0]

    model.embedding.register_forward_hook(start_of_graph)
    tokens = torch.randint(0, HF["vocab_size"], (1, 12), generator=draw)
    logits = model(tokens, torch.arange(12).expand_as(tokens), None)
    logits.square().mean().backward()
    gradient = embedded[0].grad
    assert gradient is not None and gradient.isfinite().all()
    return gradient
