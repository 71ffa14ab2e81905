"""Qwen3.5/3.6 MoE as a megatron-core GPTModel, from the fields of a HF config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from lora_plugin_qwen36_moe.architecture import ARCHITECTURE, LAYERS
from lora_plugin_qwen36_moe.fields import rope_problems, rotary_percent, run_problems
from lora_plugins_sdk import ParallelRun, raise_if_any
from lora_plugins_sdk.hosts.experts import POLICY_FIELDS, override_problems
from lora_plugins_sdk.hosts.gpt import build_gpt, transformer_config
from lora_plugins_sdk.hosts.hf_fields import unsupported_fields
from lora_plugins_sdk.hosts.rope import read_rope
from lora_plugins_sdk.hosts.sizes import hybrid_size_fields, hybrid_size_problems

# Other values of these fields mean another model.
_BUILT = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "rope_type": "default",
    # transformers then adds the load balancing loss to its own; a reward does not contain it.
    "output_router_logits": False,
}

# What follows from the model, whatever its sizes.
_MODEL = POLICY_FIELDS | {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "moe_shared_expert_gate": True,
    # softmax over the chosen experts: the same as softmax over all, chosen, then normalised
    "moe_router_pre_softmax": False,
}


def build_model(
    hf_config: Mapping[str, Any],
    run: ParallelRun,
    *,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> GPTModel:
    """This rank's pipeline stage, weights uninitialised; see :func:`lora_plugins_sdk.hosts.gpt.build_gpt`.

    Args:
        hf_config: HF config.json as a mapping; of a vision-language model, its language model is built.
        run: this rank's place.
        dtype: dtype of the weights and activations.
        overrides: further TransformerConfig fields, such as recompute options.

    Raises:
        LoraError: a missing field, a variant that is not built, a size that the run does not divide, an override that
            would change what the policy is.
    """
    dims = ARCHITECTURE.dims(hf_config)
    text = dims.config
    problems = [
        *unsupported_fields(text, _BUILT),
        *rope_problems(text, dims.resolve("head_dim")),
        *hybrid_size_problems(run.facts, dims),
        *run_problems(run.facts),
        *override_problems(overrides or {}),
    ]
    raise_if_any("This Qwen3.5/3.6 MoE model cannot be built:", problems)
    kinds = LAYERS.resolve(dims, dims.resolve("num_hidden_layers"))
    model = hybrid_size_fields(dims) | _MODEL
    model |= {
        "layernorm_epsilon": text.get("rms_norm_eps", 1e-6),
        "linear_attention_freq": [int(kind == LAYERS.types[0]) for kind in kinds],
    }
    config = transformer_config(run, dtype=dtype, model=model, overrides=overrides or {})
    return build_gpt(config, run, dims, rope=read_rope(text, percent=rotary_percent(text)))
