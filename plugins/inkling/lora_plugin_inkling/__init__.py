"""LoRA plugin for Inkling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_plugin_inkling.architecture import ARCHITECTURE
from lora_plugins_sdk import Architecture, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_plugins_sdk import BaseTensors, ParallelRun, PeftAdapter


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

    return declared_tensors(stored, _vocabulary(hf_config), _prefix(hf_config))


@hookimpl
def lora_read_adapter(hf_config: Mapping[str, object], saved: PeftAdapter) -> PeftAdapter:
    """transformers' names, or those of the official schema."""
    from lora_plugin_inkling.official import from_official, is_official

    return from_official(saved, _prefix(hf_config), _vocabulary(hf_config)) if is_official(saved) else saved


def _vocabulary(hf_config: Mapping[str, object]) -> int:
    return ARCHITECTURE.dims(hf_config).resolve("unpadded_vocab_size")


def _prefix(hf_config: Mapping[str, object]) -> str:
    wrap = ARCHITECTURE.multimodal
    assert wrap is not None
    return wrap.prefix if wrap.text_config(hf_config) is None else wrap.wrapped_prefix
