"""Weights of the base that no adapter touches, as data. Needs no torch."""

from __future__ import annotations

from lora_plugin_inkling.model.layer_kinds import DENSE, GLOBAL, SLIDING, SPARSE
from lora_plugins_sdk import BaseWeight, Concat, OnlyLayers

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"


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


BASE_WEIGHTS = (
    BaseWeight(host="embedding.norm.weight", hf=("model.embed_tokens.embed_norm.weight",)),
    BaseWeight(host="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    *_beside_attention("self_attention", GLOBAL),
    *_beside_attention("sliding_attention", SLIDING),
    _whole("attn_sconv.weight", "attn_sconv.conv1d.weight"),
    _whole("mlp_sconv.weight", "mlp_sconv.conv1d.weight"),
    _whole("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", DENSE),
    _whole("mlp.global_scale", "mlp.global_scale", DENSE),
    _whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", SPARSE),
    _whole("mlp.router.weight", "mlp.gate.weight", SPARSE),
    _whole("mlp.router.global_scale", "mlp.gate.global_scale", SPARSE),
    _whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", SPARSE),
)
