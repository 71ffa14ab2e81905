"""What SGLang reads in a HF config under other keys than transformers: without them it builds another model.

Taken from `sglang.srt.configs` of SGLang 0.5.23: `qwen3_next` and `qwen3_5` know a layer's type by an interval and
the rotated share of a head by a key beside `rope_parameters`. transformers reads, and writes, only the list of types
and the share within. `qwen3_moe` has experts in every layer. `inkling` reads what is published, and leaves out the
parts that are not switched on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.serving.sglang_places import family_of, is_delta_net_hybrid, text_config

LINEAR, FULL = "linear_attention", "full_attention"
_INTERVAL, _SHARE = "full_attention_interval", "partial_rotary_factor"
# transformers' defaults. SGLang has the same for the share and none for the interval.
_USUAL_INTERVAL, _USUAL_SHARE = 4, 0.25

# What every Inkling has, and SGLang's only where the config says so; and keys for which SGLang has another default than
# transformers, or that transformers names otherwise.
_INKLING_PARTS = ("shared_expert_sink", "use_embed_norm", "use_gate_bias", "use_global_scale", "use_sconv")
_INKLING_KEYS = (
    "dense_intermediate_size",
    "dense_mlp_idx",
    "local_layer_ids",
    "logits_mup_width_multiplier",
    "route_scale",
    "sconv_kernel_size",
)
# transformers builds these whatever the config says. SGLang follows it but for the last, which neither builds.
_INKLING_FIXED = {
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
}


def has_delta_nets(hf_config: Mapping[str, Any]) -> bool:
    """Whether some layers keep a recurrent state."""
    return LINEAR in _layer_types(text_config(hf_config))


def missing_keys(hf_config: Mapping[str, Any], read: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keys that SGLang's config must get on top of `config.json` (`json_model_override_args`) to build the model that
    transformers builds; nested as they are in `config.json`, empty where it has them.

    Args:
        hf_config: the model's config.
        read: the config that SGLang reads, where it is another file's.

    Raises:
        LoraError: SGLang cannot build the model: its full attention layers stand at no interval, or a Qwen3-MoE has
            layers without experts.
    """
    _refuse_dense_layers(text_config(hf_config))
    if not is_delta_net_hybrid(hf_config):
        return {}
    read = hf_config if read is None else read
    text, nested = text_config(hf_config), read.get("text_config")
    wanted = {_INTERVAL: _interval(_layer_types(text)), _SHARE: _rotated_share(text)}
    found = {_SHARE: _USUAL_SHARE, **(nested if isinstance(nested, Mapping) else read)}
    missing = {key: value for key, value in wanted.items() if found.get(key) != value}
    return {"text_config": missing} if missing and isinstance(nested, Mapping) else missing


def unpublished_keys(hf_config: Mapping[str, Any]) -> list[str]:
    """Keys of an Inkling's `text_config` without which, or with another value, SGLang builds another model than
    transformers; none for other models."""
    if family_of(hf_config) != "inkling":
        return []
    text = hf_config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    lacking = [f"{key} = true" for key in _INKLING_PARTS if text.get(key) is not True]
    lacking += [key for key in _INKLING_KEYS if text.get(key) is None]
    other = (key for key, value in _INKLING_FIXED.items() if text.get(key, value) != value)
    return [*lacking, *(f"{key} = {json.dumps(_INKLING_FIXED[key])}" for key in other)]


def _refuse_dense_layers(text: Mapping[str, Any]) -> None:
    """SGLang's Qwen3-MoE has experts in every layer: it reads no key that says otherwise, passes over the weights of
    dense layers, and serves experts in their place that nobody set.

    Raises:
        LoraError: a config with dense layers.
    """
    if text.get("model_type") != "qwen3_moe":
        return
    for key, usual in (("mlp_only_layers", ([], None)), ("decoder_sparse_step", (1, None))):
        if text.get(key) not in usual:
            raise LoraError(
                f"{key} = {text[key]}",
                reason="makes layers dense, and SGLang builds experts in every layer of a Qwen3-MoE",
                cure="use rollout.engine = 'local', or a model with experts in every layer",
            )


def _layer_types(text: Mapping[str, Any]) -> Sequence[str]:
    types = text.get("layer_types")
    if types is None and is_delta_net_hybrid(text):
        every = text.get(_INTERVAL) or _USUAL_INTERVAL
        return [LINEAR if (layer + 1) % every else FULL for layer in range(text.get("num_hidden_layers", 0))]
    return types or ()


def _interval(types: Sequence[str]) -> int:
    """The n for which each n-th layer has full attention and no other.

    Raises:
        LoraError: there is none.
    """
    every = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if list(types) == [LINEAR if (layer + 1) % every else FULL for layer in range(len(types))]:
        return every
    full = ", ".join(str(layer) for layer, kind in enumerate(types) if kind == FULL)
    raise LoraError(
        "layer_types",
        reason=f"has full attention in layers {full} of {len(types)}, and SGLang builds it in each n-th layer only",
        cure="use another rollout engine, or a model with full attention at an interval",
    )


def _rotated_share(text: Mapping[str, Any]) -> float:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return rope.get(_SHARE, text.get(_SHARE, _USUAL_SHARE))
