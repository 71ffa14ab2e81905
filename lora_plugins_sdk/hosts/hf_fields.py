"""Read and check fields of a HF config that are not sizes. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk.errors import Diagnostic
from lora_plugins_sdk.hosts.rope import rope_fields


def unsupported_fields(hf_config: Mapping[str, Any], built: Mapping[str, Any]) -> list[Diagnostic]:
    """Fields whose value is not the one that the builder builds; an absent field means that value.

    Args:
        hf_config: HF config.json as a mapping.
        built: the one value per field that is built. `rope_type` and `partial_rotary_factor` are looked up where
            transformers keeps them.
    """
    rope = rope_fields(hf_config)
    found = {**built, **hf_config} | {name: rope[name] for name in ("rope_type", "partial_rotary_factor")}
    return [
        Diagnostic(
            subject=f"{name} = {found[name]!r}",
            reason=f"this builder has only {value!r}",
            cure="use a checkpoint without it, or build the model elsewhere and attach to it",
        )
        for name, value in built.items()
        if found[name] != value
    ]
