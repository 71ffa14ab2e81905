"""Inkling: its sites and the rest of its base, as data."""

from __future__ import annotations

from lora_plugins_sdk import Architecture, BaseWeight, Concat, LayerTypes, Multimodal, Projection, Site, SiteKind
from lora_plugins_sdk.layers import OnlyLayers

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"
_ATTENTION = LayerTypes(types=("hybrid", "hybrid_sliding"))
_MLP = LayerTypes(types=("dense", "sparse"), key="mlp_layer_types")
_DENSE, _SPARSE = _MLP.only("dense"), _MLP.only("sparse")


def _attention(host: str, layers: OnlyLayers, prefix: str) -> tuple[Site, Site]:
    """The two linears of one kind of attention; the sizes of the sliding kind have a prefix in the config."""
    heads, groups, width = (f"{prefix}{key}" for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    outs = {"q": f"{heads} * {width}", "k": f"{groups} * {width}", "v": f"{groups} * {width}", "r": f"{heads} * d_rel"}
    projections = tuple(
        Projection(hf=f"{_HF}.self_attn.{name}_proj", in_dim="hidden_size", out_dim=out) for name, out in outs.items()
    )
    output = Projection(hf=f"{_HF}.self_attn.o_proj", in_dim=outs["q"], out_dim="hidden_size")
    return (
        Site(
            path=f"{_HOST}.{host}.linear_qkvr",
            kind=SiteKind.COLUMN,
            fused_norm=True,
            layers=layers,
            projections=projections,
        ),
        Site(path=f"{_HOST}.{host}.linear_proj", kind=SiteKind.ROW, layers=layers, projections=(output,)),
    )


def _mlp(
    host: str, hf: str, width: str, layers: OnlyLayers, *, experts: str | None = None, stack: str | None = None
) -> tuple[Site, Site]:
    """The two linears of a gated MLP; `{expert}` in `hf` for routed experts, a stack for shared ones."""
    gate_up = tuple(
        Projection(hf=f"{_HF}.{hf}.{name}_proj", in_dim="hidden_size", out_dim=width, stack=stack)
        for name in ("gate", "up")
    )
    down = Projection(hf=f"{_HF}.{hf}.down_proj", in_dim=width, out_dim="hidden_size", stack=stack)
    fused = [f"{_HF}.mlp.experts.{name}_proj" if experts else None for name in ("gate_up", "down")]
    return (
        Site(
            path=f"{_HOST}.{host}.linear_fc1",
            kind=SiteKind.COLUMN,
            fused_norm=layers is _DENSE,
            layers=layers,
            projections=gate_up,
            experts=experts,
            fused_hf=fused[0],
        ),
        Site(
            path=f"{_HOST}.{host}.linear_fc2",
            kind=SiteKind.ROW,
            layers=layers,
            projections=(down,),
            experts=experts,
            fused_hf=fused[1],
        ),
    )


def _beside_attention(host: str, layers: OnlyLayers) -> tuple[BaseWeight, ...]:
    """Weights of one kind of attention that no adapter touches."""
    whole = {
        "linear_qkvr.layer_norm_weight": "input_layernorm.weight",
        "q_layernorm.weight": "self_attn.q_norm.weight",
        "k_layernorm.weight": "self_attn.k_norm.weight",
        "relative_bias.proj": "self_attn.rel_logits_proj.proj",
    }
    convs = {f"{name}.weight": f"self_attn.{name}.conv1d.weight" for name in ("k_sconv", "v_sconv")}
    return tuple(
        BaseWeight(host=f"{_HOST}.{host}.{name}", hf=(f"{_HF}.{hf}",), pack=pack, layers=layers)
        for names, pack in ((whole, None), (convs, Concat()))
        for name, hf in names.items()
    )


def _whole(host: str, hf: str, layers: OnlyLayers | None = None) -> BaseWeight:
    return BaseWeight(host=f"{_HOST}.{host}", hf=(f"{_HF}.{hf}",), layers=layers)


ARCHITECTURE = Architecture(
    name="inkling",
    model_types=("inkling_text", "inkling_mm_model"),
    multimodal=Multimodal(),
    left_alone=("model.vision_tower.*", "model.audio_tower.*", "model.visual.*", "model.audio.*", "model.mtp.*"),
    fallbacks={"unpadded_vocab_size": "vocab_size"},
    # Uneven on purpose: the head is padded in HF and again under TP, window, extent and log scaling are shorter than a
    # text, and no two widths of a layer are equal.
    tiny_config={
        "model_type": "inkling_text",
        "vocab_size": 64,
        "unpadded_vocab_size": 61,
        "hidden_size": 40,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 10,
        "sliding_window_size": 7,
        "d_rel": 6,
        "rel_extent": 13,
        "log_scaling_n_floor": 5,
        "log_scaling_alpha": 0.3,
        "conv_kernel_size": 4,
        "intermediate_size": 36,
        "moe_intermediate_size": 22,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "route_scale": 2.5,
        "logits_mup_width_multiplier": 3.0,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    },
    sites=(
        *_attention("self_attention", _ATTENTION.only("hybrid"), ""),
        *_attention("sliding_attention", _ATTENTION.only("hybrid_sliding"), "swa_"),
        *_mlp("mlp", "mlp", "intermediate_size", _DENSE),
        *_mlp("mlp.experts", "mlp.experts.{expert}", "moe_intermediate_size", _SPARSE, experts="n_routed_experts"),
        *_mlp(
            "mlp.shared_experts",
            "mlp.shared_experts",
            "n_shared_experts * moe_intermediate_size",
            _SPARSE,
            stack="n_shared_experts",
        ),
        Site(
            path="output_layer",
            kind=SiteKind.COLUMN,
            pack=Concat(pad=True),
            projections=(Projection(hf="lm_head", in_dim="hidden_size", out_dim="unpadded_vocab_size"),),
            all_linear=False,
        ),
    ),
    base_weights=(
        BaseWeight(host="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), pack=Concat(pad=True)),
        BaseWeight(host="embedding.norm.weight", hf=("model.embed_tokens.embed_norm.weight",)),
        BaseWeight(host="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
        *_beside_attention("self_attention", _ATTENTION.only("hybrid")),
        *_beside_attention("sliding_attention", _ATTENTION.only("hybrid_sliding")),
        _whole("attn_sconv.weight", "attn_sconv.conv1d.weight"),
        _whole("mlp_sconv.weight", "mlp_sconv.conv1d.weight"),
        _whole("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", _DENSE),
        _whole("mlp.global_scale", "mlp.global_scale", _DENSE),
        _whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", _SPARSE),
        _whole("mlp.router.weight", "mlp.gate.weight", _SPARSE),
        _whole("mlp.router.global_scale", "mlp.gate.global_scale", _SPARSE),
        _whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", _SPARSE),
    ),
)
