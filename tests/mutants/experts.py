"""Faults of routed experts: sums over ETP, the experts' own data-parallel domain, copies in the norm, one draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lora_plugins_sdk import ParamRow
from lora_plugins_sdk.init import initial_factor
from lora_plugins_sdk.shards import Place
from lora_plugins_sdk.testing import Layout
from mutants.mutant import seeded
from mutants.seams import initial_values_changed, marked, tagged

EP2 = Layout(dp=2, ep=2)
TP2_SP = Layout(tp=2, sequence_parallel=True)
ETP1_SP = Layout(tp=2, etp=1, sequence_parallel=True)
FC1 = "decoder.layers.1.mlp.experts.linear_fc1"
FC2 = "decoder.layers.2.mlp.experts.linear_fc2"


@seeded("gradients", TP2_SP, subject="hybrid", imitates="B7", site=FC1, factor="A", words="tag `etp` dropped")
def replica_not_summed_over_etp() -> Iterator[None]:
    """The A's of a column-parallel expert, which every ETP rank holds, are not summed over them."""
    with tagged(FC1, "A", None):
        yield


@seeded("gradients", ETP1_SP, subject="hybrid", imitates="B6", site=FC2, factor="B", words="gradient of site")
def experts_in_the_dense_domain() -> Iterator[None]:
    """With EP 1 and ETP other than TP an expert's B is reduced over the dense data-parallel group."""
    with marked(FC2, "B_down_proj", allreduce=True):
        yield


@seeded("grad-norm", EP2, subject="shared-outer", imitates="B12", site=FC1, factor="A", words="more than once")
def shared_factor_counted_by_every_rank() -> Iterator[None]:
    """The factor that all experts share is counted in the gradient norm by each rank that holds experts."""
    with marked(FC1, "A", shared=False):
        yield


@seeded("initial", subject="hybrid", imitates="B5", site=FC1, factor="A", words="one key for both")
def one_draw_for_all_experts() -> Iterator[None]:
    """The expert's number does not enter the seed."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        key = row.init_key.replace("{expert}", "0") if row.host_module == FC1 else row.init_key
        return initial_factor(replace(row, init_key=key), seed, place)

    with initial_values_changed(value):
        yield
