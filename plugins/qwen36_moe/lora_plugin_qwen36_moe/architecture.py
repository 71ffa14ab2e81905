"""Qwen3.5 and Qwen3.6 MoE: sites and the rest of the base, as data."""

from __future__ import annotations

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
    Tied,
)

# The order matters where a config gives an interval in place of a list: every so many layers one is of the last type.
LAYERS = LayerTypes(types=("linear_attention", "full_attention"), every="full_attention_interval")
_LINEAR, _FULL = (LAYERS.only(kind) for kind in LAYERS.types)

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"
_GDN, _ATTENTION, _MLP = f"{_HF}.linear_attn", f"{_HF}.self_attn", f"{_HF}.mlp"

_QUERY = "num_attention_heads * head_dim"
_KEY_VALUE = "num_key_value_heads * head_dim"
# Widths of the gated delta net: queries and keys, values and output gates, the two gates of each value head.
_KEYS = "linear_num_key_heads * linear_key_head_dim"
_VALUES = "linear_num_value_heads * linear_value_head_dim"
_HEADS = "linear_num_value_heads"


def _projection(hf: str, in_dim: str, out_dim: str, sections: tuple[str, ...] = ()) -> Projection:
    return Projection(hf=hf, in_dim=in_dim, out_dim=out_dim, sections=sections)


