"""LoRA plugin for Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_plugin_qwen3_moe.architecture import ARCHITECTURE
from lora_plugins_sdk import Architecture, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_plugins_sdk import ParallelRun


@hookimpl
def lora_register_architectures() -> Sequence[Architecture]:
    """Qwen3-MoE."""
    return (ARCHITECTURE,)


@hookimpl
def lora_build_model(
    hf_config: Mapping[str, Any], run: ParallelRun, dtype: torch.dtype, overrides: Mapping[str, Any]
) -> nn.Module:
    """A megatron-core GPTModel."""
    from lora_plugin_qwen3_moe.model import build_model

    return build_model(hf_config, run, dtype=dtype, overrides=overrides)
