"""Faults in what only Inkling has: relative states, shared factors, a muP head, a trimmed vocabulary, convolutions.

I1 to I5 are hazards in the published code of a peer's Inkling, of which `known_faults` keeps the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import lora_plugin_inkling
from lora_plugins_sdk import ParallelRun, ParamRow, Site, SitePlan, scatter
from lora_plugins_sdk.branch import site_delta
from lora_plugins_sdk.init import initial_factor
from lora_plugins_sdk.shards import Place
from lora_plugins_sdk.testing import Layout
from mutants import exports
from mutants.mutant import seeded
from mutants.places import HEAD, TP2_SP
from mutants.seams import (
    Delta,
    delta_changed,
    initial_values_changed,
    marked,
    own_slice,
    region_changed,
    runs_changed,
    tagged,
    wrapped,
)

EP2 = Layout(dp=2, ep=2)
ETP1_SP = Layout(tp=2, etp=1, sequence_parallel=True)
ETP2_EP2 = Layout(tp=2, dp=2, ep=2, sequence_parallel=True)
GLOBAL = "decoder.layers.2.self_attention.linear_qkvr"
SLIDING = "decoder.layers.1.sliding_attention.linear_qkvr"
OUTPUT = "decoder.layers.1.sliding_attention.linear_proj"
FC1 = "decoder.layers.1.mlp.experts.linear_fc1"
FC2 = "decoder.layers.2.mlp.experts.linear_fc2"
SHARED_FC1 = "decoder.layers.1.mlp.shared_experts.linear_fc1"
SHARED_FC2 = "decoder.layers.2.mlp.shared_experts.linear_fc2"

inkling = partial(seeded, subject="inkling")


@inkling("fold", imitates="order of a pack (B2)", site=GLOBAL)
def relative_states_before_queries() -> Iterator[None]:
    """The branch takes an attention's rows as r|q|k|v."""
    with runs_changed(GLOBAL, lambda runs: (runs[3], *runs[:3])):
        yield


@inkling("base", words="base_weights")
@inkling("fold", imitates="order of a pack (B2)", site=SLIDING)
def relative_states_declared_before_keys() -> Iterator[None]:
    """The plugin declares q, r, k, v for sliding layers, for the base and the adapter."""
    architecture = lora_plugin_inkling.ARCHITECTURE

    def wrong(site: Site) -> Site:
        if not site.path.endswith("sliding_attention.linear_qkvr"):
            return site
        q, k, v, r = site.projections
        return replace(site, projections=(q, r, k, v))

    sites = tuple(map(wrong, architecture.sites))
    with patch.object(lora_plugin_inkling, "ARCHITECTURE", replace(architecture, sites=sites)):
        yield


@inkling("outputs", TP2_SP, imitates="B23", site=SLIDING)
def relative_states_before_queries_on_one_rank() -> Iterator[None]:
    """On the second TP rank the branch takes its shard as r|q|k|v."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        if run.tp_rank == 0:
            return right
        runs = (plan.layout.runs[3], *plan.layout.runs[:3])
        return site_delta(replace(plan, layout=replace(plan.layout, runs=runs)), run)

    with delta_changed(SLIDING, change):
        yield


@inkling("gradients", EP2, imitates="B4", site=FC1, factor="A", words="tag `etp_ep` dropped")
def shared_a_not_summed_over_experts() -> Iterator[None]:
    """The A of w1 and w3 that all routed experts share gets the gradient of the local ones alone."""
    with tagged(FC1, "A", None):
        yield


@inkling("gradients", EP2, imitates="B4", site=FC2, factor="B", words="tag `etp_ep` dropped")
def shared_b_not_summed_over_experts() -> Iterator[None]:
    """The B of w2 that all routed experts share gets the gradient of the local ones alone."""
    with tagged(FC2, "B", None):
        yield


@inkling("gradients", ETP2_EP2, imitates="B4, B6", site=FC1, factor="A", words="another tag than `etp_ep`")
def shared_a_summed_over_etp_alone() -> Iterator[None]:
    """That A is summed over the ranks that split an expert, and not over those with other experts."""
    with tagged(FC1, "A", "etp"):
        yield


@inkling("gradients", TP2_SP, imitates="B1", site=SHARED_FC1, factor="A", words="tag `tp` dropped")
def a_of_shared_experts_not_summed() -> Iterator[None]:
    """Under SP the A that the shared experts have in common is not summed over TP."""
    with tagged(SHARED_FC1, "A", None):
        yield


@inkling("gradients", TP2_SP, imitates="B1", site=SHARED_FC2, factor="B", words="tag `tp` dropped")
def b_of_shared_experts_not_summed() -> Iterator[None]:
    """Under SP the B that the shared experts have in common is not summed over TP."""
    with tagged(SHARED_FC2, "B", None):
        yield


@inkling("initial-export", EP2, imitates="B5", site=FC1, factor="A")
def shared_a_drawn_per_rank() -> Iterator[None]:
    """The A that all routed experts share is drawn from a seed that the rank enters."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        return initial_factor(row, seed + (dist.get_rank() if row.host_module == FC1 else 0), place)

    with initial_values_changed(value):
        yield


