"""LoRA plugin for Inkling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_plugin_inkling.architecture import ARCHITECTURE
from lora_plugins_sdk import Architecture, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_plugins_sdk import BaseCheckpoint, BaseTensors, ParallelRun


@hookimpl
def lora_register_architectures() -> Sequence[Architecture]:
    """Inkling."""
    return (ARCHITECTURE,)


@hookimpl
def lora_build_model(
    hf_config: Mapping[str, Any], run: ParallelRun, dtype: torch.dtype, overrides: Mapping[str, Any]
) -> nn.Module:
    """Modules of this package on megatron-core."""
    from lora_plugin_inkling.model.build import build_model

    return build_model(hf_config, run, dtype=dtype, overrides=overrides)


@hookimpl
def lora_base_tensors(hf_config: Mapping[str, object], stored: BaseTensors) -> BaseTensors:
    """transformers' or the published layout, the head without padding rows."""
    from lora_plugin_inkling.model.checkpoint import declared_tensors

    return declared_tensors(stored, hf_config)


@hookimpl
def lora_published_base(architecture: Architecture, base: BaseCheckpoint) -> BaseCheckpoint:
    """The published layout, which SGLang reads alone."""
    from lora_plugin_inkling.model.published_base import as_published

    return as_published(architecture, base)
