"""A host of duplicated linears, as the down projections of multi-head latent attention: each rank holds all of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_plugins_sdk import (
    Architecture,
    LoraAdapter,
    LoraConfig,
    ParallelRun,
    Projection,
    SelectedPlugin,
    Site,
    SiteKind,
    attach,
)

HF_CONFIG = {"model_type": "stack", "num_hidden_layers": 3, "hidden_size": 8}
LORA = LoraConfig(rank=2, alpha=3)
ARCHITECTURE = Architecture(
    name="stack",
    model_types=("stack",),
    sites=(
        Site(
            path="decoder.layers.{layer}.linear_q_down_proj",
            kind=SiteKind.REPLICATED,
            projections=(
                Projection(hf="model.layers.{layer}.self_attn.q_a_proj", in_dim="hidden_size", out_dim="hidden_size"),
            ),
        ),
    ),
)


class Linear(nn.Module):
    """`forward(x) -> (output, bias)`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.t(), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_q_down_proj = Linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear_q_down_proj(x)[0])


class UnusualStack(nn.Module):
    """Three layers, each recomputed in the backward when asked to; no class that anybody could know by name."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(recompute_granularity="full" if recompute else None)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            if self.config.recompute_granularity:
                hidden_states = checkpoint(layer, hidden_states, use_reentrant=True)
            else:
                hidden_states = layer(hidden_states)
        return hidden_states


class StackModel(nn.Module):
    """`forward(tokens [s]) -> [s, 8]`: embedding, then the stack under the name `decoder`."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.embedding.weight.data.copy_(torch.linspace(-1, 1, 128).view(16, 8).sin())
        self.decoder = UnusualStack(recompute=recompute)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.embedding(tokens))


def adapted(model: nn.Module, run: ParallelRun | None = None) -> LoraAdapter:
    """Attach, and give every B values; they are equal on all ranks."""
    adapter: Any = attach(model, SelectedPlugin.of(ARCHITECTURE), HF_CONFIG, LORA, run)
    for index, factors in enumerate(adapter.factors()):
        for b in factors.bs:
            b.data.copy_(torch.linspace(-1, 1, b.numel()).view_as(b).cos() * (index + 1) / 10)
    return adapter
