"""Where the branch communicates: a collective left out, doubled, in another order, or of another kind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lora_plugins_sdk import ParallelRun, SitePlan
from lora_plugins_sdk.branch import site_delta
from lora_plugins_sdk.collectives import apply_collective
from lora_plugins_sdk.region import Collective, Region
from mutants.mutant import seeded
from mutants.places import FC1, PROJ, QKV, TP2, TP2_SP
from mutants.seams import Delta, delta_changed, own_slice, region_changed


def _swapped_ranks(collective: Collective) -> Any:
    def swapped(rows: torch.Tensor, group: Any) -> torch.Tensor:
        """The right collective, then (or before) the two ranks' parts in the other order."""
        if collective is Collective.ALL_GATHER:
            return apply_collective(collective, rows, group).roll(rows.shape[0], 0)
        return apply_collective(collective, rows.roll(rows.shape[0] // 2, 0), group)

    return swapped


def _summed_twice(rows: torch.Tensor, group: Any) -> torch.Tensor:
    return apply_collective(Collective.ALL_REDUCE, apply_collective(Collective.ALL_REDUCE, rows, group), group)


@seeded("gradients", TP2, site=FC1, factor="A", words="a gradient sum or a collective over TP is missing")
@seeded("input-gradients", TP2, imitates="B2, I3", site=FC1, words="the region")
def copy_region_missing() -> Iterator[None]:
    """The r-wide gradient of a column-parallel branch is not summed over TP: dX and A get one rank's share."""
    with region_changed(FC1, backward=Collective.NONE):
        yield


@seeded("input-gradients", TP2, imitates="B8", site=FC1, words="region")
def copy_region_doubled() -> Iterator[None]:
    """The r-wide gradient of a column-parallel branch is summed over TP twice."""
    with region_changed(FC1, backward=_summed_twice):
        yield


@seeded("logits", TP2, words="see `outputs`")
@seeded("outputs", TP2, imitates="B8", site=PROJ, words="region")
def row_sum_missing() -> Iterator[None]:
    """The r-wide partial product of a row-parallel branch is not summed over TP."""
    with region_changed(PROJ, forward=Collective.NONE):
        yield


@seeded("outputs", TP2_SP, imitates="a slice in place of a sum", site=PROJ, words="region")
def reduce_scatter_is_a_local_slice() -> Iterator[None]:
    """Under SP a row-parallel branch keeps its own tokens of its own partial product and never sums."""
    with region_changed(PROJ, forward=own_slice):
        yield


@seeded("outputs", TP2_SP, imitates="B2", site=QKV, words="gathered")
def gather_in_the_wrong_rank_order() -> Iterator[None]:
    """Under SP the r-wide product of a column-parallel branch is gathered with the ranks' tokens exchanged."""
    with region_changed(QKV, forward=_swapped_ranks(Collective.ALL_GATHER)):
        yield


@seeded("input-gradients", TP2_SP, imitates="B2", site=QKV, words="region")
def scatter_in_the_wrong_rank_order() -> Iterator[None]:
    """Under SP the r-wide gradient goes back to the other rank's tokens."""
    with region_changed(QKV, backward=_swapped_ranks(Collective.REDUCE_SCATTER)):
        yield


@seeded("input-gradients", TP2_SP, imitates="a slice in place of a sum", site=QKV, words="region")
def hidden_wide_gather_splits_its_gradient() -> Iterator[None]:
    """The hidden-wide input is gathered in place of the r-wide product; backward takes a slice and sums nothing."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        if not run.facts.sequence_parallel:
            return right
        none = Region(forward=Collective.NONE, backward=Collective.NONE, tokens_split=True)
        quiet = site_delta(replace(plan, region=none), run)

        def delta(output: torch.Tensor, x: torch.Tensor, factors: Any) -> torch.Tensor:
            return quiet(output, gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False), factors)

        return delta

    with delta_changed(QKV, change):
        yield


@seeded("completes", TP2, imitates="ranks part ways (B40)", words="not done after 6 s", seconds=6.0)
def one_rank_never_joins_the_sum() -> Iterator[None]:
    """One rank waits in a sum over TP that the other never enters."""

    def wait(rows: torch.Tensor, group: Any) -> torch.Tensor:
        while group.rank() == 1:
            time.sleep(0.1)
        return apply_collective(Collective.ALL_REDUCE, rows, group)

    with region_changed(PROJ, forward=wait):
        yield
