"""Adapters whose B covers padding rows of the vocabulary, which HF's head may have and the declared one has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lora_plugins_sdk.errors import Diagnostic, raise_if_any
from lora_plugins_sdk.pack import Concat
from lora_plugins_sdk.targets import candidates

if TYPE_CHECKING:
    from lora_plugins_sdk.architecture import Architecture
    from lora_plugins_sdk.peft_files import PeftAdapter


def without_padding(adapter: PeftAdapter, architecture: Architecture, hf_config: Mapping[str, object]) -> PeftAdapter:
    """The adapter with each B of a site packed as `Concat(pad=True)` cut to the rows that are declared.

    Raises:
        LoraError: rows beyond those that are not zero, which belong to no token.
    """
    dims = architecture.dims(hf_config)
    tensors = dict(adapter.tensors)
    problems = []
    for one in candidates(architecture, hf_config):
        name = f"base_model.model.{one.hf}.lora_B.weight"
        if one.site.pack != Concat(pad=True) or name not in tensors or tensors[name].dim() != 2:
            continue
        rows, b = dims.resolve(one.projection.out_dim), tensors[name]
        tensors[name] = b[:rows]
        if bool((b[rows:] != 0).any()):
            problems.append(
                Diagnostic(
                    subject=name,
                    reason=f"has {b.shape[0]} rows, and not all beyond the {rows} of the vocabulary are zero",
                    cure="give the base that it was trained on",
                )
            )
    raise_if_any("this adapter cannot be loaded:", problems)
    return replace(adapter, tensors=tensors)
