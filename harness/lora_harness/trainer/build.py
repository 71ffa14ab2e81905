"""The frozen base with an attached adapter, wrapped for data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lora_harness.engines.capabilities import lora_of_run
from lora_plugins_sdk import (
    LoraAdapter,
    ParallelRun,
    attach,
    load_base_weights,
    load_plugin,
    read_hf_config,
    reduce_grads_in_finalize,
)

if TYPE_CHECKING:
    from lora_harness.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPolicy:
    """This rank's part of the policy.

    Args:
        chunk: the model inside megatron-core's DistributedDataParallel.
        host_config: the host's TransformerConfig, which the schedules read.
        adapter: the attached adapter.
        vocab_size: tokens that the HF model has; columns beyond are padding.
    """

    chunk: Any
    host_config: Any
    adapter: LoraAdapter
    vocab_size: int


def build_policy(config: TrainConfig, run: ParallelRun) -> BuiltPolicy:
    """Build the base through its plugin, load its weights, attach the adapter, wrap. Collective over all ranks.

    Raises:
        LoraError: no plugin serves the model, the checkpoint does not fit, or the adapter cannot be attached.
    """
    hf_config = read_hf_config(config.model.path)
    plugin = load_plugin(str(hf_config.get("model_type")), plugin=config.model.plugin)
    lora = lora_of_run(config, plugin, hf_config, run.facts)
    model = plugin.build_model(hf_config, run, getattr(torch, config.model.dtype))
    load_base_weights(model, plugin, config.model.path, run, hf_config=hf_config)
    adapter = attach(model, plugin, hf_config, lora, run)
    chunk = _wrap(model)
    reduce_grads_in_finalize(chunk)
    vocab_size = plugin.architecture.dims(hf_config).resolve(plugin.architecture.vocabulary)
    return BuiltPolicy(chunk=chunk, host_config=chunk.config, adapter=adapter, vocab_size=vocab_size)


def _wrap(model: nn.Module) -> Any:
    # Imported here: megatron-core must find the CPU shim installed.
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    host_config: Any = model.config
    host_config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(host_config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
