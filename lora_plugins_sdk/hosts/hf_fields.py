"""Read and check fields of a HF config that are not sizes. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_plugins_sdk.errors import Diagnostic


def unsupported_fields(hf_config: Mapping[str, Any], built: Mapping[str, Any]) -> list[Diagnostic]:
    """Fields whose value is not the one that the builder builds; an absent field means that value.

    Args:
        hf_config: HF config.json as a mapping.
        built: the one value per field that is built. `rope_type` is looked up where transformers keeps it.
    """
    found = {**built, **hf_config, "rope_type": _rope(hf_config)["rope_type"]}
    return [
        Diagnostic(
            subject=f"{name} = {found[name]!r}",
            reason=f"this builder has only {value!r}",
            cure="use a checkpoint without it, or build the model elsewhere and attach to it",
        )
        for name, value in built.items()
        if found[name] != value
    ]


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` (transformers 4)."""
    return _rope(hf_config)["rope_theta"]


def _rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"rope_theta": hf_config.get("rope_theta", 10000.0)}
    fields |= hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    return {"rope_type": fields.get("type", "default"), **fields}
