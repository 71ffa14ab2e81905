"""The quickstart's model: any that an installed plugin has a small config of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk import Architecture, load_plugin
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.targets import candidates


def model_config(name: str) -> dict[str, Any]:
    """HF config of the small model of an architecture, without a vocabulary.

    Args:
        name: the architecture's name.

    Raises:
        LoraError: no plugin has this architecture, or it has no such config.
    """
    architecture = load_plugin(architecture=name).architecture
    if not architecture.quickstart_config:
        raise LoraError(
            f"model {name!r}",
            reason="its plugin has no config of a small model to start from",
            cure="declare quickstart_config in its Architecture, or use qwen3",
        )
    return dict(architecture.quickstart_config)


def too_narrow(name: str, config: Mapping[str, Any], rank: int) -> list[str]:
    """Projections of the small model that are narrower than a rank, by their last names.

    Args:
        name: the architecture's name.
        config: of `model_config`.
        rank: of the adapter.
    """
    architecture: Architecture = load_plugin(architecture=name).architecture
    dims = architecture.dims(config)
    return sorted(
        {
            one.projection.leaf
            for one in candidates(architecture, config)
            if one.site.all_linear
            and min(dims.resolve(one.projection.in_dim), dims.resolve(one.projection.out_dim)) < rank
        }
    )
