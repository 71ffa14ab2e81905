"""Dense Qwen3 as a megatron-core GPTModel, from the fields of a HF config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.hosts.gpt import run_fields
from lora_plugins_sdk.hosts.sizes import dense_size_problems, padded_vocab_size
from lora_plugins_sdk.hosts.torch_backend import decoder_block_spec
from lora_plugins_sdk.parallel_run import ParallelRun
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

# Fields whose other values mean another model, with the one value that is built (also the default of an absent field).
_BUILT = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "attention_dropout": 0.0}


def _problems(hf: Mapping[str, Any], rope: Mapping[str, Any], run: ParallelRun) -> list[Diagnostic]:
    """Everything in the config that this builder or this run cannot have."""
    found = {name: hf.get(name, value) for name, value in _BUILT.items()} | {"rope_type": rope["rope_type"]}
    built = _BUILT | {"rope_type": "default"}
    return [
        Diagnostic(
            subject=f"{name} = {found[name]!r}",
            reason=f"the Qwen3 builder has only {built[name]!r}",
            cure="use a checkpoint without it, or build the model elsewhere and attach to it",
        )
        for name in built
        if found[name] != built[name]
    ] + dense_size_problems(
        run.facts,
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"],
        intermediate_size=hf["intermediate_size"],
        layers=hf["num_hidden_layers"],
    )


def build_model(
    hf_config: Mapping[str, Any],
    run: ParallelRun,
    *,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> GPTModel:
    """This rank's part of the model, weights uninitialised.

    Args:
        hf_config: HF config.json as a mapping.
        run: this rank's place; megatron-core's groups must have been initialised with the same sizes.
        dtype: dtype of the weights and activations.
        overrides: further TransformerConfig fields, such as recompute options.

    Returns:
        A GPTModel whose output is [b, s, padded vocabulary / tp] on the last stage and [s (/ tp under SP), b, hidden] elsewhere.

    Raises:
        LoraError: fields that Qwen3 checkpoints can have but this builder does not, and sizes that the run does not divide.
    """
    old_rope = {"rope_theta": hf_config.get("rope_theta", 10000.0)} | (hf_config.get("rope_scaling") or {})
    rope = {"rope_type": old_rope.get("type", "default")} | old_rope | (hf_config.get("rope_parameters") or {})
    raise_if_any("This Qwen3 model cannot be built:", _problems(hf_config, rope, run))
    fields = run_fields(run, dtype) | dict(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config["head_dim"],
        layernorm_epsilon=hf_config["rms_norm_eps"],
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    config = TransformerConfig(**(fields | dict(overrides or {})))
    return GPTModel(
        config=config,
        transformer_layer_spec=decoder_block_spec(config),
        vocab_size=padded_vocab_size(hf_config["vocab_size"], run.facts.tp),
        max_sequence_length=hf_config["max_position_embeddings"],
        pre_process=run.pp_rank == 0,
        post_process=run.pp_rank == run.facts.pp - 1,
        share_embeddings_and_output_weights=hf_config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
    )
