"""Qwen3-MoE: its sites and the rest of its base, as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lora_plugins_sdk import (
    Architecture,
    BaseWeight,
    Concat,
    LayerTypes,
    OnlyLayers,
    Projection,
    QueryGroups,
    Site,
    SiteKind,
    Tied,
)

# Every so many layers one has experts, unless the config takes it out. transformers knows no list of types.
LAYERS = LayerTypes(types=("dense", "sparse"), key=None, every="decoder_sparse_step", exempt="mlp_only_layers")
DENSE, SPARSE = (LAYERS.only(kind) for kind in LAYERS.types)

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"
_QUERY = "num_attention_heads * head_dim"
_KEY_VALUE = "num_key_value_heads * head_dim"


def _projection(name: str, in_dim: str, out_dim: str, *, name_taken: bool = False) -> Projection:
    return Projection(hf=f"{_HF}.{name}", in_dim=in_dim, out_dim=out_dim, name_taken=name_taken)


def _mlp(host: str, hf: str, width: str, layers: OnlyLayers, experts: str | None = None) -> tuple[Site, Site]:
    """The two linears of a gated MLP; of every routed expert, with `{expert}` in `hf`."""
    # The experts' input is normalised by a module of its own: the router sees it too.
    dense = experts is None
    widths = {"gate": ("hidden_size", width), "up": ("hidden_size", width), "down": (width, "hidden_size")}
    # PEFT takes every module of these names in this model for the experts'.
    gate, up, down = (_projection(f"{hf}.{name}_proj", *two, name_taken=dense) for name, two in widths.items())
    path, fused = f"{_HOST}.{host}.linear", f"{_HF}.mlp.experts"
    both: dict[str, Any] = {"layers": layers, "experts": experts}
    gate_up = Site(path=f"{path}_fc1", kind=SiteKind.COLUMN, fused_norm=dense, projections=(gate, up), **both)
    output = Site(path=f"{path}_fc2", kind=SiteKind.ROW, projections=(down,), **both)
    if dense:
        return gate_up, output
    return replace(gate_up, fused_hf=f"{fused}.gate_up_proj"), replace(output, fused_hf=f"{fused}.down_proj")


def _norm(host: str, hf: str, layers: OnlyLayers | None = None) -> BaseWeight:
    return BaseWeight(host=f"{_HOST}.{host}", hf=(f"{_HF}.{hf}.weight",), layers=layers)


_SMALL = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

ARCHITECTURE = Architecture(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    # transformers' own defaults.
    fallbacks={"head_dim": "hidden_size // num_attention_heads", "decoder_sparse_step": "1"},
    # What transformers 5 writes in place of the published key.
    spellings={"num_local_experts": {"num_experts": "num_local_experts"}},
    # Uneven on purpose: an odd vocabulary is padded under TP, no two widths are equal, and each half of the layers has
    # both kinds, in another order.
    tiny_config=_SMALL
    | {
        "vocab_size": 61,
        "hidden_size": 36,
        "intermediate_size": 44,
        "num_hidden_layers": 4,
        "mlp_only_layers": [0, 3],
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
    },
    # Experts in every layer, as in the published models: SGLang builds no other.
    quickstart_config=_SMALL
    | {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
    },
    sites=(
        Site(
            path="embedding.word_embeddings",
            kind=SiteKind.ROW,
            pack=Concat(pad=True),
            projections=(Projection(hf="model.embed_tokens", in_dim="vocab_size", out_dim="hidden_size"),),
            embedding=True,
            all_linear=False,
            tied=Tied(when="tie_word_embeddings", to="lm_head.weight"),
        ),
        Site(
            path=f"{_HOST}.self_attention.linear_qkv",
            kind=SiteKind.COLUMN,
            fused_norm=True,
            pack=QueryGroups(groups="num_key_value_heads"),
            projections=(
                _projection("self_attn.q_proj", "hidden_size", _QUERY),
                _projection("self_attn.k_proj", "hidden_size", _KEY_VALUE),
                _projection("self_attn.v_proj", "hidden_size", _KEY_VALUE),
            ),
        ),
        Site(
            path=f"{_HOST}.self_attention.linear_proj",
            kind=SiteKind.ROW,
            projections=(_projection("self_attn.o_proj", _QUERY, "hidden_size"),),
        ),
        *_mlp("mlp", "mlp", "intermediate_size", DENSE),
        Site(
            path=f"{_HOST}.mlp.router",
            kind=SiteKind.REPLICATED,
            layers=SPARSE,
            method="gating",  # before the choice of experts, which the forward makes
            all_linear=False,  # not every rollout engine can serve it
            projections=(_projection("mlp.gate", "hidden_size", "num_experts"),),
        ),
        *_mlp("mlp.experts", "mlp.experts.{expert}", "moe_intermediate_size", SPARSE, "num_experts"),
        Site(
            path="output_layer",
            kind=SiteKind.COLUMN,
            pack=Concat(pad=True),
            projections=(Projection(hf="lm_head", in_dim="hidden_size", out_dim="vocab_size"),),
            all_linear=False,
            tied=Tied(when="tie_word_embeddings", to="model.embed_tokens.weight"),
        ),
    ),
    base_weights=(
        _norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
        _norm("self_attention.q_layernorm.weight", "self_attn.q_norm"),
        _norm("self_attention.k_layernorm.weight", "self_attn.k_norm"),
        _norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm", DENSE),
        _norm("pre_mlp_layernorm.weight", "post_attention_layernorm", SPARSE),
        BaseWeight(host="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    ),
)
