"""Projections that SGLang computes as one linear: it takes all factors of such a group or none.

It concatenates the factors of a group without looking; a group with a member missing fails or is taken for something
else. A missing member gets factors of zeros here, which add exactly nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.serving.sglang_places import IN_PROJ_QKV, Place, family_of, is_delta_net_hybrid, text_config

if TYPE_CHECKING:
    from torch import Tensor

_QKVZ = "in_proj_qkvz"
SHARED = ".shared_experts."
_GROUPS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    _QKVZ: ("linear_attn.in_proj_q", "linear_attn.in_proj_k", "linear_attn.in_proj_v", "linear_attn.in_proj_z"),
    "qkvr": ("attn.wq_du", "attn.wk_dv", "attn.wv_dv", "attn.wr_du"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Factors `a` `[.., rank, in]` and `b` `[.., out, rank]`."""

    a: Tensor
    b: Tensor


def complete_groups(
    pairs: Mapping[Place, Pair], hf_config: Mapping[str, Any], *, shared_outer: bool | None
) -> dict[str, Pair]:
    """Module in SGLang's terms -> its factors, each group whole; no two tensors share memory.

    Args:
        pairs: what is adapted.
        hf_config: the base's `config.json`.
        shared_outer: whether routed experts share their outer factors; None where none is adapted.

    Raises:
        LoraError: a member is missing whose width the config does not tell.
    """
    named: dict[str, Pair] = {}
    for place, pair in pairs.items():
        if place.module.endswith(IN_PROJ_QKV):
            named |= _split_qkv(place, pair, hf_config)
        else:
            named[place.module] = pair
    for place in pairs:
        _complete(place, named, hf_config)
    if any(place.experts for place in pairs) and not shared_outer:
        named = {module: _own_factors(pair) if SHARED in module else pair for module, pair in named.items()}
    return named


def _own_factors(pair: Pair) -> Pair:
    """The same with a copy of a shared factor for each expert: shared experts have the layout of the routed ones."""
    experts = max(pair.a.shape[0], pair.b.shape[0])
    a, b = (one.expand(experts, *one.shape[1:]).clone() for one in (pair.a, pair.b))
    return Pair(a=a, b=b)


def shared_factor(pair: Pair, place: Place) -> Pair:
    """The inverse of `_own_factors`: copies of the outer factor (A of gate and up, B of down) are one again."""
    a, b = pair.a, pair.b
    if place.target == "down_proj":
        return Pair(a=a, b=_once(b))
    return Pair(a=_once(a), b=b)


def _once(factor: Tensor) -> Tensor:
    return factor[:1].clone() if bool((factor == factor[:1]).all()) else factor


def _split_qkv(place: Place, pair: Pair, hf_config: Mapping[str, Any]) -> dict[str, Pair]:
    """SGLang has four projections where HF has `in_proj_qkv` and `in_proj_z`: the same A, and the rows of B."""
    stem = place.module.removesuffix("qkv")
    widths = [_width(f"linear_attn.in_proj_{part}", hf_config) for part in "qkv"]
    if sum(widths) != pair.b.shape[0]:
        raise LoraError(
            place.module,
            reason=f"lora_B has {pair.b.shape[0]} rows, the config's q, k and v together {sum(widths)}",
            cure="give the base that the adapter was made for",
        )
    parts = pair.b.split(widths)
    return {f"{stem}{part}": Pair(a=pair.a.clone(), b=b.clone()) for part, b in zip("qkv", parts, strict=True)}


def _complete(place: Place, named: dict[str, Pair], hf_config: Mapping[str, Any]) -> None:
    if place.target == "gate_up_proj":
        stem = place.module.rsplit(".", 1)[0]
        have = named[place.module]
        for leaf in ("gate_proj", "up_proj"):
            named.setdefault(f"{stem}.{leaf}", Pair(a=have.a.new_zeros(have.a.shape), b=have.b.new_zeros(have.b.shape)))
        return
    members = _GROUPS.get(place.target, ())
    stem = f"layers.{place.layer}."
    present = [member for member in members if f"{stem}{member}" in named]
    for member in members:
        if member not in present:
            have = named[f"{stem}{present[0]}"]
            width = _width(member, hf_config, place.layer)
            named[f"{stem}{member}"] = Pair(
                a=have.a.new_zeros(have.a.shape), b=have.b.new_zeros((width, have.b.shape[-1]))
            )


def _width(member: str, hf_config: Mapping[str, Any], layer: int | None = None) -> int:
    """Output width of one member of a group; `layer` is its layer, which matters in Inkling.

    Raises:
        LoraError: the config does not tell.
    """
    config = text_config(hf_config)
    if family_of(hf_config) == "inkling":
        # Layers with a sliding window have sizes of their own.
        kinds, windowed = config.get("layer_types"), config.get("local_layer_ids") or ()
        sliding = layer in windowed if kinds is None else layer is not None and kinds[layer] == "hybrid_sliding"
        sizes = ("num_attention_heads", "num_key_value_heads", "head_dim")
        heads, groups, width = (config.get(f"swa_{size}" if sliding else size) for size in sizes)
        own = {"wq_du": (heads, width), "wk_dv": (groups, width), "wv_dv": (groups, width)}
        return _product(member, own.get(member.removeprefix("attn."), (heads, config.get("d_rel"))))
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    keys, values = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    gate = 2 if is_delta_net_hybrid(config) else 1  # an output gate as wide as the queries
    head_dim = config.get("head_dim") or _quotient(config.get("hidden_size"), heads)
    factors: dict[str, tuple[object, ...]] = {
        "self_attn.q_proj": (heads, head_dim, gate),
        "self_attn.k_proj": (groups, head_dim),
        "self_attn.v_proj": (groups, head_dim),
        "linear_attn.in_proj_q": (keys, config.get("linear_key_head_dim")),
        "linear_attn.in_proj_k": (keys, config.get("linear_key_head_dim")),
        "linear_attn.in_proj_v": (values, config.get("linear_value_head_dim")),
        "linear_attn.in_proj_z": (values, config.get("linear_value_head_dim")),
    }
    return _product(member, factors[member])


def _product(member: str, factors: Iterable[object]) -> int:
    width = 1
    for factor in factors:
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise LoraError(
                member,
                reason="its width is not in the base's config.json",
                cure="give the config.json that belongs to the adapter's base",
            )
        width *= factor
    return width


def _quotient(total: object, parts: object) -> int | None:
    return total // parts if isinstance(total, int) and isinstance(parts, int) and parts else None
