"""Rows of packed projections at the wrong places: heads, groups, halves, shards, orientation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

import lora_plugin_qwen3
from lora_plugins_sdk import BlockLayout, ParallelRun, Site, SitePlan, shards
from lora_plugins_sdk.block_layout import Section, Slab, slabs_of
from lora_plugins_sdk.branch import site_delta
from lora_plugins_sdk.factors import LoraFactors
from lora_plugins_sdk.testing.conformance import Level
from lora_plugins_sdk.testing.conformance.static import packs
from mutants.mutant import seeded
from mutants.places import ANYWHERE, FC1, FC2, HEAD, QKV, TP2
from mutants.seams import Delta, delta_changed, plan_changed, wrapped


def _declared(site_path: str, **fields: Any) -> Any:
    """The plugin's declaration of one site, changed for base and adapter alike."""
    architecture = lora_plugin_qwen3.ARCHITECTURE
    sites = tuple(replace(site, **fields) if site.path == site_path else site for site in architecture.sites)
    return patch.object(lora_plugin_qwen3, "ARCHITECTURE", replace(architecture, sites=sites))


def _site(leaf: str) -> Site:
    return next(site for site in lora_plugin_qwen3.ARCHITECTURE.sites if site.name == leaf)


@seeded("fold", imitates="B2", site=QKV)
def rows_per_head_not_per_group() -> Iterator[None]:
    """The branch takes q|k|v to alternate with each query head, where the host alternates with each group."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        shares = [[rows // 4 for rows in counts] for counts in plan.layout.sections]
        heads = BlockLayout.in_order(blocks=4, shares=shares, sections=plan.layout.sections)
        return site_delta(replace(plan, layout=heads), run)

    with delta_changed(QKV, change):
        yield


@seeded("fold", imitates="B2, B32", site=QKV)
def rows_concatenated_not_grouped() -> Iterator[None]:
    """The branch takes q|k|v to follow each other as wholes."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        sections = plan.layout.sections
        wholes = BlockLayout.in_order(blocks=1, shares=sections, sections=sections)
        return site_delta(replace(plan, layout=wholes), run)

    with delta_changed(QKV, change):
        yield


@seeded("fold", imitates="B25", site=FC1, words="holds the value of")
def gate_and_up_swapped() -> Iterator[None]:
    """The branch adds the gate's delta to up, and up's to the gate; every shape fits."""
    with plan_changed(FC1, lambda plan, facts: replace(plan, adapted=plan.adapted[::-1])):
        yield


@seeded("fold", imitates="B25", site="decoder.layers.0.mlp.linear_fc1")
def halves_declared_in_the_wrong_order() -> Iterator[None]:
    """The plugin declares up before gate, for the base and the adapter."""
    site = _site("linear_fc1")
    with _declared(site.path, projections=site.projections[::-1]):
        yield


@seeded("fold", imitates="order of a pack (B2)", site="decoder.layers.0.self_attention.linear_qkv")
def key_and_value_exchanged() -> Iterator[None]:
    """The plugin declares v before k, for the base and the adapter."""
    site = _site("linear_qkv")
    query, key, value = site.projections
    with _declared(site.path, projections=(query, value, key)):
        yield


@seeded("widths", imitates="width of another key", site="*.linear_fc1", words="output width", here=True)
def width_of_another_projection() -> Iterator[None]:
    """The plugin declares gate and up as wide as the hidden state."""
    site = _site("linear_fc1")
    with _declared(site.path, projections=tuple(replace(one, out_dim="hidden_size") for one in site.projections)):
        yield


@seeded("base", imitates="names mixed up", words="base_weights")
def query_and_key_norms_exchanged() -> Iterator[None]:
    """The plugin names the query's norm where the key's belongs, and the reverse."""
    names = {"q_norm": "k_norm", "k_norm": "q_norm"}
    architecture = lora_plugin_qwen3.ARCHITECTURE
    weights = tuple(
        replace(one, hf=tuple(re.sub(r"[qk]_norm", lambda found: names[found[0]], name) for name in one.hf))
        for one in architecture.base_weights
    )
    with patch.object(lora_plugin_qwen3, "ARCHITECTURE", replace(architecture, base_weights=weights)):
        yield


@seeded("partial-targets", imitates="B28", site=ANYWHERE)
def lone_projection_taken_for_the_first() -> Iterator[None]:
    """The branch counts adapted projections, not declared ones: up alone is added to the gate."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        return site_delta(replace(plan, adapted=tuple(range(len(plan.adapted)))), run)

    with delta_changed(FC1, change):
        yield


@seeded("outputs", TP2, imitates="B23", site=FC1)
def shard_halves_joined_in_the_wrong_order() -> Iterator[None]:
    """On the second TP rank the branch takes its shard as up|gate."""

    def change(right: Delta, plan: SitePlan, run: ParallelRun) -> Delta:
        return site_delta(replace(plan, adapted=plan.adapted[::-1]), run) if run.tp_rank == 1 else right

    with delta_changed(FC1, change):
        yield


@seeded("packs", level=Level.STATIC, imitates="B23", site=ANYWHERE, words="rank 0 of 2 reads rows")
def slabs_of_the_other_rank() -> Iterator[None]:
    """A rank reads the HF rows of its neighbour, while the host rows are its own."""

    def neighbour(sections: Sequence[Section], rank: int) -> Iterator[Slab]:
        other = rank ^ 1
        return slabs_of(sections, other if other * sections[0].local < sections[0].hf else rank)

    with patch.object(shards, "slabs_of", neighbour), patch.object(packs, "slabs_of", neighbour):
        yield


@seeded("packs", level=Level.STATIC, imitates="B42", site=HEAD)
def padding_before_the_last_row() -> Iterator[None]:
    """A padded vocabulary has its padding before the last row, not after it."""

    def shifted(right: Any, layout: BlockLayout) -> list[tuple[int, int | None]]:
        rows = right(layout)
        return [*rows[:-2], rows[-1], rows[-2]] if rows[-1][1] is None else rows

    with wrapped(BlockLayout, "host_index", shifted):
        yield


def _read_transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory read as the transpose: the shape fits, the values do not."""
    return tensor.reshape(tensor.shape[::-1]).t()


@seeded("fold", imitates="B32, B33", site=FC2)
def b_read_transposed() -> Iterator[None]:
    """The branch reads B's memory as [rank, out]."""

    def bs(factors: LoraFactors) -> list[torch.Tensor]:
        right = _BS(factors)
        return [_read_transposed(b) for b in right] if factors.plan.host_module == FC2 else right

    with patch.object(LoraFactors, "bs", property(bs)):
        yield


@seeded("fold", imitates="B33", site=FC2)
def a_read_transposed() -> Iterator[None]:
    """The branch reads A's memory as [in, rank]."""

    def a(factors: LoraFactors) -> torch.Tensor:
        right = _A(factors)
        return _read_transposed(right) if factors.plan.host_module == FC2 else right

    with patch.object(LoraFactors, "a", property(a)):
        yield


_A, _BS = vars(LoraFactors)["a"].fget, vars(LoraFactors)["bs"].fget
