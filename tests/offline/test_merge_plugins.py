"""Every plugin's adapter folded offline: each weight against a plain fold, and transformers' own where it can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from offline_files import weights
from torch import Tensor

from lora_plugins_sdk import RunFacts, write_adapter
from lora_plugins_sdk.offline.adapter import PlainAdapter
from lora_plugins_sdk.offline.merge import merge, plan_merge
from lora_plugins_sdk.testing.conformance.problem import make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.reference import base_directory, save_folded
from lora_plugins_sdk.testing.conformance.subject import Subject

CASES = [
    ("qwen3", "none"),
    ("qwen3_moe", "outer"),
    ("qwen36_moe", "none"),
    ("qwen36_moe", "outer"),
    ("inkling", "none"),
    ("inkling", "outer"),
]


def plain_fold(base: dict[str, Tensor], adapter: PlainAdapter) -> dict[str, Tensor]:
    """Pair by pair, in float64; gate is the upper half of a fused tensor."""
    sums = {name: tensor.double() for name, tensor in base.items()}
    for module, pair in adapter.pairs.items():
        delta = adapter.lora.scale * pair.b.double() @ pair.a.double()
        if f"{module}.weight" in base:
            sums[f"{module}.weight"][: len(delta)] += delta
            continue
        block, expert, leaf = module.rsplit(".", 2)
        if f"{block}.{leaf}" in base:
            sums[f"{block}.{leaf}"][int(expert)] += delta
        else:
            half = {"gate_proj": slice(None, len(delta)), "up_proj": slice(len(delta), None)}[leaf]
            sums[f"{block}.gate_up_proj"][int(expert), half] += delta
    return {name: one.to(base[name].dtype) for name, one in sums.items()}


@pytest.mark.parametrize(("architecture", "sharing"), CASES)
def test_the_same_weights(architecture: str, sharing: str, tmp_path: Path) -> None:
    """B30, B31, B32: no factor without a place, none at a wrong one."""
    subject = replace(Subject.of(architecture), expert_sharing=sharing)
    problem = make_problem(subject)
    adapter = write_adapter(peft_adapter(subject, problem.factors), tmp_path / "adapter")
    plan = plan_merge(base_directory(subject), adapter, tmp_path / "merged")
    report = merge(plan)
    base, found = weights(base_directory(subject)), weights(tmp_path / "merged")
    oracles = [plain_fold(base, plan.adapter)]
    if architecture != "inkling":  # whose shared experts the kit's fold cannot address as modules
        oracles.append(weights(save_folded(subject, problem)))
    for expected in oracles:
        assert found.keys() == expected.keys() == base.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    changed = [name for name in base if not torch.equal(base[name], found[name])]
    assert len(changed) == report.changed and report.folds == len(plan.adapter.pairs)
    assert len({row.hf_module for row in subject.table(RunFacts()).rows}) <= report.folds
