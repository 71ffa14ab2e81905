"""Qwen3-MoE as a megatron-core GPTModel, from the fields of a HF config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from lora_plugin_qwen3_moe.architecture import ARCHITECTURE, LAYERS
from lora_plugins_sdk import Diagnostic, ModelDims, ParallelRun, raise_if_any
from lora_plugins_sdk.hosts.experts import POLICY_FIELDS, override_problems
from lora_plugins_sdk.hosts.gpt import build_gpt, transformer_config
from lora_plugins_sdk.hosts.hf_fields import unsupported_fields
from lora_plugins_sdk.hosts.rope import read_rope, rope_problems
from lora_plugins_sdk.hosts.sizes import moe_size_fields, moe_size_problems

# Other values of these fields mean another model.
_BUILT = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    # transformers then adds the load balancing loss to its own; a reward does not contain it.
    "output_router_logits": False,
}

# What follows from the model, whatever its sizes.
_MODEL = POLICY_FIELDS | {
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
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
        hf_config: HF config.json as a mapping.
        run: this rank's place.
        dtype: dtype of the weights and activations.
        overrides: further TransformerConfig fields, such as recompute options.

    Raises:
        LoraError: a missing field, a variant that is not built, a size that the run does not divide, an override that
            would change what the policy is.
    """
    dims = ARCHITECTURE.dims(hf_config)
    kinds = LAYERS.resolve(dims, dims.resolve("num_hidden_layers"))
    dense = LAYERS.types[0] in kinds
    problems = [
        *unsupported_fields(hf_config, _BUILT),
        *rope_problems(hf_config),
        *_router_problems(dims),
        *moe_size_problems(run.facts, dims, dense=dense),
        *override_problems(overrides or {}),
    ]
    raise_if_any("This Qwen3-MoE model cannot be built:", problems)
    model = moe_size_fields(dims, dense=dense) | _MODEL
    model |= {
        "layernorm_epsilon": hf_config.get("rms_norm_eps", 1e-6),
        "moe_layer_freq": [int(kind == LAYERS.types[1]) for kind in kinds],
        # Softmax over the chosen experts is softmax over all, chosen, then normalised.
        "moe_router_pre_softmax": not dims.flag("norm_topk_prob"),
    }
    config = transformer_config(run, dtype=dtype, model=model, overrides=overrides or {})
    return build_gpt(config, run, dims, rope=read_rope(hf_config))


def _router_problems(dims: ModelDims) -> Iterator[Diagnostic]:
    experts, chosen = dims.resolve("num_experts"), dims.resolve("num_experts_per_tok")
    if not 0 < chosen <= experts:
        yield Diagnostic(
            subject=f"num_experts_per_tok = {chosen}",
            reason=f"cannot be chosen of {experts} experts",
            cure="use the config.json that belongs to this model type; plugin 'qwen3' serves models without experts",
        )
    if chosen == 1 and dims.flag("norm_topk_prob"):
        yield Diagnostic(
            subject="norm_topk_prob with num_experts_per_tok = 1",
            reason="gives the one expert the weight 1, whatever the router says, which megatron-core does not build",
            cure="use a checkpoint without norm_topk_prob, or one with more experts for each token",
        )
