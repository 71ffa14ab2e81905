"""The arguments that an SGLang engine is started with: what the run needs, and on a CPU what SGLang needs there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lora_harness.engines.sglang.sync.package import LoraSettings

# Key-value cache of an engine on the CPU, in tokens: a few GiB for a model of a billion parameters. SGLang would
# otherwise take most of the memory.
_CPU_CACHE_TOKENS = 16_384

CPU_ARGUMENTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    # An idle scheduler would otherwise keep a core busy, which the trainer needs.
    "sleep_on_idle": True,
    # SGLang ends itself when its warm-up takes longer than two minutes, as on a busy machine; there is nothing to warm.
    "skip_server_warmup": True,
}
# Slots for recurrent states per sequence that is decoded. Unset, SGLang fills gigabytes with them.
_STATES_PER_SEQUENCE = 4
# The same where the prefix cache keeps snapshots: with fewer SGLang decodes fewer sequences.
_SNAPSHOTS_PER_SEQUENCE = 5


def engine_arguments(
    *,
    model_path: str,
    dtype: str,
    seed: int,
    max_running_requests: int,
    context: int,
    recurrent: bool,
    config_keys: Mapping[str, Any],
    snapshots: bool,
    lora: LoraSettings | None,
    cpu: bool,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments by the names of SGLang's `Engine`.

    Args:
        model_path: HF directory of the base.
        dtype: of the base weights and activations.
        seed: of what the engine draws where it keeps no seed for each request.
        max_running_requests: sequences decoded together.
        context: longest sequence of the model, in tokens.
        recurrent: whether the model has gated delta nets.
        config_keys: what SGLang's config of the model needs on top of `config.json`.
        snapshots: whether SGLang takes snapshots of the model's states into its prefix cache and cannot do without.
        lora: None for an engine without adapters.
        cpu: whether to run without an accelerator.
        given: the user's own arguments, which win over the CPU's.
    """
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "dtype": dtype,
        "random_seed": seed,
        "max_running_requests": max_running_requests,
        # Token ids go in and out; tokenizing would only cost time.
        "skip_tokenizer_init": True,
    }
    if config_keys:
        arguments["json_model_override_args"] = json.dumps(config_keys)
    if cpu:
        cache = max(context, min(_CPU_CACHE_TOKENS, max_running_requests * context))
        arguments |= {**CPU_ARGUMENTS, "max_total_tokens": cache}
        if recurrent:
            # The prefix cache of recurrent states needs a GPU.
            states = _STATES_PER_SEQUENCE * max_running_requests
            arguments |= {"disable_radix_cache": True, "max_mamba_cache_size": states}
        if snapshots:
            # Sliding layers have a cache of their own, by default a tenth: too small for texts within the window.
            states = _SNAPSHOTS_PER_SEQUENCE * max_running_requests
            arguments |= {"max_mamba_cache_size": states, "swa_full_tokens_ratio": 1.0}
    if lora is not None:
        arguments |= {
            "enable_lora": True,
            "lora_target_modules": sorted(lora.targets),
            "max_lora_rank": lora.max_rank,
            "max_loras_per_batch": lora.slots,
        }
        if lora.shared_outer_experts:
            arguments["experts_shared_outer_loras"] = True
        if cpu:
            arguments["lora_backend"] = "torch_native"
    return arguments | dict(given)
