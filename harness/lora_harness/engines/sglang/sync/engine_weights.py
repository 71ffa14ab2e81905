"""The base's weights as SGLang holds them.

q, k and v are rows of one parameter there, gate and up of another, and the vocabulary is padded (SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_plugins_sdk.weight_files import WeightFiles

# Leaf of an engine's parameter -> the HF projections whose rows it holds, in order.
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PACKED_IN = {part: (leaf, parts) for leaf, parts in PACKED.items() for part in parts}
_VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineWeight:
    """One parameter of the engine.

    Args:
        name: the engine's name.
        parts: HF tensors that are its rows, in order.
        padded: whether rows of zeros follow, up to a multiple of 64.
    """

    name: str
    parts: tuple[str, ...]
    padded: bool

    def whole(self, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """The parameter.

        Args:
            parts: HF tensors in the order of `self.parts`.
            dtype: the engine's.
        """
        tensors = [one.to(dtype) for one in parts]
        rows = sum(one.shape[0] for one in tensors)
        if self.padded and rows % _VOCABULARY_MULTIPLE:
            tensors.append(tensors[0].new_zeros(-rows % _VOCABULARY_MULTIPLE, *tensors[0].shape[1:]))
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()


def engine_weights(base: WeightFiles, *, tied: bool) -> dict[str, EngineWeight]:
    """The engine's parameters by name.

    Args:
        base: the HF directory it serves.
        tied: whether head and embedding are one parameter.
    """
    found: dict[str, EngineWeight] = {}
    for name in base.where:
        module, _, kind = name.rpartition(".")
        stem, _, leaf = module.rpartition(".")
        if tied and leaf == "lm_head":
            continue
        packed, parts = _PACKED_IN.get(leaf, (leaf, ()))
        whole = tuple(f"{stem}.{part}.{kind}" for part in parts)
        if whole and all(one in base.where for one in whole):
            held = EngineWeight(name=f"{stem}.{packed}.{kind}", parts=whole, padded=False)
        else:
            held = EngineWeight(name=name, parts=(name,), padded=leaf in _VOCABULARY)
        found[held.name] = held
    return found


def differences(expected: Mapping[str, str], reported: Mapping[str, str]) -> list[str]:
    """Names of parameters that are not what they must be, missing and unknown ones among them."""
    return [name for name in sorted(expected.keys() | reported.keys()) if expected.get(name) != reported.get(name)]
