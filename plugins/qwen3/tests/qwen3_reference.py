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

    def weights(self) -> dict[str, Tensor]:
        """The folded weights, under transformers' names."""
        folded = {}
        for name, a in self.leaves.items():
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            b = self.leaves[f"{PREFIX}{module}.lora_B.weight"]
            base = self.model.get_parameter(f"{module}.weight").detach()
            folded[f"{module}.weight"] = base + self.scale * b @ a
        return folded

    def logits(self, tokens: Tensor) -> Tensor:
        """`[b, s, vocabulary]`; the embedding's output becomes a leaf of its own."""
        embedded = self.model.get_input_embeddings()(tokens).detach().requires_grad_(True)
        self.embedded.append(embedded)
        return functional_call(self.model, self.weights(), (), {"inputs_embeds": embedded}).logits

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
