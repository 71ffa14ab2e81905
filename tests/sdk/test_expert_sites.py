"""Declaring routed experts, and the rows of the table that follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sdk_experts import ARCHITECTURE, HF_CONFIG

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    ParamRow,
    QueryGroups,
    RunFacts,
    SelectedPlugin,
    SiteKind,
    Tied,
    derive_table,
)

FC1, FC2 = ARCHITECTURE.sites
PLUGIN = SelectedPlugin.of(ARCHITECTURE)
DENSE = replace(FC1.projections[0], hf="model.layers.{layer}.mlp.gate_proj")


def row_of(name: str, facts: RunFacts, sharing: str = "none") -> ParamRow:
    rows = derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=4, expert_sharing=sharing), facts).rows
    (found,) = (one for one in rows if one.init_key.replace(".{expert}", "").endswith(f"layers.0.mlp.experts.{name}"))
    return found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": None}, "names routed experts -> give the number of experts"),
        ({"projections": (DENSE,)}, r"without \{expert\}"),
        ({"kind": SiteKind.REPLICATED, "projections": FC1.projections[:1]}, "what no grouped linear has"),
        ({"fused_norm": True}, "what no grouped linear has"),
        ({"tied": Tied(when="flag", to="other")}, "what no grouped linear has"),
        ({"pack": QueryGroups()}, "what no grouped linear has"),
        ({"experts": "num_experts / 2"}, "not an integer expression"),
        ({"fused_hf": "model.{expert}.down_proj"}, "unknown placeholder 'expert'"),
        ({"path": "decoder.layers.{layer}.{expert}.fc1"}, "unknown placeholder 'expert'"),
    ],
    ids=str,
)
def test_a_declaration_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoraError, match=words):
        replace(FC1, **changes)


EP2, TP2 = RunFacts(dp=2, ep=2), RunFacts(tp=2, sequence_parallel=True)
BOTH = RunFacts(tp=2, dp=2, ep=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("name", "facts", "sharing", "local", "split", "spread", "group"),
    [
        ("gate_proj.lora_A", EP2, "none", (2, 4, 8), -1, 0, None),
        ("gate_proj.lora_A", TP2, "none", (4, 4, 8), -1, -1, "etp"),
        ("gate_proj.lora_A", BOTH, "outer", (1, 4, 8), -1, -1, "etp_ep"),
        ("gate_proj.lora_B", BOTH, "outer", (2, 6, 4), 1, 0, None),
        ("down_proj.lora_A", BOTH, "none", (2, 4, 6), 2, 0, None),
        ("down_proj.lora_B", BOTH, "none", (2, 8, 4), -1, 0, "etp"),
        ("down_proj.lora_B", EP2, "outer", (1, 8, 4), -1, -1, "etp_ep"),
        ("down_proj.lora_B", RunFacts(tp=2, etp=1, sequence_parallel=True), "outer", (1, 8, 4), -1, -1, None),
    ],
    ids=str,
)
def test_rows(
    name: str, facts: RunFacts, sharing: str, local: tuple[int, ...], split: int, spread: int, group: str | None
) -> None:
    """B4, B7: EP spreads the experts, ETP splits each, and what several ranks hold is summed over them."""
    row = row_of(name, facts, sharing)
    assert (row.local_shape, row.partition_dim, row.expert_dim, row.grad_sum_group) == (local, split, spread, group)
    assert row.full_shape == row_of(name, RunFacts(), sharing).full_shape


def test_names() -> None:
    own, shared = (row_of("gate_proj.lora_A", RunFacts(), sharing) for sharing in ("none", "outer"))
    prefix = "base_model.model.model.layers.0.mlp.experts"
    assert (own.full_shape, own.hf_name) == ((4, 4, 8), f"{prefix}.{{expert}}.gate_proj.lora_A.weight")
    assert (shared.full_shape, shared.hf_name) == ((1, 4, 8), f"{prefix}.gate_proj.lora_A.weight")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (RunFacts(dp=3, ep=3), "expert parallel size 3: does not divide the model's 4 experts"),
        (RunFacts(dp=5, etp=5), "parallel size 5: does not divide"),
        (RunFacts(tp=2), "tensor parallel size 2 without sequence parallelism"),
    ],
    ids=str,
)
def test_a_run_that_experts_do_not_allow_is_refused(facts: RunFacts, words: str) -> None:
    with pytest.raises(LoraError, match=words):
        derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=4), facts)


@pytest.mark.parametrize(
    "target",
    [
        "gate_proj",
        "experts.gate_proj",
        "experts.{expert}.gate_proj",
        "*.mlp.experts.gate_proj",
        "*.experts.*.gate_proj",
    ],
)
def test_targets_name_all_experts_of_a_layer(target: str) -> None:
    rows = derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=4, target_modules=(target,)), RunFacts()).rows
    assert {row.hf_module for row in rows} == {
        f"model.layers.{layer}.mlp.experts.{{expert}}.gate_proj" for layer in range(2)
    }


def test_one_expert_alone_is_no_target() -> None:
    with pytest.raises(LoraError, match=r"experts\.3\.gate_proj': matches no projection"):
        derive_table(PLUGIN, HF_CONFIG, LoraConfig(rank=4, target_modules=("experts.3.gate_proj",)), RunFacts())


def test_sharing_without_experts_is_refused() -> None:
    from sdk_toy import ARCHITECTURE as DENSE_MODEL
    from sdk_toy import HF_CONFIG as DENSE_CONFIG

    lora = LoraConfig(rank=4, expert_sharing="outer")
    with pytest.raises(LoraError, match="expert_sharing 'outer': has no effect"):
        derive_table(SelectedPlugin.of(DENSE_MODEL), DENSE_CONFIG, lora, RunFacts())
    with pytest.raises(LoraError, match="unknown sharing"):
        LoraConfig(expert_sharing="inner")
