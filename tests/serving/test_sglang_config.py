"""Keys that SGLang reads and transformers does not: worked out from those that transformers has, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from lora_plugins_sdk import LoraError, load_plugin
from lora_plugins_sdk.serving.sglang_config import has_delta_nets, missing_keys

L, F = "linear_attention", "full_attention"


def config(**keys: Any) -> dict[str, Any]:
    usual = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "layer_types": [L, F, L, F]}
    return {**usual, "full_attention_interval": 2, "rope_parameters": {"partial_rotary_factor": 0.25}, **keys}


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ({}, {}),
        ({"full_attention_interval": 4}, {"full_attention_interval": 2}),
        ({"full_attention_interval": None}, {"full_attention_interval": 2}),
        ({"layer_types": [L, L, L, F]}, {"full_attention_interval": 4}),
        ({"layer_types": [F, F, F, F]}, {"full_attention_interval": 1}),
        ({"layer_types": [L, L, L, L]}, {"full_attention_interval": 5}),
        ({"layer_types": None, "full_attention_interval": 3}, {}),
        ({"layer_types": None, "full_attention_interval": None}, {"full_attention_interval": 4}),
        ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25}),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.5}}, {}),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {}}, {}),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, {"partial_rotary_factor": 1.0}),
    ],
)
def test_what_is_missing(keys: dict[str, Any], missing: dict[str, Any]) -> None:
    assert missing_keys(config(**keys)) == missing
    nested = {"text_config": missing} if missing else {}
    assert missing_keys({"model_type": "qwen3_5_moe", "text_config": config(**keys)}) == nested


def test_layers_at_no_interval_are_refused() -> None:
    with pytest.raises(LoraError, match=r"layer_types: has full attention in layers 0, 2 of 3.*each n-th layer only"):
        missing_keys(config(num_hidden_layers=3, layer_types=[F, L, F]))


def test_other_models_need_nothing() -> None:
    for name in ("qwen3", "inkling"):
        hf_config = load_plugin(architecture=name).architecture.tiny_config
        assert not missing_keys(hf_config) and not has_delta_nets(hf_config)


def test_a_qwen3_moe_must_have_experts_in_every_layer() -> None:
    """SGLang 0.5.23 builds them whatever the config says (`Qwen3MoeDecoderLayer.stage_facts`)."""
    architecture = load_plugin(architecture="qwen3_moe").architecture
    for usual in ({}, {"mlp_only_layers": [], "decoder_sparse_step": 1}, {"mlp_only_layers": None}):
        assert missing_keys({**architecture.quickstart_config, **usual}) == {}
    for said, key in (({"mlp_only_layers": [0, 3]}, r"\[0, 3\]"), ({"decoder_sparse_step": 2}, "2")):
        with pytest.raises(LoraError, match=rf"{next(iter(said))} = {key}: makes layers dense, and SGLang builds"):
            missing_keys({**architecture.quickstart_config, **said})
    with pytest.raises(LoraError, match="makes layers dense"):
        missing_keys(architecture.tiny_config)


def test_recurrent_layers_are_known_with_and_without_the_list() -> None:
    assert has_delta_nets(config()) and has_delta_nets({"model_type": "qwen3_5_moe", "text_config": config()})
    assert has_delta_nets(config(layer_types=None)) and not has_delta_nets(config(layer_types=[F] * 4))


def test_a_quickstarts_hybrid_can_be_built() -> None:
    missing_keys(load_plugin(architecture="qwen36_moe").architecture.quickstart_config)