ARCHITECTURE = Architecture(
    name="qwen36_moe",
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    # transformers' own defaults.
    fallbacks={"head_dim": "256", "full_attention_interval": "4"},
    multimodal=Multimodal(),
    left_alone=("model.visual.*", "mtp.*"),
    # Uneven on purpose: an odd vocabulary is padded under TP, and no two widths of one weight are equal.
    tiny_config={
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 61,
        "hidden_size": 36,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    quickstart_config={
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        # At an interval, as in the published models: SGLang knows no other.
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    # With fast decays a head's output is at some tokens nearly zero, and the norm after it makes rounding errors large.
    tiny_values={"*.A_log": -2.0},
    lacks={
        "context-parallel": "a gated delta net's state is not handed from rank to rank",
    },
    sites=(
        Site(
            path=f"{_HOST}.self_attention.linear_qkv",
            kind=SiteKind.COLUMN,
            layers=_FULL,
            fused_norm=True,
            # HF has a gate after each query head, the host the gates of a group after its queries.
            pack=QueryGroups(groups="num_key_value_heads", gated_heads="num_attention_heads"),
            projections=(
                _projection(f"{_ATTENTION}.q_proj", "hidden_size", f"2 * {_QUERY}"),
                _projection(f"{_ATTENTION}.k_proj", "hidden_size", _KEY_VALUE),
                _projection(f"{_ATTENTION}.v_proj", "hidden_size", _KEY_VALUE),
            ),
        ),
        Site(
            path=f"{_HOST}.self_attention.linear_proj",
            kind=SiteKind.ROW,
            layers=_FULL,
            projections=(_projection(f"{_ATTENTION}.o_proj", _QUERY, "hidden_size"),),
        ),
        Site(
            path=f"{_HOST}.self_attention.in_proj",
            kind=SiteKind.COLUMN,
            layers=_LINEAR,
            fused_norm=True,
            projections=(
                _projection(f"{_GDN}.in_proj_qkv", "hidden_size", f"2 * {_KEYS} + {_VALUES}", (_KEYS, _KEYS, _VALUES)),
                _projection(f"{_GDN}.in_proj_z", "hidden_size", _VALUES),
                _projection(f"{_GDN}.in_proj_b", "hidden_size", _HEADS),
                _projection(f"{_GDN}.in_proj_a", "hidden_size", _HEADS),
            ),
        ),
        Site(
            path=f"{_HOST}.self_attention.out_proj",
            kind=SiteKind.ROW,
            layers=_LINEAR,
            projections=(_projection(f"{_GDN}.out_proj", _VALUES, "hidden_size"),),
        ),
        Site(
            path=f"{_HOST}.mlp.router",
            kind=SiteKind.REPLICATED,
            method="gating",  # before the choice of experts, which the forward makes
            all_linear=False,  # not every rollout engine can serve it
            projections=(_projection(f"{_MLP}.gate", "hidden_size", "num_experts"),),
        ),
        Site(
            path=f"{_HOST}.mlp.experts.linear_fc1",
            kind=SiteKind.COLUMN,
            experts="num_experts",
            fused_hf=f"{_MLP}.experts.gate_up_proj",
            projections=(
                _projection(f"{_MLP}.experts.{{expert}}.gate_proj", "hidden_size", "moe_intermediate_size"),
                _projection(f"{_MLP}.experts.{{expert}}.up_proj", "hidden_size", "moe_intermediate_size"),
            ),
        ),
        Site(
            path=f"{_HOST}.mlp.experts.linear_fc2",
            kind=SiteKind.ROW,
            experts="num_experts",
            fused_hf=f"{_MLP}.experts.down_proj",
            projections=(_projection(f"{_MLP}.experts.{{expert}}.down_proj", "moe_intermediate_size", "hidden_size"),),
        ),
        Site(
            path=f"{_HOST}.mlp.shared_experts.linear_fc1",
            kind=SiteKind.COLUMN,
            projections=(
                _projection(f"{_MLP}.shared_expert.gate_proj", "hidden_size", "shared_expert_intermediate_size"),
                _projection(f"{_MLP}.shared_expert.up_proj", "hidden_size", "shared_expert_intermediate_size"),
            ),
        ),
        Site(
            path=f"{_HOST}.mlp.shared_experts.linear_fc2",
            kind=SiteKind.ROW,
            projections=(
                _projection(f"{_MLP}.shared_expert.down_proj", "shared_expert_intermediate_size", "hidden_size"),
            ),
        ),
        Site(
            path="embedding.word_embeddings",
            kind=SiteKind.ROW,
            pack=Concat(pad=True),
            projections=(_projection("model.embed_tokens", "vocab_size", "hidden_size"),),
            embedding=True,
            all_linear=False,
            tied=Tied(when="tie_word_embeddings", to="lm_head.weight"),
        ),
        Site(
            path="output_layer",
            kind=SiteKind.COLUMN,
            pack=Concat(pad=True),
            projections=(_projection("lm_head", "hidden_size", "vocab_size"),),
            all_linear=False,
            tied=Tied(when="tie_word_embeddings", to="model.embed_tokens.weight"),
        ),
    ),
    base_weights=(
        BaseWeight(
            host=f"{_HOST}.self_attention.linear_qkv.layer_norm_weight",
            hf=(f"{_HF}.input_layernorm.weight",),
            layers=_FULL,
        ),
        BaseWeight(
            host=f"{_HOST}.self_attention.q_layernorm.weight", hf=(f"{_ATTENTION}.q_norm.weight",), layers=_FULL
        ),
        BaseWeight(
            host=f"{_HOST}.self_attention.k_layernorm.weight", hf=(f"{_ATTENTION}.k_norm.weight",), layers=_FULL
        ),
        BaseWeight(
            host=f"{_HOST}.self_attention.in_proj.layer_norm_weight",
            hf=(f"{_HF}.input_layernorm.weight",),
            layers=_LINEAR,
        ),
        BaseWeight(
            host=f"{_HOST}.self_attention.conv1d.weight",
            hf=(f"{_GDN}.conv1d.weight",),
            pack=Concat(),
            sections=((_KEYS, _KEYS, _VALUES),),
            layers=_LINEAR,
        ),
        BaseWeight(host=f"{_HOST}.self_attention.A_log", hf=(f"{_GDN}.A_log",), pack=Concat(), layers=_LINEAR),
        BaseWeight(host=f"{_HOST}.self_attention.dt_bias", hf=(f"{_GDN}.dt_bias",), pack=Concat(), layers=_LINEAR),
        # The one norm that HF does not store zero-centred.
        BaseWeight(
            host=f"{_HOST}.self_attention.out_norm.weight", hf=(f"{_GDN}.norm.weight",), offset=-1.0, layers=_LINEAR
        ),
        BaseWeight(host=f"{_HOST}.pre_mlp_layernorm.weight", hf=(f"{_HF}.post_attention_layernorm.weight",)),
        # No site: its output is one number, and a pair of any rank would be larger than the weight itself.
        BaseWeight(host=f"{_HOST}.mlp.shared_experts.gate_weight", hf=(f"{_MLP}.shared_expert_gate.weight",)),
        BaseWeight(host="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    ),
)
