"""Every module that SGLang takes LoRA factors for, and the shapes it will copy them into.

SGLang checks neither: a factor of another name or shape is accepted when it is loaded and ends the engine at the first
request, and some are left out without a word. Measured with SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_harness.engines.sglang.sync.base_shapes import BaseShapes, Shape
from lora_plugins_sdk.dims import ModelDims

_MODULE = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<path>.+)")
_ROUTED = re.compile(r"mlp\.experts\.(?:(?P<expert>\d+)\.)?(?P<leaf>\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Output rows that a module shares with one weight of the base.

    Args:
        weight: its path in the layer.
        share: the rows are one in so many of the weight's.
        width: config expression for the number of rows; the weight's own without it.
    """

    weight: str
    share: int = 1
    width: str = ""


def _own(*weights: str) -> tuple[Rows, ...]:
    return tuple(Rows(weight=one) for one in weights)


def _mlp(place: str) -> dict[str, tuple[tuple[Rows, ...], ...]]:
    gate, up, down = (f"{place}.{leaf}_proj" for leaf in ("gate", "up", "down"))
    return {gate: (_own(gate),), up: (_own(up),), down: (_own(down),), f"{place}.gate_up_proj": (_own(gate, up),)}


_QKV = "linear_attn.in_proj_qkv"
_KEYS, _VALUES = "linear_num_key_heads * linear_key_head_dim", "linear_num_value_heads * linear_value_head_dim"
_Q, _K, _V = (f"self_attn.{leaf}_proj" for leaf in "qkv")
_DU = tuple(f"attn.{leaf}" for leaf in ("wq_du", "wk_dv", "wv_dv", "wr_du"))

# Module in SGLang's names -> what the rows of its B are, one alternative for each layout that bases are stored in.
# The columns of its A are those of the same weights.
LINEARS: Mapping[str, tuple[tuple[Rows, ...], ...]] = {
    _Q: (_own(_Q),),
    _K: (_own(_K),),
    _V: (_own(_V),),
    "self_attn.qkv_proj": (_own(_Q, _K, _V),),
    "self_attn.o_proj": (_own("self_attn.o_proj"),),
    **_mlp("mlp"),
    **_mlp("mlp.shared_expert"),
    "linear_attn.in_proj_qkvz": (_own(_QKV, "linear_attn.in_proj_z"),),
    "linear_attn.in_proj_q": ((Rows(weight=_QKV, width=_KEYS),),),
    "linear_attn.in_proj_k": ((Rows(weight=_QKV, width=_KEYS),),),
    "linear_attn.in_proj_v": ((Rows(weight=_QKV, width=_VALUES),),),
    "linear_attn.in_proj_z": (_own("linear_attn.in_proj_z"),),
    "linear_attn.out_proj": (_own("linear_attn.out_proj"),),
    # Inkling, stored as published or in transformers' layout.
    **{
        ours: (_own(ours), _own(f"self_attn.{leaf}_proj"))
        for ours, leaf in zip((*_DU, "attn.wo_ud"), "qkvro", strict=True)
    },
    "attn.qkvr": (_own(*_DU), _own(*(f"self_attn.{leaf}_proj" for leaf in "qkvr"))),
}
# Leaf of a routed expert -> the same, for one expert.
EXPERTS: Mapping[str, tuple[tuple[Rows, ...], ...]] = {
    "gate_proj": (
        _own("mlp.experts.0.gate_proj"),
        (Rows(weight="mlp.experts.gate_up_proj", share=2),),
        (Rows(weight="mlp.experts.w13_weight", share=2),),
    ),
    "up_proj": (
        _own("mlp.experts.0.up_proj"),
        (Rows(weight="mlp.experts.gate_up_proj", share=2),),
        (Rows(weight="mlp.experts.w13_weight", share=2),),
    ),
    "gate_up_proj": (
        _own("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"),
        _own("mlp.experts.gate_up_proj"),
        _own("mlp.experts.w13_weight"),
    ),
    "down_proj": (
        _own("mlp.experts.0.down_proj"),
        _own("mlp.experts.down_proj"),
        _own("mlp.experts.w2_weight"),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Shapes of one pair; `form` says in words which layout they are."""

    a: Shape
    b: Shape
    form: str


def accepted_factors(
    module: str, base: BaseShapes, hf_config: Mapping[str, Any], *, rank: int, shared_outer: bool
) -> Factors | str:
    """The shapes that SGLang takes for a module of this base, or why it takes none.

    Args:
        module: SGLang's name, with or without a prefix before `layers.`.
        base: the weights that the engine serves.
        hf_config: the language model's config.
        rank: the adapter's rank.
        shared_outer: whether the engine was started for experts that share their outer factors.
    """
    leaf = module.rsplit(".", 1)[-1]
    found = _MODULE.fullmatch(module)
    if found is None:
        return _outside(leaf, base, rank)
    layer, path = int(found["layer"]), found["path"]
    weights = base.layers.get(layer)
    if weights is None:
        return f"the base has no layer {layer}"
    routed = _ROUTED.fullmatch(path)
    known = (EXPERTS.get(routed["leaf"]) if routed else LINEARS.get(path)) or ()
    if not known:
        return "SGLang has no LoRA for this module"
    sizes = next(
        (_sizes(rows, weights, hf_config) for rows in known if all(one.weight in weights for one in rows)), None
    )
    if sizes is None:
        return f"layer {layer} of the base has no such module, and SGLang would leave the factor out"
    out, width = sizes
    if routed is None:
        return Factors(a=(rank, width), b=(out, rank), form="[rank, in] and [out, rank]")
    return _expert(routed["expert"], leaf, base.experts(layer), out, width, rank=rank, shared_outer=shared_outer)


def _outside(leaf: str, base: BaseShapes, rank: int) -> Factors | str:
    if leaf not in ("lm_head", "embed_tokens"):
        return "SGLang has no LoRA for this module"
    if leaf not in base.outside:
        return f"the base has no {leaf}"
    vocabulary, hidden = base.outside[leaf]
    if leaf == "embed_tokens":
        return Factors(a=(rank, vocabulary), b=(hidden, rank), form="[rank, vocabulary] and [hidden, rank]")
    return Factors(a=(rank, hidden), b=(vocabulary, rank), form="[rank, hidden] and [vocabulary, rank]")


def _sizes(rows: tuple[Rows, ...], weights: Mapping[str, Shape], hf_config: Mapping[str, Any]) -> tuple[int, int]:
    out = 0
    for one in rows:
        stored = weights[one.weight][-2]
        out += ModelDims(hf_config).resolve(one.width) if one.width else stored // one.share
    return out, weights[rows[0].weight][-1]


def _expert(
    expert: str | None, leaf: str, experts: int, out: int, width: int, *, rank: int, shared_outer: bool
) -> Factors | str:
    if expert is not None:
        if shared_outer:
            return "the engine was started for experts that share their outer factors, and this expert has its own"
        if int(expert) >= experts:
            return f"the layer has {experts} experts"
        return Factors(a=(rank, width), b=(out, rank), form="[rank, in] and [out, rank]")
    # Shared outer: A of gate and up, B of down; the engine keeps one for all experts.
    a_experts, b_experts = (
        (experts, experts) if not shared_outer else (experts, 1) if leaf == "down_proj" else (1, experts)
    )
    return Factors(
        a=(a_experts, rank, width),
        b=(b_experts, out, rank),
        form="experts that share their outer factors"
        if shared_outer
        else "[experts, rank, in] and [experts, out, rank]",
    )
