"""Fields of a Qwen3.5/3.6 MoE config that are not sizes, and what a run of it cannot have. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk import Diagnostic, RunFacts

_ROTARY_SHARE = 0.25  # transformers' own default

_NOT_THE_POLICY = {
    "moe_shared_expert_overlap": "moves the tensor parallel sums out of the shared expert's linears, and an adapter's "
    "product would be summed once per rank",
    "moe_router_load_balancing_type": "adds a loss to the router's gradient that the reward does not contain",
    "moe_aux_loss_coeff": "adds a loss to the router's gradient that the reward does not contain",
    "moe_z_loss_coeff": "adds a loss to the router's gradient that the reward does not contain",
    "moe_expert_capacity_factor": "drops tokens of crowded experts, which the rollout engine does not",
    "moe_pad_expert_input_to_capacity": "drops tokens of crowded experts, which the rollout engine does not",
    "moe_input_jitter_eps": "adds noise before the router, which the rollout engine does not",
    "moe_router_force_load_balancing": "routes tokens at random, which the rollout engine does not",
}


def rotary_percent(text: Mapping[str, Any]) -> float:
    """Share of each head that is rotated."""
    rope = text.get("rope_parameters") or {}
    return rope.get("partial_rotary_factor", text.get("partial_rotary_factor", _ROTARY_SHARE))


def rope_problems(text: Mapping[str, Any], head_dim: int) -> list[Diagnostic]:
    """A rotated share that is no even number of a head's elements, which are rotated in pairs."""
    share = rotary_percent(text)
    rotated = int(head_dim * share)
    if 0 < share <= 1 and rotated and rotated % 2 == 0:
        return []
    return [
        Diagnostic(
            subject=f"partial_rotary_factor = {share}",
            reason=f"rotates {rotated} of a head's {head_dim} elements, and they are rotated in pairs",
            cure="use the checkpoint's own config.json",
        )
    ]


def run_problems(facts: RunFacts) -> list[Diagnostic]:
    """Parallel runs that this model cannot have, whatever its sizes."""
    if facts.cp == 1:
        return []
    return [
        Diagnostic(
            subject=f"context parallel size {facts.cp}",
            reason="a gated delta net carries a state along the whole sequence, and megatron-core does not hand it "
            "from rank to rank",
            cure="use context parallel size 1; split the sequence with sequence parallelism instead",
        )
    ]


def override_problems(overrides: Mapping[str, Any]) -> list[Diagnostic]:
    """Overrides of megatron-core's config after which the model would not be the policy that the rollouts sample."""
    return [
        Diagnostic(subject=f"override {name!r}", reason=_NOT_THE_POLICY[name], cure="leave it out")
        for name in overrides
        if name in _NOT_THE_POLICY
    ]
