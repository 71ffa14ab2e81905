"""The quickstart's model: any that an installed plugin has a small config of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk import LoraConfig, SelectedPlugin, load_plugin
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


def too_narrow(plugin: SelectedPlugin, config: Mapping[str, Any], lora: LoraConfig) -> list[str]:
    """Targets in the small model that are narrower than the rank, by their last names; only such that are linears of
    `all-linear`.

    Args:
        plugin: the model's.
        config: of `model_config`, with the vocabulary's size.
        lora: rank and targets.

    Raises:
        LoraError: targets that do not resolve, or all of them are narrower.
    """
    wanted = plugin.normalize_targets(config, lora)
    dims = plugin.architecture.dims(config)
    sides: dict[str, int] = {}
    linear: set[str] = set()
    for one in candidates(plugin.architecture, config):
        if one.hf in wanted:
            leaf, width = one.projection.leaf, dims.resolve(one.projection.in_dim)
            side = min(width, dims.resolve(one.projection.out_dim))
            sides[leaf] = min(side, sides.get(leaf, side))
            if one.site.all_linear:
                linear.add(leaf)
    narrow = sorted(leaf for leaf in linear if sides[leaf] < lora.rank)
    if len(narrow) == len(sides):
        raise LoraError(
            f"lora.rank = {lora.rank}",
            reason="is larger than a side of every target in so small a model: "
            + ", ".join(f"{leaf} {sides[leaf]}" for leaf in narrow),
            cure=f"use a rank of at most {max(sides.values())}",
        )
    return narrow
