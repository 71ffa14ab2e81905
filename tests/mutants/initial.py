"""Initial values that depend on the rank, the local size or nothing at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from lora_plugins_sdk import ParallelRun, ParamRow
from lora_plugins_sdk.init import full_initial_factor, initial_factor
from lora_plugins_sdk.shards import Place
from mutants.mutant import seeded
from mutants.places import ANYWHERE, DP2, FC2, PROJ, QKV, TP2
from mutants.seams import initial_values_changed


@seeded("initial-export", TP2, imitates="B5", site=QKV, factor="A")
def a_drawn_per_tensor_parallel_rank() -> Iterator[None]:
    """A replicated A is drawn from a seed that the TP rank enters."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        return initial_factor(row, seed + (place.tp_rank if row.host_module == QKV else 0), place)

    with initial_values_changed(value):
        yield


@seeded("initial-export", DP2, imitates="B5", site=QKV, factor="A")
def a_drawn_per_data_parallel_rank() -> Iterator[None]:
    """A is drawn from a seed that the global rank enters, so that data parallel replicas differ."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        return initial_factor(row, seed + (dist.get_rank() if row.host_module == QKV else 0), place)

    with initial_values_changed(value):
        yield


@seeded("initial-export", TP2, imitates="B11", site=PROJ, factor="A")
def shards_drawn_alike() -> Iterator[None]:
    """Both ranks draw their shard of a row-parallel A from one state."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        return initial_factor(row, seed, ParallelRun.single() if row.host_module == PROJ else place)

    with initial_values_changed(value):
        yield


@seeded("initial-export", TP2, imitates="B10", site=FC2, factor="A", words="1.414")
def spread_of_the_local_fan_in() -> Iterator[None]:
    """A row-parallel A is spread by its local fan-in, so it is wider under TP."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        wider = math.sqrt(row.full_shape[1] / row.local_shape[1]) if row.host_module == FC2 else 1.0
        return initial_factor(row, seed, place) * (wider if row.factor == "A" else 1.0)

    with initial_values_changed(value):
        yield


@seeded("initial", imitates="one state for all", site=ANYWHERE, factor="A", words="one key for both")
def one_draw_for_all_layers() -> Iterator[None]:
    """The name does not enter the seed, so equal shapes get equal values."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        return initial_factor(replace(row, init_key="A"), seed, place)

    with initial_values_changed(value):
        yield


@seeded("initial", imitates="both factors random", site=PROJ, factor="B", words="not zero")
def b_not_zero() -> Iterator[None]:
    """One B starts at random values, so that a fresh adapter changes the policy."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        if (row.host_module, row.factor) == (PROJ, "B"):
            return full_initial_factor(replace(row, factor="A"), seed)
        return initial_factor(row, seed, place)

    with initial_values_changed(value):
        yield
