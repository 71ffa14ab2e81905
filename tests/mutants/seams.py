"""The seams of the SDK at which one linear, one factor or one collective can be made wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lora_plugins_sdk import ParallelRun, ParamRow, RunFacts, SelectedPlugin, SitePlan, branch, factors, table
from lora_plugins_sdk.shards import Place

Delta = Callable[..., torch.Tensor]


def rows_changed(change: Callable[[ParamRow, RunFacts], ParamRow]) -> AbstractContextManager[Any]:
    """Every row of the parameter table as `change` makes it, as a plugin's own hooks could."""
    complete = SelectedPlugin.complete_row

    def completed(plugin: SelectedPlugin, row: ParamRow, facts: RunFacts) -> ParamRow:
        return change(complete(plugin, row, facts), facts)

    return patch.object(SelectedPlugin, "complete_row", completed)


def plan_changed(module: str, change: Callable[[SitePlan, RunFacts], SitePlan]) -> AbstractContextManager[Any]:
    """The plan of one host linear as `change` makes it."""
    derive = table._plan

    def derived(*arguments: Any) -> SitePlan:
        plan: SitePlan = derive(*arguments)
        return change(plan, arguments[-1]) if plan.host_module == module else plan

    return patch.object(table, "_plan", derived)


def delta_changed(module: str, change: Callable[[Delta, SitePlan, ParallelRun], Delta]) -> AbstractContextManager[Any]:
    """The branch of one host linear as `change` makes it, as a plugin's `lora_site_delta` could."""
    site_delta = branch.site_delta

    def changed(plan: SitePlan, run: ParallelRun) -> Delta:
        right: Delta = site_delta(plan, run)
        return change(right, plan, run) if plan.host_module == module else right

    return patch.object(branch, "site_delta", changed)


def collectives_callable() -> AbstractContextManager[Any]:
    """A region may hold a function `(rows, group) -> rows` in the place of a collective."""
    right = branch.apply_collective

    def apply(collective: Any, rows: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
        return collective(rows, group) if callable(collective) else right(collective, rows, group)

    return patch.object(branch, "apply_collective", apply)


def initial_values_changed(change: Callable[[ParamRow, int, Place], torch.Tensor]) -> AbstractContextManager[Any]:
    """Each factor's initial local value from `change(row, seed, place)`."""
    return patch.object(factors, "initial_factor", change)


def wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`owner.name` replaced by a function that gets the original first: `wrapper(original, *args, **kwargs)`."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return patch.object(owner, name, replacement)
