"""Rollout engines by name. Engines import torch and transformers only when one is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_harness.engines.base import (
    Completion,
    EngineCapabilities,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
)
from lora_plugins_sdk.errors import LoraError

if TYPE_CHECKING:
    from lora_harness.config import TrainConfig
    from lora_plugins_sdk import PeftAdapter

ENGINE_NAMES: tuple[str, ...] = ("local", "sglang")


def check_engine_name(name: str) -> None:
    """Raise a `LoraError` that lists the engines unless `name` is one of them."""
    if name not in ENGINE_NAMES:
        raise LoraError(
            f"engine {name!r}", reason="no such rollout engine", cure=f"use one of {', '.join(ENGINE_NAMES)}"
        )


def open_engine(
    config: TrainConfig, policy: Callable[[], PeftAdapter], *, device: str, say: Callable[[str], None] = print
) -> RolloutEngine:
    """Open the engine that a config names. Collective over all ranks.

    Args:
        config: the training config.
        policy: exports the adapter before training; collective.
        device: torch device of an engine in this process.
        say: told about the progress, on rank 0.

    Raises:
        LoraError: what the engine itself raises.
    """
    if config.rollout.engine == "sglang":
        from lora_harness.engines.sglang.opening import open_sglang

        return open_sglang(config, policy(), say=say)
    from lora_harness.engines.local import LocalEngine
    from lora_harness.engines.model_files import hf_traits

    return LocalEngine(
        config.model.path,
        traits=hf_traits(config.model.path, config.model.plugin),
        max_batch_size=config.rollout.max_batch_size,
        device=device,
    )


__all__ = [
    "ENGINE_NAMES",
    "Completion",
    "EngineCapabilities",
    "GenerationRequest",
    "RolloutEngine",
    "SamplingParams",
    "check_engine_name",
    "open_engine",
]
