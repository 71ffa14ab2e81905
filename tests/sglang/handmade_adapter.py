"""Adapters in SGLang's own names, with the weights they add written out, for what PEFT cannot hold (routed experts).

Run these in a process that never imports SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch


class HandmadeAdapter:
    """Random factors, added one module at a time, and the delta of each base weight that they make.

    Attributes:
        tensors: Name in the adapter's file -> factor.
        deltas: Name of the base model's parameter -> what the adapter adds to it, `alpha / rank * B @ A`.
    """

    def __init__(self, rank: int = 4, alpha: float = 8.0, seed: int = 3, std: float = 0.07) -> None:
        self.rank, self.alpha, self.std = rank, alpha, std
        self.tensors: dict[str, torch.Tensor] = {}
        self.deltas: dict[str, list[tuple[int | None, slice, torch.Tensor]]] = {}
        self._random = torch.Generator().manual_seed(seed)

    def add(
        self,
        name: str,
        parameter: str,
        out_dim: int,
        in_dim: int,
        *,
        first_row: int = 0,
        expert: int | None = None,
        experts_a: int | None = None,
        experts_b: int | None = None,
    ) -> None:
        """One pair A [.., rank, in_dim], B [.., out_dim, rank].

        Args:
            name: Module in the adapter, such as `layers.0.self_attn.q_proj`.
            parameter: Base parameter [.., rows, in_dim] that it changes.
            out_dim: Rows of B.
            in_dim: Columns of A.
            first_row: Where B's rows begin among the parameter's.
            expert: The one expert of a stacked parameter that it changes.
            experts_a: Leading dimension of a stacked A (1: shared by all experts).
            experts_b: The same of B.
        """
        a = self._factor(experts_a, self.rank, in_dim)
        b = self._factor(experts_b, out_dim, self.rank)
        self.tensors[f"base_model.model.model.{name}.lora_A.weight"] = a
        self.tensors[f"base_model.model.model.{name}.lora_B.weight"] = b
        delta = self.alpha / self.rank * (b @ a)
        self.deltas.setdefault(parameter, []).append((expert, slice(first_row, first_row + out_dim), delta))

    def add_embedding(self, name: str, parameter: str, tokens: int, hidden: int, *, used: int) -> None:
        """One pair A [rank, tokens], B [hidden, rank], which adds `(B @ A).T` to a weight [tokens, hidden].

        Args:
            name: Module in the adapter.
            parameter: Base parameter that it changes.
            tokens: Columns of A.
            hidden: Rows of B.
            used: How many of the tokens are no padding; A is zero for the others.
        """
        a, b = self._factor(None, self.rank, tokens), self._factor(None, hidden, self.rank)
        a[:, used:] = 0
        self.tensors[f"base_model.model.model.{name}.lora_embedding_A"] = a
        self.tensors[f"base_model.model.model.{name}.lora_embedding_B"] = b
        self.deltas.setdefault(parameter, []).append((None, slice(0, tokens), self.alpha / self.rank * (b @ a).t()))

    def _factor(self, experts: int | None, *shape: int) -> torch.Tensor:
        full = shape if experts is None else (experts, *shape)
        return torch.randn(full, generator=self._random) * self.std

    def save(self, folder: str, targets: Sequence[str]) -> None:
        """Write the adapter's two files; `targets` are SGLang's normalised module names."""
        from safetensors.torch import save_file

        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": list(targets)}
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))

    def merge(self, net: torch.nn.Module) -> None:
        """Add every delta to `net`'s parameters; in a multimodal net they go by the text model's names."""
        parameters = {name.replace(".language_model.", "."): weight for name, weight in net.named_parameters()}
        with torch.no_grad():
            for name, parts in self.deltas.items():
                for expert, rows, delta in parts:
                    weight = parameters[name] if expert is None else parameters[name][expert]
                    weight[..., rows, :] += delta
