"""Sizes of a GPT under megatron-core's names, and which of them a parallel run must divide. Needs no torch."""

from __future__ import annotations

from lora_plugins_sdk.dims import ModelDims
from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.pack import padded_share
from lora_plugins_sdk.run import RunFacts, needless_expert_sizes


def padded_vocab_size(vocab_size: int, facts: RunFacts) -> int:
    """The smallest multiple of `tp * make_vocab_size_divisible_by` that holds `vocab_size` rows.

    The rows past `vocab_size` belong to no token: they are zero in the embedding and the output layer, and whoever
    turns logits into probabilities leaves their columns out.
    """
    return facts.tp * padded_share(vocab_size, facts.tp, facts.make_vocab_size_divisible_by)


# TransformerConfig field -> key of the HF config.
_ATTENTION = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
}
_DENSE_MLP = {"ffn_hidden_size": "intermediate_size"}
_EXPERTS = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_SHARED_EXPERT = {"moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"}
_DELTA_NET = {
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
}
_WHOLE_HEADS = "every rank holds whole heads"


def dense_size_fields(dims: ModelDims) -> dict[str, int]:
    """Sizes of a dense transformer under megatron-core's names (TransformerConfig fields).

    Raises:
        LoraError: the config lacks one of them.
    """
    return _fields(dims, _ATTENTION | _DENSE_MLP)


def moe_size_fields(dims: ModelDims, *, dense: bool = False) -> dict[str, int]:
    """Sizes of a transformer of attention and routed experts under megatron-core's names.

    Args:
        dims: gives the sizes.
        dense: whether some layers have a dense MLP in place of experts.

    Raises:
        LoraError: the config lacks one of them.
    """
    return _fields(dims, _ATTENTION | _EXPERTS | (_DENSE_MLP if dense else {}))


def hybrid_size_fields(dims: ModelDims) -> dict[str, int]:
    """Sizes of a transformer of attention, gated delta nets and experts under megatron-core's names.

    Raises:
        LoraError: the config lacks one of them.
    """
    return _fields(dims, _ATTENTION | _EXPERTS | _SHARED_EXPERT | _DELTA_NET)


def dense_size_problems(facts: RunFacts, dims: ModelDims) -> list[Diagnostic]:
    """Sizes that the parallel run does not divide, and parallel sizes of experts, each with the way out.

    Raises:
        LoraError: the config lacks one of the sizes.
    """
    rules = [*_attention_rules(facts), _dense_mlp_rule(facts), _stages(facts)]
    return [*needless_expert_sizes(facts), *_problems(dims, rules)]


def moe_size_problems(facts: RunFacts, dims: ModelDims, *, dense: bool = False) -> list[Diagnostic]:
    """Sizes of attention, routed experts and, with `dense`, of dense MLPs that the parallel run does not divide.

    Raises:
        LoraError: the config lacks one of the sizes.
    """
    mlp = [_dense_mlp_rule(facts)] if dense else []
    return _problems(dims, [*_attention_rules(facts), *mlp, *_expert_rules(facts), _stages(facts)])


def hybrid_size_problems(facts: RunFacts, dims: ModelDims) -> list[Diagnostic]:
    """Sizes of attention, gated delta nets and experts that the parallel run does not divide.

    Raises:
        LoraError: the config lacks one of the sizes.
    """
    rules = [
        *_attention_rules(facts),
        ("linear_num_key_heads", facts.tp, "tensor", _WHOLE_HEADS),
        ("linear_num_value_heads", facts.tp, "tensor", _WHOLE_HEADS),
        ("shared_expert_intermediate_size", facts.tp, "tensor", "every rank holds an equal part of the shared expert"),
        *_expert_rules(facts),
        _stages(facts),
    ]
    return _problems(dims, rules)


_Rule = tuple[str, int, str, str]


def _fields(dims: ModelDims, names: dict[str, str]) -> dict[str, int]:
    return {field: dims.resolve(name) for field, name in names.items()}


def _attention_rules(facts: RunFacts) -> list[_Rule]:
    return [
        ("num_attention_heads", facts.tp, "tensor", _WHOLE_HEADS),
        ("num_key_value_heads", facts.tp, "tensor", "kv heads are not replicated over ranks here"),
    ]


def _dense_mlp_rule(facts: RunFacts) -> _Rule:
    return ("intermediate_size", facts.tp, "tensor", "every rank holds an equal part of the MLP")


def _expert_rules(facts: RunFacts) -> list[_Rule]:
    return [
        ("num_experts", facts.ep, "expert", "every rank holds the same number of experts"),
        ("moe_intermediate_size", facts.etp, "expert tensor", "every rank holds an equal part of each expert"),
    ]


def _stages(facts: RunFacts) -> _Rule:
    return ("num_hidden_layers", facts.pp, "pipeline", "every stage holds the same number of layers")


def _problems(dims: ModelDims, rules: list[_Rule]) -> list[Diagnostic]:
    return [
        Diagnostic(
            subject=f"{name} = {dims.resolve(name)}",
            reason=f"not divisible by the {kind} parallel size {parts}, and {why}",
            cure=f"use a {kind} parallel size that divides {dims.resolve(name)}",
        )
        for name, parts, kind, why in rules
        if dims.resolve(name) % parts
    ]
