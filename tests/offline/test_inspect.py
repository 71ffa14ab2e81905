"""What `inspect` says of an adapter and of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offline_files import (
    ALPHA,
    HIDDEN,
    LAYERS,
    MODULES,
    PREFIX,
    RANK,
    VOCABULARY,
    adapter_tensors,
    base_tensors,
    make_adapter,
    make_base,
)

from lora_plugins_sdk import LoraError, load_plugin
from lora_plugins_sdk.offline.adapter import read_plain_adapter
from lora_plugins_sdk.offline.inspect import base_facts, pair_facts
from lora_plugins_sdk.targets import candidates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_whole_products(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: one.to(dtype) for name, one in adapter_tensors().items()}
    facts = pair_facts(read_plain_adapter(make_adapter(tmp_path / "adapter", tensors)))
    assert [one.module for one in facts] == sorted(MODULES)
    for one in facts:
        a, b = (tensors[f"{PREFIX}{one.module}.lora_{factor}.weight"].double() for factor in "AB")
        assert (one.out, one.width) == MODULES[one.module]
        assert one.norm_a == pytest.approx(float(a.norm())) and one.norm_b == pytest.approx(float(b.norm()))
        assert one.norm_delta == pytest.approx(ALPHA / RANK * float((b @ a).norm()), rel=1e-9)


def test_a_fresh_adapter_changes_nothing(tmp_path: Path) -> None:
    tensors = {name: one * 0 if "lora_B" in name else one for name, one in adapter_tensors().items()}
    facts = pair_facts(read_plain_adapter(make_adapter(tmp_path / "adapter", tensors)))
    assert all(one.norm_delta == 0.0 and one.norm_a > 0 for one in facts)


def test_a_base_without_a_plugin_is_counted_by_its_own_tensors(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base", shards=2), read_plain_adapter(make_adapter(tmp_path / "adapter"))
    facts = base_facts(adapter, base)
    assert facts.plugin is None and facts.model_type == "toy" and facts.problems == ()
    assert {one.kind: (one.adapted, one.total) for one in facts.coverage} == {
        "lm_head": (1, 1),
        "model.layers.*.mlp.down_proj": (LAYERS, LAYERS),
        "model.layers.*.mlp.up_proj": (LAYERS, LAYERS),
        "model.layers.*.self_attn.q_proj": (LAYERS, LAYERS),
    }


def test_problems_are_listed_beside_what_fits(tmp_path: Path) -> None:
    tensors = base_tensors()
    del tensors["lm_head.weight"]
    base, adapter = make_base(tmp_path / "base", tensors), read_plain_adapter(make_adapter(tmp_path / "adapter"))
    facts = base_facts(adapter, base)
    assert [one.subject for one in facts.problems] == ["lm_head"]
    assert sum(one.adapted for one in facts.coverage) == len(MODULES)


def qwen3(tmp_path: Path, **config: Any) -> tuple[Path, dict[str, tuple[int, int]]]:
    """A base that the qwen3 plugin serves, as names and shapes; no layer of it works."""
    architecture = load_plugin("qwen3").architecture
    full = {**architecture.tiny_config, **config}
    dims = architecture.dims(full)
    shapes = {
        one.hf: (dims.resolve(one.projection.out_dim), dims.resolve(one.projection.in_dim))
        for one in candidates(architecture, full)
    }
    tensors = {f"{module}.weight": torch.zeros(shape) for module, shape in shapes.items()}
    return make_base(tmp_path / "base", {**tensors, "other.weight": torch.zeros(4, HIDDEN)}, **full), shapes


def test_a_plugin_says_what_else_there_is(tmp_path: Path) -> None:
    base, shapes = qwen3(tmp_path)
    some = {module: shape for module, shape in shapes.items() if module.endswith(("q_proj", "up_proj"))}
    tensors = adapter_tensors({**some, "other": (4, HIDDEN)})
    adapter = read_plain_adapter(make_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj", "up_proj"]))
    facts = base_facts(adapter, base)
    assert facts.plugin == "qwen3"
    counts = {one.kind: (one.adapted, one.total) for one in facts.coverage}
    assert counts["model.layers.*.self_attn.q_proj"] == (4, 4)
    assert counts["model.layers.*.self_attn.k_proj"] == (0, 4) and counts["lm_head"] == (0, 1)
    (problem,) = facts.problems
    assert problem.subject == "other" and "plugin 'qwen3' adapts no such module" in problem.reason


@pytest.mark.parametrize("layers", [0, 10**9, "four"])
def test_a_config_that_the_plugin_cannot_read(tmp_path: Path, layers: object) -> None:
    """The base's tensors are counted all the same."""
    base, shapes = qwen3(tmp_path)
    make_base(base, base_tensors(), model_type="qwen3", num_hidden_layers=layers)
    facts = base_facts(read_plain_adapter(make_adapter(tmp_path / "adapter")), base)
    assert facts.plugin is None and facts.problems == () and len(facts.coverage) == 4 and shapes


def test_a_copy_of_the_bases_own_head_is_no_problem_and_another_is(tmp_path: Path) -> None:
    """PEFT saves the head along with an adapter on it."""
    base = base_tensors(torch.bfloat16)
    make_base(tmp_path / "base", base)
    head = f"{PREFIX}lm_head.base_layer.weight"
    for whole, problems in (
        (base["lm_head.weight"].float(), 0),
        (base["lm_head.weight"].float() + 1, 1),
        (torch.zeros(VOCABULARY + 1, HIDDEN), 1),
    ):
        adapter = read_plain_adapter(make_adapter(tmp_path / "adapter", {**adapter_tensors(), head: whole}))
        assert list(adapter.wholes) == ["lm_head.weight"]
        assert len(base_facts(adapter, tmp_path / "base").problems) == problems


def test_a_base_that_cannot_be_read(tmp_path: Path) -> None:
    adapter = read_plain_adapter(make_adapter(tmp_path / "adapter"))
    with pytest.raises(LoraError, match="absent"):
        base_facts(adapter, tmp_path / "absent")
