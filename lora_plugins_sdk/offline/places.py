"""Where a base stores the weight of each linear and of the embedding: as a tensor, or as rows of all experts' one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lora_plugins_sdk.offline.published import published_rows
from lora_plugins_sdk.safetensors_header import StoredTensor
from lora_plugins_sdk.weight_files import WeightFiles

_WEIGHT = ".weight"
_FUSED = re.compile(r"(?P<block>.+\.(?:shared_)?experts)\.(?P<leaf>gate_up_proj|gate_proj|up_proj|down_proj)")
# A language model by itself, and within a multimodal one.
_LANGUAGE = re.compile(r"(?:model\.|language_model\.)*(?P<tail>layers\.\d+\..+|embed_tokens|lm_head)")
_LAYER = re.compile(r"[^.]+\.\d+\..+")
# More than any model has; a damaged shape must not make a list of this length.
_MOST_EXPERTS = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A linear's weight `[rows, columns]` within a stored tensor.

    Args:
        module: its name in the base.
        tensor: name of the stored tensor.
        first: first of its rows, all dimensions but the last counted as rows.
        rows: how many.
        step: distance from one of its rows to the next.
        columns: input width.
        experts: whether the tensor holds the weights of all experts.
    """

    module: str
    tensor: str
    first: int
    rows: int
    step: int = 1
    columns: int
    experts: bool = False


class BasePlaces:
    """Every linear of a base, by its HF module name.

    Args:
        base: the base's weights.
    """

    def __init__(self, base: WeightFiles) -> None:
        self.places: dict[str, Place] = {}
        for name in sorted(base.where):
            self.places |= {place.module: place for place in _places(name, base.tensor(name))}
        self._base = base
        self._tails: dict[str, list[str]] = {}
        for module in self.places:
            if found := _LANGUAGE.fullmatch(module):
                self._tails.setdefault(found["tail"], []).append(module)

    def find(self, module: str) -> Place | None:
        """The place of an adapter's module: by its exact name, or in the language model by what follows its prefix
        (`model.layers.0...` in a multimodal base is `model.language_model.layers.0...`).
        """
        if module in self.places:
            return self.places[module]
        found = _LANGUAGE.fullmatch(module)
        same = self._tails.get(found["tail"], []) if found else []
        return self.places[same[0]] if len(same) == 1 else None

    def why_absent(self, module: str) -> str:
        """Why the base may lack this module."""
        name = f"{module}{_WEIGHT}"
        tail = _LAYER.search(module)
        near = next((one for one in self.places if tail and one.endswith(f".{tail[0]}")), None)
        if near is not None:
            return f"the base has no {name}; it has {near}{_WEIGHT}"
        block = module.partition(".experts.")[0]
        fused = next((one for one in self._base.where if one.startswith(f"{block}.experts.")), None)
        if fused is not None and ".experts." in module:
            return f"the base has no {name}; it stores these experts as {fused} {list(self._base.tensor(fused).shape)}"
        tied = "; a base without a head of its own ties it to the embedding" if name.startswith("lm_head.") else ""
        return f"the base has no {name}{tied}"


def _places(name: str, stored: StoredTensor) -> Iterator[Place]:
    """The linears in one tensor; none when it is no matrix and no experts' tensor."""
    shape = stored.shape
    if len(shape) == 3 and shape[0] > _MOST_EXPERTS:
        return
    published = published_rows(name, shape)
    if published is not None:
        for one in published:
            yield Place(
                module=one.module,
                tensor=name,
                first=one.first,
                rows=one.rows,
                step=one.step,
                columns=shape[-1],
                experts=len(shape) == 3,
            )
        return
    if name.endswith(_WEIGHT) and len(shape) >= 1:
        # Kernels of convolutions and norms are here too, so that a fold into one is an error about its shape.
        yield Place(module=name.removesuffix(_WEIGHT), tensor=name, first=0, rows=shape[0], columns=shape[-1])
        return
    found = _FUSED.fullmatch(name)
    if found is None or len(shape) != 3 or 0 in shape:
        return
    leaves = ("gate_proj", "up_proj") if found["leaf"] == "gate_up_proj" else (found["leaf"],)
    experts, rows, columns = shape
    each = rows // len(leaves)
    for expert in range(experts):
        for number, leaf in enumerate(leaves):
            yield Place(
                module=f"{found['block']}.{expert}.{leaf}",
                tensor=name,
                first=expert * rows + number * each,
                rows=each,
                columns=columns,
                experts=True,
            )
