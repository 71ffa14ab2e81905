"""Rollout engines by name. Engines import torch and transformers only when one is opened."""

from __future__ import annotations

from pathlib import Path

from lora_harness.engines.base import (
    Completion,
    EngineCapabilities,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
)
from lora_plugins_sdk.errors import LoraError

ENGINE_NAMES: tuple[str, ...] = ("local",)


def check_engine_name(name: str) -> None:
    """Raise a `LoraError` that lists the engines unless `name` is one of them."""
    if name not in ENGINE_NAMES:
        raise LoraError(
            f"engine {name!r}", reason="no such rollout engine", cure=f"use one of {', '.join(ENGINE_NAMES)}"
        )


def create_engine(name: str, model_dir: Path, *, max_batch_size: int = 128, device: str = "cpu") -> RolloutEngine:
    """Open the engine called `name` on the HF model directory `model_dir`.

    Raises:
        LoraError: unknown name, or what the engine itself raises.
    """
    check_engine_name(name)
    from lora_harness.engines.local import LocalEngine

    return LocalEngine(model_dir, max_batch_size=max_batch_size, device=device)


__all__ = [
    "ENGINE_NAMES",
    "Completion",
    "EngineCapabilities",
    "GenerationRequest",
    "RolloutEngine",
    "SamplingParams",
    "check_engine_name",
    "create_engine",
]
