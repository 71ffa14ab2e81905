"""The harness's policy with every parameter trained and no adapter: what a LoRA step is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from lora_harness.config import TrainConfig
from lora_harness.trainer import MegatronPolicy
from lora_harness.trainer.build import BuiltPolicy
from lora_plugins_sdk import ParallelRun, load_base_weights, load_plugin, read_hf_config


@dataclass(frozen=True, slots=True)
class AllParameters:
    """Stands where the adapter stands: what the optimizer trains."""

    model: nn.Module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter of the model."""
        return self.model.parameters()


def build_full(config: TrainConfig, run: ParallelRun) -> BuiltPolicy:
    """As the harness's own `build_policy`, with the base trained instead of an adapter."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    hf_config = read_hf_config(config.model.path)
    plugin = load_plugin("qwen3")
    model: Any = plugin.build_model(hf_config, run, getattr(torch, config.model.dtype))
    load_base_weights(model, plugin, config.model.path, run, hf_config=hf_config)
    model.config.finalize_model_grads_func = finalize_model_grads
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    vocab_size = plugin.architecture.dims(hf_config).resolve("vocab_size")
    adapter: Any = AllParameters(model)
    return BuiltPolicy(chunk=chunk, host_config=model.config, adapter=adapter, vocab_size=vocab_size)


def full_policy(config: TrainConfig, run: ParallelRun) -> MegatronPolicy:
    """The harness's policy: its schedule, its loss, its optimizer, on all parameters."""
    with patch("lora_harness.trainer.policy.build_policy", build_full):
        return MegatronPolicy(config, run)
