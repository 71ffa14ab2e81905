"""A small hybrid of linear and gated full attention: declarations alone, no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lora_plugins_sdk import (
    Architecture,
    BaseWeight,
    Concat,
    LayerTypes,
    Multimodal,
    Projection,
    QueryGroups,
    Site,
    SiteKind,
)

HF_CONFIG: dict[str, Any] = {
    "model_type": "hybrid",
    "num_hidden_layers": 1,
    "vocab_size": 7,
    "num_experts": 3,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "key_heads": 2,
    "value_heads": 4,
    "linear_head_dim": 3,
}

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"
_KEY, _VALUE = "key_heads * linear_head_dim", "value_heads * linear_head_dim"


def _in(leaf: str, out_dim: str, sections: tuple[str, ...] = ()) -> Projection:
    return Projection(hf=f"{_HF}.{leaf}", in_dim="hidden_size", out_dim=out_dim, sections=sections)


IN_PROJ = Site(
    path=f"{_HOST}.self_attention.in_proj",
    kind=SiteKind.COLUMN,
    projections=(
        _in("linear_attn.in_proj_qkv", f"2 * {_KEY} + {_VALUE}", (_KEY, _KEY, _VALUE)),
        _in("linear_attn.in_proj_z", _VALUE),
        _in("linear_attn.in_proj_b", "value_heads"),
        _in("linear_attn.in_proj_a", "value_heads"),
    ),
)
LINEAR_QKV = Site(
    path=f"{_HOST}.self_attention.linear_qkv",
    kind=SiteKind.COLUMN,
    pack=QueryGroups(gated_heads="num_attention_heads"),
    projections=(
        _in("self_attn.q_proj", "2 * num_attention_heads * head_dim"),
        _in("self_attn.k_proj", "num_key_value_heads * head_dim"),
        _in("self_attn.v_proj", "num_key_value_heads * head_dim"),
    ),
)


LAYER_TYPES = LayerTypes(types=("linear_attention", "full_attention"), every="full_attention_interval")
LINEAR, FULL = LAYER_TYPES.only("linear_attention"), LAYER_TYPES.only("full_attention")
ROUTER = Site(
    path=f"{_HOST}.mlp.router",
    kind=SiteKind.REPLICATED,
    method="gating",
    all_linear=False,
    projections=(_in("mlp.gate", "num_experts"),),
)
LAYERED = Architecture(
    name="layered",
    model_types=("hybrid", "hybrid_vision"),
    fallbacks={"full_attention_interval": "4"},
    sites=(replace(IN_PROJ, layers=LINEAR), replace(LINEAR_QKV, layers=FULL), ROUTER),
    base_weights=(
        BaseWeight(host="embedding.weight", hf=("model.embed_tokens.weight",), pack=Concat(pad=True)),
        BaseWeight(
            host=f"{_HOST}.self_attention.conv1d.weight",
            hf=(f"{_HF}.linear_attn.conv1d.weight",),
            pack=Concat(),
            sections=((_KEY, _KEY, _VALUE),),
            layers=LINEAR,
        ),
        BaseWeight(
            host=f"{_HOST}.self_attention.A_log", hf=(f"{_HF}.linear_attn.A_log",), pack=Concat(), layers=LINEAR
        ),
        BaseWeight(
            host=f"{_HOST}.self_attention.out_norm.weight",
            hf=(f"{_HF}.linear_attn.norm.weight",),
            layers=LINEAR,
            offset=-1.0,
        ),
        BaseWeight(host="head.weight", hf=("lm_head.weight",)),
    ),
    multimodal=Multimodal(),
    left_alone=("model.visual.*", "mtp.*"),
)


def architecture_of(*sites: Site) -> Architecture:
    """An architecture with these sites."""
    return Architecture(name="hybrid", model_types=("hybrid",), sites=sites)
