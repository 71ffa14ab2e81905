"""How two adapters differ: in their configs, in what they adapt, in the products that they add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lora_plugins_sdk.adapter_meta import engine_problems
from lora_plugins_sdk.errors import raise_if_any
from lora_plugins_sdk.offline.adapter import PlainAdapter
from lora_plugins_sdk.offline.products import largest_difference

# What a config says of the adapter's function and origin; the rest is bookkeeping of the tool that wrote it.
_COMPARED = (
    "base_model_name_or_path",
    "exclude_modules",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "r",
    "target_modules",
    "task_type",
    "use_rslora",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDiff:
    """Every difference of adapter A and adapter B.

    Args:
        config: key -> (value in A, value in B), None for an absent one.
        only_a: modules that B does not adapt, and whole weights that it lacks or has otherwise.
        only_b: the same the other way round.
        shapes: module -> (that of A's product, that of B's), as the weight is stored: `[out, in]`, an embedding's
            `[vocabulary, hidden]`.
        deltas: module -> largest absolute entry of (scale B A of A - scale B A of B), for modules of equal shapes.
    """

    config: Mapping[str, tuple[Any, Any]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]
    deltas: Mapping[str, float]

    def differs(self, tolerance: float = 0.0) -> bool:
        """Whether there is any difference; those of products count from above `tolerance`."""
        return bool(self.config or self.only_a or self.only_b or self.shapes) or any(
            delta > tolerance for delta in self.deltas.values()
        )


def diff_adapters(one: PlainAdapter, other: PlainAdapter) -> AdapterDiff:
    """Compare two adapters; their factors may differ where their products do not.

    Raises:
        LoraError: one is an export for an engine and the other is not: no name means the same in both.
    """
    if _engine(one) != _engine(other):
        raise_if_any(
            "adapters under different names cannot be compared:",
            (
                problem
                for adapter in (one, other)
                for problem in engine_problems(str(adapter.directory), adapter.saved.origin)
            ),
        )
    shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    deltas: dict[str, float] = {}
    for module in one.pairs.keys() & other.pairs.keys():
        left, right = one.pairs[module], other.pairs[module]
        sizes = (left.b.shape[0], left.a.shape[1]), (right.b.shape[0], right.a.shape[1])
        if sizes[0] == sizes[1]:
            deltas[module] = largest_difference(left, one.lora.scale, right, other.lora.scale)
        else:
            shapes[module] = sizes
    return AdapterDiff(
        config={
            key: (one.config.get(key), other.config.get(key))
            for key in _COMPARED
            if _normal(one.config.get(key)) != _normal(other.config.get(key))
        },
        only_a=_only(one, other),
        only_b=_only(other, one),
        shapes=dict(sorted(shapes.items())),
        deltas=dict(sorted(deltas.items())),
    )


def _engine(adapter: PlainAdapter) -> str | None:
    return None if adapter.saved.origin is None else adapter.saved.origin.engine


def _only(one: PlainAdapter, other: PlainAdapter) -> tuple[str, ...]:
    wholes = [
        name
        for name, tensor in one.wholes.items()
        if name not in other.wholes or not torch.equal(tensor, other.wholes[name])
    ]
    return tuple(sorted([*(one.pairs.keys() - other.pairs.keys()), *wholes]))


def _normal(value: object) -> object:
    """Lists of names have no order; false and nothing are the same as absent."""
    return sorted(map(str, value)) if isinstance(value, list) and value else value or None
