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
_BANK = re.compile(r"mlp\.(?P<bank>experts|shared_experts)\.(?:(?P<expert>\d+)\.)?(?P<leaf>\w+)")
# Published names of Inkling's linears; SGLang renames them.
_PUBLISHED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


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


def _mlp(place: str, *, gate_up: str, down_as: str) -> dict[str, tuple[tuple[Rows, ...], ...]]:
    """Gate, up and down as linears of their own, or with gate and up in one tensor of the base."""
    gate, up, down = (f"{place}.{leaf}_proj" for leaf in ("gate", "up", "down"))
    half = (Rows(weight=gate_up, share=2),)
    return {
        gate: (_own(gate), half),
        up: (_own(up), half),
        down: (_own(down), _own(down_as)),
        f"{place}.gate_up_proj": (_own(gate, up), _own(gate_up)),
    }


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
    **_mlp("mlp", gate_up="mlp.w13_dn", down_as="mlp.w2_md"),
    **_mlp("mlp.shared_expert", gate_up="mlp.shared_expert.gate_up_proj", down_as="mlp.shared_expert.down_proj"),
    "linear_attn.in_proj_qkvz": (_own(_QKV, "linear_attn.in_proj_z"),),
    "linear_attn.in_proj_q": ((Rows(weight=_QKV, width=_KEYS),),),
    "linear_attn.in_proj_k": ((Rows(weight=_QKV, width=_KEYS),),),
    "linear_attn.in_proj_v": ((Rows(weight=_QKV, width=_VALUES),),),
    "linear_attn.in_proj_z": (_own("linear_attn.in_proj_z"),),
    "linear_attn.out_proj": (_own("linear_attn.out_proj"),),
    # Inkling, which is served as it is published alone (`refuse_other_layouts`).
    **{ours: (_own(ours),) for ours in (*_DU, "attn.wo_ud")},
    "attn.qkvr": (_own(*_DU),),
}
# Bank of experts -> the tensors that hold all of them, gate and up together and down: [experts, rows, in].
_PACKED = {
    "experts": (("gate_up_proj", "down_proj"), ("w13_weight", "w2_weight")),
    "shared_experts": (("shared_w13_weight", "shared_w2_weight"),),
}


def _experts(bank: str) -> dict[str, tuple[tuple[Rows, ...], ...]]:
    """The same for one expert of a bank, by leaf. Routed experts may be stored one by one too."""
    place = f"mlp.{bank}"
    gate, up, down = (f"{place}.0.{leaf}_proj" for leaf in ("gate", "up", "down"))
    both = [f"{place}.{gate_up}" for gate_up, _ in _PACKED[bank]]
    halves = tuple((Rows(weight=one, share=2),) for one in both)
    rows = {
        "gate_proj": halves,
        "up_proj": halves,
        "gate_up_proj": tuple(map(_own, both)),
        "down_proj": tuple(_own(f"{place}.{packed}") for _, packed in _PACKED[bank]),
    }
    if bank == "shared_experts":
        return rows
    alone = {"gate_proj": _own(gate), "up_proj": _own(up), "gate_up_proj": _own(gate, up), "down_proj": _own(down)}
    return {leaf: (alone[leaf], *packed) for leaf, packed in rows.items()}


EXPERTS: Mapping[str, Mapping[str, tuple[tuple[Rows, ...], ...]]] = {bank: _experts(bank) for bank in _PACKED}


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
    found = _MODULE.fullmatch(module)
    if found is None:
        return _outside(module.rsplit(".", 1)[-1], base, hf_config, rank)
    layer = int(found["layer"])
    stem, _, leaf = found["path"].rpartition(".")
    path = f"{stem}.{_PUBLISHED.get(leaf, leaf)}"
    weights = base.layers.get(layer)
    if weights is None:
        return f"the base has no layer {layer}"
    bank = _BANK.fullmatch(path)
    known = (EXPERTS[bank["bank"]].get(bank["leaf"]) if bank else LINEARS.get(path)) or ()
    if not known:
        return "SGLang has no LoRA for this module"
    sizes = next(
        (_sizes(rows, weights, hf_config) for rows in known if all(one.weight in weights for one in rows)), None
    )
    if sizes is None:
        return f"layer {layer} of the base has no such module, and SGLang would leave the factor out"
    out, width = sizes
    if bank is None:
        return Factors(a=(rank, width), b=(out, rank), form="[rank, in] and [out, rank]")
    experts = base.experts(layer, bank["bank"])
    return _expert(bank["expert"], bank["leaf"], experts, out, width, rank=rank, shared_outer=shared_outer)


def _outside(leaf: str, base: BaseShapes, hf_config: Mapping[str, Any], rank: int) -> Factors | str:
    if leaf not in ("lm_head", "embed_tokens"):
        return "SGLang has no LoRA for this module"
    if leaf not in base.outside:
        return f"the base has no {leaf}"
    rows, hidden = base.outside[leaf]
    vocabulary = hf_config.get("unpadded_vocab_size") or rows
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
