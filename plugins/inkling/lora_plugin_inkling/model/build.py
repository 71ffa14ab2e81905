"""Inkling on megatron-core, from the fields of a HF config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_plugin_inkling.architecture import ARCHITECTURE
from lora_plugin_inkling.model.fields import SPARSE, layer_problems, override_problems, read_fields, run_problems
from lora_plugin_inkling.model.language_model import InklingModel
from lora_plugins_sdk import ParallelRun, raise_if_any
from lora_plugins_sdk.hosts.gpt import transformer_config
from lora_plugins_sdk.hosts.hf_fields import unsupported_fields
from lora_plugins_sdk.hosts.sizes import padded_vocab_size

# Other values of these fields mean another model.
_BUILT = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "shared_expert_sink": True,
    "q_bias": False,
    "o_bias": False,
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "final_logit_softcapping": None,
}

# TransformerConfig field -> HF config.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}


def build_model(
    hf_config: Mapping[str, Any],
    run: ParallelRun,
    *,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> InklingModel:
    """This rank's pipeline stage, weights uninitialised.

    The output layer has the vocabulary without HF's padding (`unpadded_vocab_size`), padded anew.

    Args:
        hf_config: HF config.json as a mapping.
        run: this rank's place; megatron-core's groups must have been initialised with the same sizes.
        dtype: dtype of the weights and activations.
        overrides: further TransformerConfig fields.

    Raises:
        LoraError: a missing field, a variant that is not built, a size that the run does not divide, an override that
            has no effect here or would change what the policy is.
    """
    dims, overrides = ARCHITECTURE.dims(hf_config), overrides or {}
    problems = [
        *unsupported_fields(dims.config, _BUILT),
        *layer_problems(dims),
        *run_problems(run.facts, dims),
        *override_problems(overrides),
    ]
    raise_if_any("This Inkling model cannot be built:", problems)
    fields = read_fields(dims)
    model = {field: dims.resolve(name) for field, name in _SIZES.items()} | dict(
        layernorm_epsilon=dims.config.get("rms_norm_eps", 1e-6),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        moe_layer_freq=[int(kind == SPARSE) for kind in fields.mlp_types],
        moe_router_load_balancing_type="none",
    )
    config = transformer_config(run, dtype=dtype, model=model, overrides=overrides)
    return InklingModel(
        config,
        fields,
        vocabulary=padded_vocab_size(dims.resolve("vocab_size"), run.facts),
        outputs=padded_vocab_size(dims.resolve("unpadded_vocab_size"), run.facts),
        longest=dims.resolve("max_position_embeddings"),
        pre_process=run.pp_rank == 0,
        post_process=run.pp_rank == run.facts.pp - 1,
    )
