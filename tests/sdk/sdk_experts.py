"""A small architecture with routed experts, for tests of the SDK without any real model's plugin. No torch."""

from __future__ import annotations

from typing import Any

from lora_plugins_sdk import Architecture, BaseWeight, Projection, Site, SiteKind

EXPERTS = 4
HF_CONFIG: dict[str, Any] = {
    "model_type": "toy_moe",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "moe_intermediate_size": 12,
    "num_experts": EXPERTS,
}

_HF = "model.layers.{layer}.mlp"
_HOST = "decoder.layers.{layer}.mlp"


def _expert(leaf: str, in_dim: str, out_dim: str) -> Projection:
    return Projection(hf=f"{_HF}.experts.{{expert}}.{leaf}", in_dim=in_dim, out_dim=out_dim)


ARCHITECTURE = Architecture(
    name="toy_moe",
    model_types=("toy_moe",),
    sites=(
        Site(
            path=f"{_HOST}.experts.linear_fc1",
            kind=SiteKind.COLUMN,
            projections=(
                _expert("gate_proj", "hidden_size", "moe_intermediate_size"),
                _expert("up_proj", "hidden_size", "moe_intermediate_size"),
            ),
            experts="num_experts",
            fused_hf=f"{_HF}.experts.gate_up_proj",
        ),
        Site(
            path=f"{_HOST}.experts.linear_fc2",
            kind=SiteKind.ROW,
            projections=(_expert("down_proj", "moe_intermediate_size", "hidden_size"),),
            experts="num_experts",
            fused_hf=f"{_HF}.experts.down_proj",
        ),
    ),
    base_weights=(BaseWeight(host=f"{_HOST}.router.weight", hf=(f"{_HF}.gate.weight",)),),
)
