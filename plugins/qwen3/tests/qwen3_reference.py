"""The obvious form of the adapter, on transformers' model: `W + scale * B A`, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from qwen3_tiny import hf_model, microbatches
from torch import Tensor
from torch.func import functional_call

PREFIX = "base_model.model."
EMBEDDING = "model.embed_tokens.weight"


class FoldedModel:
    """transformers' Qwen3 with the adapter's factors as leaves.

    Args:
        checkpoint: HF directory.
        factors: PEFT tensors.
        scale: factor on every product.
    """

    def __init__(self, checkpoint: Path, factors: Mapping[str, Tensor], scale: float) -> None:
        self.model: Any = hf_model(checkpoint)
        self.scale = scale
        self.leaves = {name: tensor.clone().requires_grad_(True) for name, tensor in factors.items()}
        self.embedded: list[Tensor] = []

    def leaf(self, module: str, factor: str) -> Tensor:
        """One factor."""
        end = f"embedding_{factor}" if f"{module}.weight" == EMBEDDING else f"{factor}.weight"
        return self.leaves[f"{PREFIX}{module}.lora_{end}"]

    def weights(self) -> dict[str, Tensor]:
        """The folded weights, under transformers' names."""
        folded = {}
        for name, a in self.leaves.items():
            if not name.endswith((".lora_A.weight", ".lora_embedding_A")):
                continue
            weight = name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] + ".weight"
            delta = self.scale * self.leaves[name.replace("_A", "_B")] @ a
            base = self.model.get_parameter(weight).detach()
            folded[weight] = base + (delta.t() if weight == EMBEDDING else delta)
        return folded

    def logits(self, tokens: Tensor) -> Tensor:
        """`[b, s, vocabulary]`; the embedding's output keeps its gradient."""
        weights = self.weights()
        embedded = weights[EMBEDDING][tokens]
        embedded.retain_grad()
        self.embedded.append(embedded)
        return functional_call(self.model, weights, (), {"inputs_embeds": embedded}).logits

    def backward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Mean cross entropy over all microbatches, differentiated: (logits, dX `[s, b, h]`) per microbatch."""
        logits = []
        batches = microbatches()
        for tokens in batches:
            out = self.logits(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / len(batches)).backward()
            logits.append(out.detach())
        return logits, [one.grad.transpose(0, 1) for one in self.embedded if one.grad is not None]
