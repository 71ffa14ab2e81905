"""megatron-core's expert layers as a policy has them: nothing but the reward trains the router. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk.errors import Diagnostic

POLICY_FIELDS: dict[str, Any] = {"moe_router_load_balancing_type": "none"}
"""TransformerConfig fields of every policy with routed experts."""

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


def override_problems(overrides: Mapping[str, Any]) -> list[Diagnostic]:
    """Overrides of megatron-core's config after which the model would not be the policy that the rollouts sample."""
    return [
        Diagnostic(subject=f"override {name!r}", reason=_NOT_THE_POLICY[name], cure="leave it out")
        for name in overrides
        if name in _NOT_THE_POLICY
    ]
