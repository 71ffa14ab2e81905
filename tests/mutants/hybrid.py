"""Faults in what only a hybrid with experts has: sections, output gates, a router's linear, the expert axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

import lora_plugin_qwen36_moe
from lora_plugins_sdk import BlockLayout, ParallelRun, ParamRow, RunFacts, SitePlan, shards
from lora_plugins_sdk.block_layout import Section
from lora_plugins_sdk.branch import site_delta
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.testing import Layout
from mutants.mutant import seeded
from mutants.places import TP2_SP
from mutants.seams import Delta, delta_changed, rows_changed, runs_changed, wrapped

GDN = "decoder.layers.2.self_attention.in_proj"
GATED = "decoder.layers.1.self_attention.linear_qkv"
ROUTER = "decoder.layers.1.mlp.router"
EXPERTS = "decoder.layers.2.mlp.experts.linear_fc1"
# transformers keeps its experts in one module, so their outputs show in the linear that comes next.
AFTER_EXPERTS = "decoder.layers.3.self_attention.linear_qkv"
EP2 = Layout(dp=2, ep=2)

hybrid = partial(seeded, subject="hybrid")


@hybrid("fold", imitates="order of a pack (B2)", site=GDN)
def output_gate_before_queries_keys_and_values() -> Iterator[None]:
    """The branch takes a linear attention's rows as z|q|k|v|b|a."""
    with runs_changed(GDN, lambda runs: (runs[3], *runs[:3], *runs[4:])):
        yield


@hybrid("outputs", TP2_SP, imitates="B23", site=GDN)
def sections_split_as_one() -> Iterator[None]:
    """A rank takes its half of q|k|v as a whole, and not its half of each."""

    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        if row.host_module != GDN or len(row.sections) == 1:
            return row
        whole = Section(hf=row.full_shape[0], local=row.local_shape[0])
        return replace(row, sections=(whole,))

    with rows_changed(change):
        yield


@hybrid("fold", imitates="gate per head (B2)", site=GATED)
def gates_beside_their_queries() -> Iterator[None]:
    """The branch takes the host to alternate queries and gates, as HF does."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        blocks, sections = plan.layout.blocks, plan.layout.sections
        shares = [[rows // blocks for rows in counts] for counts in sections]
        plain = BlockLayout.in_order(blocks=blocks, shares=shares, sections=sections)
        return site_delta(replace(plan, layout=plain), run)

    with delta_changed(GATED, change):
        yield


@hybrid("fold", imitates="order of a pack (B2)", site=GATED)
def gates_before_their_queries() -> Iterator[None]:
    """The branch takes a group's gates to come first."""
    with runs_changed(GATED, lambda runs: (*runs[2:4], *runs[:2], *runs[4:])):
        yield


@hybrid("fold", imitates="delta after the choice of experts", site=ROUTER)
def router_chooses_by_its_own_logits() -> Iterator[None]:
    """One router's delta does not reach the logits that experts are chosen by."""
    with delta_changed(ROUTER, lambda right, plan, run: lambda output, x, factors: output):
        yield


@hybrid("fold", imitates="B33 along the expert axis", site=AFTER_EXPERTS)
def experts_in_reverse() -> Iterator[None]:
    """In one grouped linear the A of each expert is used for another."""

    def a(factors: LoraFactors) -> torch.Tensor:
        right = _A(factors)
        return right.flip(0) if factors.plan.host_module == EXPERTS else right

    with patch.object(LoraFactors, "a", property(a)):
        yield


@hybrid("outputs", EP2, imitates="B23", site="*.experts.*")
def experts_numbered_per_rank() -> Iterator[None]:
    """Every rank takes its first expert for the model's first."""
    with wrapped(shards, "local_experts", lambda right, row, place: range(row.local_shape[0])):
        yield


@seeded("gradients", EP2, subject="shared-outer", imitates="B4", site=EXPERTS, factor="A")
def shared_factor_not_summed_over_experts() -> Iterator[None]:
    """A factor that all experts share gets the gradient of the local ones alone."""

    def change(row: ParamRow, facts: RunFacts) -> ParamRow:
        hit = (row.host_module, row.factor) == (EXPERTS, "A")
        return replace(row, grad_sum_group=None) if hit else row

    with rows_changed(change):
        yield


@hybrid("base", imitates="norm centred twice", words="base_weights")
def output_norm_not_centred() -> Iterator[None]:
    """The plugin loads the linear attention's output norm as if HF centred it at zero."""
    architecture = lora_plugin_qwen36_moe.ARCHITECTURE
    weights = tuple(replace(one, offset=0.0) for one in architecture.base_weights)
    with patch.object(lora_plugin_qwen36_moe, "ARCHITECTURE", replace(architecture, base_weights=weights)):
        yield


_A = vars(LoraFactors)["a"].fget
