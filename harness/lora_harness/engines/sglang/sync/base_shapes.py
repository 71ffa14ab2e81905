"""Shapes of the base's weights by their place in a layer, whatever wraps the language model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lora_plugins_sdk.weight_files import WeightFiles

_IN_LAYER = re.compile(r"(?:model\.|language_model\.|llm\.)*layers\.(?P<layer>\d+)\.(?P<path>.+)")
_OUTSIDE = re.compile(r"(?:model\.|language_model\.|llm\.)*(?P<path>[a-z_]+)\.weight")
_EXPERT = re.compile(r"mlp\.(?P<bank>experts|shared_experts)\.(?P<expert>\d+)\.")
_PACKED = re.compile(r"mlp\.(?P<bank>experts|shared_experts)\.\w+")
# Published names of Inkling.
_RENAMED = {"unembed": "lm_head", "embed": "embed_tokens"}

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseShapes:
    """What the base holds.

    Args:
        layers: number of the layer -> path in the layer, without `.weight` -> shape.
        outside: `lm_head` and the like -> shape.
    """

    layers: Mapping[int, Mapping[str, Shape]]
    outside: Mapping[str, Shape]

    @classmethod
    def of(cls, base: WeightFiles) -> BaseShapes:
        """Read them off the headers."""
        layers: dict[int, dict[str, Shape]] = {}
        outside: dict[str, Shape] = {}
        for name in base.where:
            shape = tuple(base.tensor(name).shape)
            if found := _IN_LAYER.fullmatch(name):
                layers.setdefault(int(found["layer"]), {})[found["path"].removesuffix(".weight")] = shape
            elif found := _OUTSIDE.fullmatch(name):
                outside[_RENAMED.get(found["path"], found["path"])] = shape
        if "lm_head" not in outside and "embed_tokens" in outside:
            # A base without a head of its own ties it to the embedding; SGLang gives it a LoRA all the same.
            outside["lm_head"] = outside["embed_tokens"]
        return cls(layers=layers, outside=outside)

    def experts(self, layer: int, bank: str = "experts") -> int:
        """Experts of a layer in a bank, `experts` or `shared_experts`; 0 when it has none."""
        weights = self.layers.get(layer, {})
        for path, shape in weights.items():
            if len(shape) == 3 and (packed := _PACKED.fullmatch(path)) and packed["bank"] == bank:
                return shape[0]
        names = (found for path in weights if (found := _EXPERT.match(path)))
        return len({found["expert"] for found in names if found["bank"] == bank})
