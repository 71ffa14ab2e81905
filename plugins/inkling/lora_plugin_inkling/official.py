"""Adapters in Inkling's official schema (`wq_du` ... `wo_ud`, `w1`, `w3`, `w2`) and transformers' names, both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lora_plugins_sdk import LoraError

if TYPE_CHECKING:
    from torch import Tensor

    from lora_plugins_sdk import PeftAdapter

_ATTENTION = {"wq_du": "q_proj", "wk_dv": "k_proj", "wv_dv": "v_proj", "wr_du": "r_proj", "wo_ud": "o_proj"}
_MLP = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
TO_HF = _ATTENTION | _MLP
TO_OFFICIAL = {hf: official for official, hf in TO_HF.items()}
_NAME = re.compile(
    r"base_model\.model\.(?P<prefix>(?:model\.|llm\.|language_model\.)*)layers\.(?P<layer>\d+)\."
    r"(?P<block>attn|self_attn|mlp(?:\.experts|\.shared_experts)?)\.(?P<leaf>\w+)\.(?P<factor>lora_[AB]\.weight)"
)
_HEAD = re.compile(r"base_model\.model\.(?:(?:model|llm|language_model)\.)*(?:lm_head|unembed)\.(lora_[AB]\.weight)")


def to_official_name(module: str) -> str:
    """A module's official name, both after `layers.N.` (`self_attn.q_proj` -> `attn.wq_du`)."""
    block, _, leaf = module.rpartition(".")
    place = "attn" if block == "self_attn" else block
    return ".".join(part for part in (place, TO_OFFICIAL.get(leaf, leaf)) if part)


def is_official(adapter: PeftAdapter) -> bool:
    """Whether any tensor has a name of the official schema."""
    return any((found := _NAME.fullmatch(name)) and found["leaf"] in TO_HF for name in adapter.tensors)


def from_official(adapter: PeftAdapter, prefix: str, vocabulary: int) -> PeftAdapter:
    """An official adapter under transformers' names, its head without the vocabulary's padding.

    Args:
        adapter: as read.
        prefix: what transformers' names of the language model begin with.
        vocabulary: rows of the head that belong to a token.

    Raises:
        LoraError: rows of the head's B beyond the vocabulary that are not zero.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in adapter.tensors.items():
        if head := _HEAD.fullmatch(name):
            name = f"base_model.model.lm_head.{head[1]}"
            tensor = _trimmed(name, tensor, vocabulary) if "lora_B" in name else tensor
        elif (found := _NAME.fullmatch(name)) and found["leaf"] in TO_HF:
            block = "self_attn" if found["block"] == "attn" else found["block"]
            place = f"{prefix}layers.{found['layer']}.{block}.{TO_HF[found['leaf']]}"
            name = f"base_model.model.{place}.{found['factor']}"
        tensors[name] = tensor
    return replace(adapter, tensors=tensors, config=_targets(adapter.config, TO_HF))


def to_official(adapter: PeftAdapter) -> PeftAdapter:
    """An adapter under transformers' names in the official schema; the inverse of `from_official`.

    Raises:
        LoraError: factors of single routed experts, for which the official schema has no name.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in adapter.tensors.items():
        if ".mlp.experts." in name and tensor.dim() != 3:
            raise LoraError(
                name,
                reason="is one expert's own; the official schema has the experts' outer factors shared",
                cure="train with expert_sharing='outer'",
            )
        if (found := _NAME.fullmatch(name)) and found["leaf"] in TO_OFFICIAL:
            block = "attn" if found["block"] == "self_attn" else found["block"]
            place = f"model.llm.layers.{found['layer']}.{block}.{TO_OFFICIAL[found['leaf']]}"
            name = f"base_model.model.{place}.{found['factor']}"
        tensors[name] = tensor
    return replace(adapter, tensors=tensors, config=_targets(adapter.config, TO_OFFICIAL))


def _trimmed(name: str, factor: Tensor, vocabulary: int) -> Tensor:
    if bool((factor[vocabulary:] != 0).any()):
        raise LoraError(
            name,
            reason=f"has {factor.shape[0]} rows, and not all beyond the vocabulary of {vocabulary} are zero",
            cure="give the base that it was trained on",
        )
    return factor[:vocabulary]


def _targets(config: Mapping[str, Any], leaves: Mapping[str, str]) -> dict[str, Any]:
    named = config.get("target_modules")
    if not isinstance(named, list | tuple):
        return dict(config)
    return {**config, "target_modules": sorted({leaves.get(one, one) for one in named})}
