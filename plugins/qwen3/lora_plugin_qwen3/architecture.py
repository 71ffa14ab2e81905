"""Dense Qwen3: its sites and the rest of its base, as data."""

from __future__ import annotations

from lora_plugins_sdk import Architecture, BaseWeight, Concat, Projection, QueryGroups, Site, SiteKind, Tied

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"
_QUERY = "num_attention_heads * head_dim"
_KEY_VALUE = "num_key_value_heads * head_dim"


def _projection(name: str, in_dim: str, out_dim: str) -> Projection:
    return Projection(hf=f"{_HF}.{name}", in_dim=in_dim, out_dim=out_dim)


ARCHITECTURE = Architecture(
    name="qwen3",
    model_types=("qwen3",),
    # transformers' own default, which is not hidden_size // num_attention_heads.
    fallbacks={"head_dim": "128"},
    # Uneven on purpose: an odd vocabulary is padded under TP, and no two widths are equal.
    tiny_config={
        "model_type": "qwen3",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    quickstart_config={
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
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
        Site(
            path=f"{_HOST}.mlp.linear_fc1",
            kind=SiteKind.COLUMN,
            fused_norm=True,
            projections=(
                _projection("mlp.gate_proj", "hidden_size", "intermediate_size"),
                _projection("mlp.up_proj", "hidden_size", "intermediate_size"),
            ),
        ),
        Site(
            path=f"{_HOST}.mlp.linear_fc2",
            kind=SiteKind.ROW,
            projections=(_projection("mlp.down_proj", "intermediate_size", "hidden_size"),),
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
        BaseWeight(host=f"{_HOST}.self_attention.linear_qkv.layer_norm_weight", hf=(f"{_HF}.input_layernorm.weight",)),
        BaseWeight(host=f"{_HOST}.self_attention.q_layernorm.weight", hf=(f"{_HF}.self_attn.q_norm.weight",)),
        BaseWeight(host=f"{_HOST}.self_attention.k_layernorm.weight", hf=(f"{_HF}.self_attn.k_norm.weight",)),
        BaseWeight(host=f"{_HOST}.mlp.linear_fc1.layer_norm_weight", hf=(f"{_HF}.post_attention_layernorm.weight",)),
        BaseWeight(host="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    ),
)
