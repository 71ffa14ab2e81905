"""What an Inkling config says, and what cannot be built from it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_plugin_inkling.model.layer_kinds import ATTENTION, MLP
from lora_plugins_sdk import Diagnostic, LayerTypes, LoraError, ModelDims, RunFacts

GLOBAL, SLIDING = ATTENTION.types
DENSE, SPARSE = MLP.types
RECOMPUTED = ("core_attn", "layernorm", "mlp")
"""Parts of a layer that selective recompute may name: the attention itself, the norm before routed experts, and the MLP
of dense layers, as in megatron-core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFields:
    """One kind of attention layer.

    Args:
        heads, groups: query heads and key/value heads.
        head_dim: width of a query, key or value head.
        d_rel: width of a head's relative state.
        extent: distances, in tokens, that have a bias.
        window: tokens that a query sees, itself included; None for all.
        log_floor: position from which scores grow with log(position); None for never.
        log_alpha: how strongly.
        kernel: tokens that the short convolutions on keys and values reach over, the current one included.
    """

    heads: int
    groups: int
    head_dim: int
    d_rel: int
    extent: int
    window: int | None
    log_floor: int | None
    log_alpha: float
    kernel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InklingFields:
    """What the modules need beyond megatron-core's TransformerConfig.

    Args:
        attention: per layer type.
        layer_types: `hybrid` (global) or `hybrid_sliding`, per layer.
        mlp_types: `dense` or `sparse`, per layer.
        kernel: tokens that the short convolutions after attention and MLP reach over.
        shared: number of shared experts.
        route_scale: factor on the weights of all chosen and shared experts.
        mup_width: divisor of the final hidden state.
    """

    attention: Mapping[str, AttentionFields]
    layer_types: Sequence[str]
    mlp_types: Sequence[str]
    kernel: int
    shared: int
    route_scale: float
    mup_width: float


def read_fields(dims: ModelDims) -> InklingFields:
    """Fields of a config, with transformers' own defaults where it omits one.

    Raises:
        LoraError: a size is missing.
    """
    config = dims.config
    kernel, d_rel = dims.resolve("conv_kernel_size"), dims.resolve("d_rel")
    window = dims.resolve("sliding_window_size")
    return InklingFields(
        attention={
            GLOBAL: AttentionFields(
                heads=dims.resolve("num_attention_heads"),
                groups=dims.resolve("num_key_value_heads"),
                head_dim=dims.resolve("head_dim"),
                d_rel=d_rel,
                extent=dims.resolve("rel_extent"),
                window=None,
                log_floor=config.get("log_scaling_n_floor"),
                log_alpha=config.get("log_scaling_alpha", 0.1),
                kernel=kernel,
            ),
            SLIDING: AttentionFields(
                heads=dims.resolve("swa_num_attention_heads"),
                groups=dims.resolve("swa_num_key_value_heads"),
                head_dim=dims.resolve("swa_head_dim"),
                d_rel=d_rel,
                extent=window,
                window=window,
                log_floor=None,
                log_alpha=0.0,
                kernel=kernel,
            ),
        },
        layer_types=_types(ATTENTION, dims),
        mlp_types=_types(MLP, dims),
        kernel=kernel,
        shared=dims.resolve("n_shared_experts"),
        route_scale=config.get("route_scale", 8.0),
        mup_width=config.get("logits_mup_width_multiplier", 24.0),
    )


def _types(kinds: LayerTypes, dims: ModelDims) -> Sequence[str]:
    return kinds.resolve(dims, dims.resolve("num_hidden_layers"))


def layer_problems(dims: ModelDims) -> list[Diagnostic]:
    """Layer types that the config does not say, says for another number of layers, or contradicts."""
    problems: list[Diagnostic] = []
    for kinds in (ATTENTION, MLP):
        try:
            _types(kinds, dims)
        except LoraError as error:
            problems += error.diagnostics
    return problems


def run_problems(facts: RunFacts, dims: ModelDims) -> list[Diagnostic]:
    """Parallel runs that the model cannot have.

    Raises:
        LoraError: a size is missing.
    """
    heads = "every rank holds whole heads"
    rules = (
        ("num_attention_heads", facts.tp, "tensor", heads),
        ("num_key_value_heads", facts.tp, "tensor", heads),
        ("swa_num_attention_heads", facts.tp, "tensor", heads),
        ("swa_num_key_value_heads", facts.tp, "tensor", heads),
        ("intermediate_size", facts.tp, "tensor", "every rank holds an equal part of the MLP"),
        (
            "n_shared_experts * moe_intermediate_size",
            facts.tp,
            "tensor",
            "every rank holds an equal part of the shared experts",
        ),
        ("n_routed_experts", facts.ep, "expert", "every rank holds the same number of experts"),
        ("moe_intermediate_size", facts.etp, "expert tensor", "every rank holds an equal part of each expert"),
        ("num_hidden_layers", facts.pp, "pipeline", "every stage holds the same number of layers"),
    )
    problems = [
        Diagnostic(
            subject=f"{name} = {dims.resolve(name)}",
            reason=f"not divisible by the {kind} parallel size {parts}, and {why}",
            cure=f"use a {kind} parallel size that divides {dims.resolve(name)}",
        )
        for name, parts, kind, why in rules
        if dims.resolve(name) % parts
    ]
    if facts.cp > 1:
        problems.append(
            Diagnostic(
                subject=f"context parallel size {facts.cp}",
                reason="a short convolution needs the tokens before its own, and context parallel ranks hold two "
                "pieces of the text each",
                cure="use context parallel size 1; split the sequence with sequence parallelism instead",
            )
        )
    if facts.tp > 1 and not facts.sequence_parallel and _has_experts(dims):
        problems.append(
            Diagnostic(
                subject=f"tensor parallel size {facts.tp} without sequence parallelism",
                reason="every rank would dispatch the same tokens to the experts, and their gradients would count each "
                "token once per rank",
                cure="turn sequence parallelism on",
            )
        )
    return problems


def _has_experts(dims: ModelDims) -> bool:
    """Whether any layer is sparse, as far as the config says so."""
    return not layer_problems(dims) and SPARSE in _types(MLP, dims)


def override_problems(overrides: Mapping[str, Any]) -> list[Diagnostic]:
    """Overrides of megatron-core's config that these modules do not read."""
    refused = {
        "qk_layernorm": "queries and keys are always normalised here",
        "moe_shared_expert_overlap": "moves the tensor parallel sums out of the shared experts' linears",
        "moe_expert_capacity_factor": "drops tokens of crowded experts, which the rollout engine does not",
        "moe_aux_loss_coeff": "adds a loss to the router's gradient that the reward does not contain",
        "moe_z_loss_coeff": "adds a loss to the router's gradient that the reward does not contain",
    }
    problems = [
        Diagnostic(subject=f"override {name!r}", reason=reason, cure="leave it out")
        for name, reason in refused.items()
        if name in overrides
    ]
    for name in sorted(set(overrides.get("recompute_modules") or ()) - set(RECOMPUTED)):
        problems.append(
            Diagnostic(
                subject=f"override 'recompute_modules': {name!r}",
                reason="is no part that the layers of this model recompute",
                cure=f"name some of {', '.join(RECOMPUTED)}, or use recompute_granularity='full'",
            )
        )
    return problems
