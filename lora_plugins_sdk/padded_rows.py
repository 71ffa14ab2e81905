"""Adapters whose B covers the padding rows that HF's linear has and the declared projection has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.peft_names import factor_name
from lora_plugins_sdk.targets import candidates

if TYPE_CHECKING:
    from lora_plugins_sdk.architecture import Architecture
    from lora_plugins_sdk.peft_files import PeftAdapter


def without_padding(adapter: PeftAdapter, architecture: Architecture, hf_config: Mapping[str, object]) -> PeftAdapter:
    """The adapter with each B that has as many rows as HF's padded linear (`Projection.padded_to`) cut to the declared
    ones.

    Raises:
        LoraError: padding rows that are not zero: they would be dropped.
    """
    dims = architecture.dims(hf_config)
    tensors = dict(adapter.tensors)
    problems = []
    for one in candidates(architecture, hf_config):
        name, padded_to = factor_name(one.hf, "B"), one.projection.padded_to
        if padded_to is None or name not in tensors or tensors[name].shape[:1] != (dims.resolve(padded_to),):
            continue
        rows, b = dims.resolve(one.projection.out_dim), tensors[name]
        tensors[name] = b[:rows]
        if bool((b[rows:] != 0).any()):
            problems.append(
                Diagnostic(
                    subject=name,
                    reason=f"has {b.shape[0]} rows, and those beyond {rows} are padding and not all zero",
                    cure="give an adapter that was trained on this base",
                )
            )
    raise_if_any("this adapter cannot be loaded:", problems)
    return replace(adapter, tensors=tensors)
