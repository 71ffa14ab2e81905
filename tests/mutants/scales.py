"""The factor on B A x: alpha, rank, rsLoRA, in the branch and in what the export says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from lora_plugins_sdk import LoraConfig, ParallelRun, SitePlan, peft_export
from lora_plugins_sdk.factors import LoraFactors
from mutants.mutant import seeded
from mutants.places import ANYWHERE, EMBEDDING, FC1
from mutants.seams import Delta, delta_changed, wrapped


def _scale(formula: Any) -> Any:
    return patch.object(LoraConfig, "scale", property(formula))


@seeded("merge", words="merging the adapter")
@seeded("fold", imitates="alpha left out", site=EMBEDDING, words="alpha was left out")
def alpha_forgotten() -> Iterator[None]:
    """The delta is scaled by 1 / rank."""
    with _scale(lambda lora: 1 / lora.rank):
        yield


@seeded("fold", imitates="B24", site=FC1, words="was applied twice")
def scale_applied_twice() -> Iterator[None]:
    """One site scales its delta, which the factors' B held already."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        def delta(output: torch.Tensor, x: torch.Tensor, factors: LoraFactors) -> torch.Tensor:
            with patch.object(factors, "scale", factors.scale**2):
                return right(output, x, factors)

        return delta

    with delta_changed(FC1, change):
        yield


@seeded("fold-gradients", imitates="scale in forward only", site=ANYWHERE, words="was not applied")
def scale_missing_in_the_backward() -> Iterator[None]:
    """The factors' gradients lack the scale."""

    def unscaled(right: Any, context: Any, grad: torch.Tensor) -> Any:
        output, x, *rest = right(context, grad)
        return output, x, *[one if one is None else one / context.scale for one in rest]

    with _backward(unscaled):
        yield


def _backward(wrapper: Any) -> Any:
    from lora_plugins_sdk.branch import LoraBranch

    right = LoraBranch.backward
    return patch.object(LoraBranch, "backward", staticmethod(lambda context, grad: wrapper(right, context, grad)))


@seeded("rslora", imitates="B34", site=ANYWHERE, words="was ignored")
def rslora_ignored() -> Iterator[None]:
    """The delta is scaled by alpha / rank where the config asks for alpha / sqrt(rank)."""
    with _scale(lambda lora: lora.alpha / lora.rank):
        yield


@seeded("peft-rslora", imitates="B34", words="use_rslora")
def rslora_not_exported() -> Iterator[None]:
    """The exported config does not say that the scale is alpha / sqrt(rank)."""

    def without(right: Any, *arguments: Any) -> dict[str, Any]:
        return {key: value for key, value in right(*arguments).items() if key != "use_rslora"}

    with wrapped(peft_export, "peft_config", without):
        yield


@seeded("peft", imitates="B34, B41", words="lora_alpha")
def scale_exported_as_alpha() -> Iterator[None]:
    """The exported config holds alpha / rank under the name lora_alpha."""

    def folded(right: Any, adapter: Any, *arguments: Any) -> dict[str, Any]:
        return right(adapter, *arguments) | {"lora_alpha": adapter.table.lora.scale}

    with wrapped(peft_export, "peft_config", folded):
        yield
