"""The seams of the SDK at which one linear, one factor or one collective can be made wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from lora_plugins_sdk import ParallelRun, ParamRow, RunFacts, SelectedPlugin, SitePlan, branch, factors, table
from lora_plugins_sdk.block_layout import Run
from lora_plugins_sdk.shards import Place

Delta = Callable[..., torch.Tensor]


def rows_changed(change: Callable[[ParamRow, RunFacts], ParamRow]) -> AbstractContextManager[Any]:
    """Every row of the parameter table as `change` makes it, as a plugin's own hooks could."""
    complete = SelectedPlugin.complete_row

    def completed(plugin: SelectedPlugin, row: ParamRow, hf_config: Any, facts: RunFacts) -> ParamRow:
        return change(complete(plugin, row, hf_config, facts), facts)

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


def runs_changed(module: str, order: Callable[[Sequence[Run]], Sequence[Run]]) -> AbstractContextManager[Any]:
    """The branch of one host linear with the runs of a block in another order."""
    site_delta = branch.site_delta

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        layout = replace(plan.layout, runs=tuple(order(plan.layout.runs)))
        return site_delta(replace(plan, layout=layout), run)

    return delta_changed(module, change)


def tagged(module: str, factor: str, group: str | None) -> AbstractContextManager[Any]:
    """One factor's gradient summed over another group, or over none."""

    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        return replace(row, grad_sum_group=group) if (row.host_module, row.factor) == (module, factor) else row

    return rows_changed(change)


def marked(module: str, param: str, **marks: Any) -> AbstractContextManager[Any]:
    """The marks that the host reads off one stored parameter."""

    def tag(right: Any, parameter: nn.Parameter, rows: list[ParamRow], run: ParallelRun) -> None:
        right(parameter, rows, run)
        if (rows[0].host_module, rows[0].param) == (module, param):
            for name, value in marks.items():
                setattr(parameter, name, value)

    return wrapped(factors, "_tag", tag)


@contextmanager
def region_changed(module: str, **collectives: Any) -> Iterator[None]:
    """Other collectives in the branch of one host linear."""

    def change(plan: SitePlan, facts: RunFacts) -> SitePlan:
        return replace(plan, region=replace(plan.region, **collectives)) if facts.tp > 1 else plan

    with collectives_callable(), plan_changed(module, change):
        yield


def own_slice(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's tokens of its own partial product: a slice in the place of a sum."""
    return rows.chunk(group.size())[group.rank()].contiguous()


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
