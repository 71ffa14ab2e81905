"""A small architecture that has every kind of site, for tests of the SDK without any real model's plugin. No torch."""

from __future__ import annotations

from typing import Any

from lora_plugins_sdk import Architecture, BaseWeight, Concat, Projection, QueryGroups, Site, SiteKind, Tied

HF_CONFIG: dict[str, Any] = {
    "model_type": "toy",
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 10,
    "vocab_size": 7,
    "patch_size": 5,
    "tie_word_embeddings": False,
}

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"


def _layer(leaf: str, in_dim: str, out_dim: str) -> Projection:
    return Projection(hf=f"{_HF}.{leaf}", in_dim=in_dim, out_dim=out_dim)


ARCHITECTURE = Architecture(
    name="toy",
    model_types=("toy",),
    fallbacks={"head_dim": "hidden_size // num_attention_heads"},
    sites=(
        Site(
            path=f"{_HOST}.self_attention.linear_qkv",
            kind=SiteKind.COLUMN,
            fused_norm=True,
            pack=QueryGroups(),
            projections=(
                _layer("self_attn.q_proj", "hidden_size", "num_attention_heads * head_dim"),
                _layer("self_attn.k_proj", "hidden_size", "num_key_value_heads * head_dim"),
                _layer("self_attn.v_proj", "hidden_size", "num_key_value_heads * head_dim"),
            ),
        ),
        Site(
            path=f"{_HOST}.self_attention.linear_proj",
            kind=SiteKind.ROW,
            projections=(_layer("self_attn.o_proj", "num_attention_heads * head_dim", "hidden_size"),),
        ),
        Site(
            path=f"{_HOST}.mlp.linear_fc1",
            kind=SiteKind.COLUMN,
            projections=(
                _layer("mlp.gate_proj", "hidden_size", "intermediate_size"),
                _layer("mlp.up_proj", "hidden_size", "intermediate_size"),
            ),
        ),
        Site(
            path=f"{_HOST}.mlp.linear_fc2",
            kind=SiteKind.ROW,
            projections=(_layer("mlp.down_proj", "intermediate_size", "hidden_size"),),
        ),
        Site(
            path="vision.patch_linear",
            kind=SiteKind.REPLICATED,
            region="vision",
            projections=(Projection(hf="visual.patch_proj", in_dim="patch_size", out_dim="hidden_size"),),
        ),
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
        BaseWeight(host="embedding.weight", hf=("model.embed_tokens.weight",), pack=Concat(pad=True)),
        BaseWeight(host=f"{_HOST}.self_attention.linear_qkv.layer_norm_weight", hf=(f"{_HF}.input_layernorm.weight",)),
    ),
)

LAYER_MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
ALL_LINEAR = frozenset(f"model.layers.{layer}.{leaf}" for layer in range(2) for leaf in LAYER_MODULES) | {
    "visual.patch_proj"
}
