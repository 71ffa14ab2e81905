"""Dense Qwen3 as a megatron-core GPTModel, from the fields of a HF config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from lora_plugin_qwen3.architecture import ARCHITECTURE
from lora_plugins_sdk import ParallelRun, raise_if_any
from lora_plugins_sdk.hosts.gpt import build_gpt, transformer_config
from lora_plugins_sdk.hosts.hf_fields import unsupported_fields
from lora_plugins_sdk.hosts.rope import read_rope, rope_problems
from lora_plugins_sdk.hosts.sizes import dense_size_fields, dense_size_problems

# Other values of these fields mean another model.
_BUILT = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
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
        LoraError: a missing field, a variant of Qwen3 that is not built, a size that the run does not divide.
    """
    dims = ARCHITECTURE.dims(hf_config)
    problems = [
        *unsupported_fields(hf_config, _BUILT),
        *rope_problems(hf_config),
        *dense_size_problems(run.facts, dims),
    ]
    raise_if_any("This Qwen3 model cannot be built:", problems)
    model = dense_size_fields(dims) | dict(
        layernorm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    config = transformer_config(run, dtype=dtype, model=model, overrides=overrides or {})
    return build_gpt(config, run, dims, rope=read_rope(hf_config))
