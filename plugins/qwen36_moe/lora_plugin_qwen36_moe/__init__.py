"""LoRA plugin for Qwen3.5 and Qwen3.6 MoE: gated delta nets, gated attention, routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_plugin_qwen36_moe.architecture import ARCHITECTURE
from lora_plugin_qwen36_moe.fields import run_problems
from lora_plugins_sdk import Architecture, Diagnostic, LoraConfig, RunFacts, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_plugins_sdk import ParallelRun


@hookimpl
def lora_register_architectures() -> Sequence[Architecture]:
    """Qwen3.5 and Qwen3.6 MoE, text checkpoints and the language model of vision-language ones."""
    return (ARCHITECTURE,)


@hookimpl
def lora_validate_run(
    architecture: Architecture, hf_config: Mapping[str, object], lora: LoraConfig, facts: RunFacts
) -> Iterable[Diagnostic]:
    """What megatron-core's gated delta nets and expert layers cannot do."""
    return run_problems(facts)


@hookimpl
def lora_build_model(
    hf_config: Mapping[str, Any], run: ParallelRun, dtype: torch.dtype, overrides: Mapping[str, Any]
) -> nn.Module:
    """A megatron-core GPTModel."""
    from lora_plugin_qwen36_moe.model import build_model

    return build_model(hf_config, run, dtype=dtype, overrides=overrides)
