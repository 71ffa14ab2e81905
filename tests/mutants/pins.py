"""Pins that do not hold: what the engine cannot serve is trained all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from lora_plugins_sdk import ParallelRun, SitePlan, table
from lora_plugins_sdk.factors import LoraFactors
from mutants.mutant import seeded
from mutants.places import FC1, QKV
from mutants.seams import Delta, delta_changed, wrapped


@seeded("pinned", imitates="B26", site="*", factor="B", words="trained although")
def pins_forgotten() -> Iterator[None]:
    """The table takes no notice of what the run pins."""
    with wrapped(table, "pinned_modules", lambda right, *arguments: frozenset()):
        yield


@seeded("pinned", imitates="mask in the forward alone", site=FC1, words="trained although")
def pinned_factors_are_parameters() -> Iterator[None]:
    """One linear's pinned factors are parameters, so weight decay changes them."""

    def registered(right: Any, factors: LoraFactors, name: str, value: torch.Tensor) -> None:
        if factors.plan.host_module == FC1:
            factors.register_parameter(name, nn.Parameter(value))
            vars(factors.get_parameter(name)).update(grad_sum_group=None, allreduce=True, sequence_parallel=False)
        else:
            right(factors, name, value)

    with patch.object(LoraFactors, "register_buffer", lambda *args: registered(nn.Module.register_buffer, *args)):
        yield


@seeded("pinned", imitates="B28", site=QKV, words="is not what it is without")
def neighbours_of_a_pinned_projection_are_held_too() -> Iterator[None]:
    """One linear with a pinned projection adds no delta at all."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        return (lambda output, x, factors: output) if any(row.pinned for row in plan.rows) else right

    with delta_changed(QKV, change):
        yield