@inkling("fold", imitates="muP scale left out", site=HEAD, words="constant factor 3")
def head_adapter_reads_the_undivided_norm() -> Iterator[None]:
    """The head's branch reads the final norm without the division by the muP width, as its base does not."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        return lambda output, x, factors: right(output, x * 3.0, factors)

    with delta_changed(HEAD, change):
        yield


@inkling("base", imitates="muP scale left out", words="constant factor 3")
def final_norm_not_divided() -> Iterator[None]:
    """The base's head, and so its adapter, read the final norm undivided."""
    from lora_plugin_inkling.model.language_model import MupNorm
    from lora_plugins_sdk.hosts.rms_norm import TorchRMSNorm

    with patch.object(MupNorm, "forward", TorchRMSNorm.forward):
        yield


@inkling("base", imitates="B42", words="lm_head.weight")
def padding_of_the_checkpoint_kept() -> Iterator[None]:
    """The head is loaded with the rows that HF's has for no token."""
    from lora_plugin_inkling.model import checkpoint

    with patch.object(checkpoint, "_Trimmed", lambda stored, vocabulary: stored):
        yield


@inkling("import-export", TP2_SP, imitates="B42, I5", site=HEAD, factor="B", words="[62, 8] instead of [61, 8]")
def padding_of_the_vocabulary_exported() -> Iterator[None]:
    """The row by which TP pads the vocabulary on the last rank is exported."""
    with exports.padding_exported():
        yield


@inkling("import-export", TP2_SP, imitates="B42, I5", site=HEAD, factor="B")
def last_rank_padded_at_the_front() -> Iterator[None]:
    """The last TP rank puts its padding row before the rows of its tokens."""

    def cut(right: Any, row: ParamRow, full: torch.Tensor, run: ParallelRun) -> torch.Tensor:
        local = right(row, full, run)
        wrong = (row.host_module, row.factor) == (HEAD, "B") and run.tp_rank == run.facts.tp - 1 > 0
        return local.roll(1, 0) if wrong else local

    with wrapped(scatter, "shard", cut):
        yield


@inkling("outputs", TP2_SP, imitates="convolution cut at a rank's end", site="decoder.layers.0.mlp.linear_fc1")
def convolutions_forget_the_text_before() -> Iterator[None]:
    """Under SP every rank takes the beginning of its part for the beginning of the text."""
    with _earlier_tokens(lambda right, x, count, group: x.new_zeros(count, *x.shape[1:])):
        yield


@inkling("input-gradients", TP2_SP, imitates="convolution cut at a rank's end", site="decoder.layers.3.mlp.linear_fc2")
def convolutions_send_no_gradient_back() -> Iterator[None]:
    """Under SP the tokens of the rank before get no gradient for their part in this rank's convolution."""
    with _earlier_tokens(lambda right, x, count, group: right(x.detach(), count, group)):
        yield


def _earlier_tokens(wrong: Any) -> Any:
    from lora_plugin_inkling.model import short_conv

    return wrapped(short_conv, "earlier_tokens", wrong)


@inkling("grad-norm", TP2_SP, imitates="B12, I1", site=SLIDING, factor="B", words="is not counted")
def shard_of_relative_states_not_counted() -> Iterator[None]:
    """A B that TP splits is not marked so, and the gradient norm counts rank 0's shard alone."""
    with marked(SLIDING, "B_r_proj", tensor_model_parallel=False):
        yield


@inkling("initial-export", TP2_SP, imitates="B11, I2", site=OUTPUT, factor="A")
def row_shards_drawn_alike() -> Iterator[None]:
    """Both ranks draw their shard of a row-parallel A from one state."""

    def value(row: ParamRow, seed: int, place: Place) -> torch.Tensor:
        return initial_factor(row, seed, ParallelRun.single() if row.host_module == OUTPUT else place)

    with initial_values_changed(value):
        yield


@inkling("input-gradients", TP2_SP, imitates="B2, I3", site=GLOBAL, words="region")
def column_branch_keeps_its_share_of_the_gradient() -> Iterator[None]:
    """The r-wide gradient of a column-parallel branch is not summed over TP: dX gets one rank's share."""
    with region_changed(GLOBAL, backward=own_slice):
        yield


@inkling("gradients", ETP1_SP, site=FC1, factor="A")
@inkling("gradients", TP2_SP, imitates="B6, I4", site=FC1, factor="A")
def experts_untagged_and_unmarked_without_ep() -> Iterator[None]:
    """With EP 1 and TP 2 a shared A has no tag, and it is reduced over the dense data-parallel group."""
    with tagged(FC1, "A", None), marked(FC1, "A", allreduce=True):
        yield
