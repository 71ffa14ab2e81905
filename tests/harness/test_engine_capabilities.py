"""What engine and mode cannot serve is refused before a model is built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_harness.config import TrainConfig, parse_config
from lora_harness.engines.base import EngineCapabilities
from lora_harness.engines.capabilities import (
    engine_capabilities,
    lora_of_run,
    projection,
    refuse_unservable,
    unservable,
)
from lora_plugins_sdk import LoraConfig, LoraError, ParameterTable, RunFacts, derive_table, load_plugin

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
ADAPTERS = EngineCapabilities(name="sglang", mode="adapter", servable_projections=frozenset({"self_attn.q_proj"}))
MERGED = EngineCapabilities(name="sglang", mode="merge")


def table(*targets: str) -> ParameterTable:
    plugin = load_plugin("qwen3")
    return derive_table(plugin, QWEN3, LoraConfig(rank=2, target_modules=targets), RunFacts())


def moved(one: ParameterTable, module: str, region: str = "language") -> ParameterTable:
    """The table with every row on another module."""
    plan = one.plans[0]
    rows = tuple(replace(row, hf_module=module) for row in plan.rows)
    return replace(one, plans=(replace(plan, site=replace(plan.site, region=region), rows=rows),))


def config(directory: Path, **rollout: Any) -> TrainConfig:
    (directory / "config.json").write_text(json.dumps(QWEN3))
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    lora = {"rank": 2, "target_modules": ["all-linear", "embed_tokens", "lm_head"]}
    return parse_config({"model": {"path": str(directory)}, "task": task, "steps": 1, "lora": lora, "rollout": rollout})


@pytest.mark.parametrize("rollout", [{}, {"engine": "sglang"}, {"engine": "sglang", "mode": "adapter"}])
def test_every_target_of_qwen3_is_served_in_each_mode(tmp_path: Path, rollout: dict[str, Any]):
    refuse_unservable(config(tmp_path, **rollout), RunFacts())


def test_sglang_names_what_it_serves():
    rollout = parse_config(
        {
            "model": {"path": "b"},
            "task": {"kind": "reasoning_gym", "dataset": "x"},
            "steps": 1,
            "rollout": {"engine": "sglang", "mode": "adapter"},
        }
    ).rollout
    able = engine_capabilities(rollout, QWEN3, max_rank=16)
    assert able.servable_projections is not None and able.max_rank == 16
    assert {"self_attn.q_proj", "mlp.experts.up_proj", "linear_attn.out_proj", "lm_head"} <= able.servable_projections
    assert not {"mlp.gate", "linear_attn.in_proj_b", "linear_attn.conv1d"} & able.servable_projections


def test_each_projection_is_refused_once_with_the_way_out():
    found = list(unservable(table("q_proj", "k_proj"), ADAPTERS))
    assert [one.subject for one in found] == ["self_attn.k_proj"]
    assert "'sglang' in adapter mode" in found[0].reason and "rollout.mode = 'merge'" in found[0].cure
    assert not list(unservable(table("q_proj", "k_proj"), MERGED))


def test_routers_only_as_adapters():
    router = moved(table("q_proj"), "model.layers.1.mlp.gate")
    assert [one.subject for one in unservable(router, MERGED)] == ["mlp.gate"]
    assert list(unservable(router, ADAPTERS)), "SGLang serves no router"
    assert not list(unservable(router, EngineCapabilities(name="local", mode="adapter")))


def test_vision_never_as_an_adapter():
    vision = moved(table("q_proj"), "model.visual.blocks.0.attn.q_proj", region="vision")
    assert "lora.scope = 'language'" in next(unservable(vision, EngineCapabilities(name="local", mode="adapter"))).cure
    assert not list(unservable(vision, MERGED))


def test_the_refusal_lists_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lora_harness.engines.capabilities.served_leaves", lambda family: ["self_attn.q_proj"])
    with pytest.raises(LoraError, match=r"cannot serve what is to be trained:(?s:.*)self_attn\.k_proj(?s:.*)mlp\.up"):
        refuse_unservable(config(tmp_path, engine="sglang", mode="adapter"), RunFacts())
    refuse_unservable(config(tmp_path, engine="sglang", train_only=True), RunFacts())


@pytest.mark.parametrize("rollout", [{"mode": "adapter"}, {"mode": "merge"}, {"train_only": True}])
def test_an_inkling_that_sglang_would_not_load_is_refused(tmp_path: Path, rollout: dict[str, Any]):
    """SGLang passes over names that it does not know and serves weights that nobody set."""
    sums, local = config(tmp_path, engine="sglang", **rollout), config(tmp_path)
    tiny = load_plugin(architecture="inkling").architecture.tiny_config
    (tmp_path / "config.json").write_text(json.dumps(dict(tiny)))
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(LoraError, match=r"q_proj.weight and the like: SGLang reads Inkling as it is published"):
        refuse_unservable(sums, RunFacts())
    refuse_unservable(local, RunFacts())
    elsewhere = config(tmp_path, engine="sglang", sglang={"urls": ["http://127.0.0.1:1"]}, **rollout)
    (tmp_path / "config.json").write_text(json.dumps(dict(tiny)))
    if elsewhere.rollout.train_only:  # a server's own base, whatever the trainer's is
        refuse_unservable(elsewhere, RunFacts())
    else:
        with pytest.raises(LoraError, match=r"SGLang reads Inkling as it is published"):
            refuse_unservable(elsewhere, RunFacts())
    published = {"model.llm.layers.0.attn.wq_du.weight": torch.ones(2, 2), "model.visual.layers.0.w": torch.ones(2)}
    save_file(published, tmp_path / "model.safetensors")
    with pytest.raises(LoraError, match=r"lacks shared_expert_sink = true, .*, sconv_kernel_size in its text_config"):
        refuse_unservable(sums, RunFacts())
    text = {**tiny, "sconv_kernel_size": 4, "dense_intermediate_size": tiny["intermediate_size"]}
    text |= {"intermediate_size": tiny["moe_intermediate_size"], "local_layer_ids": [1, 3], "dense_mlp_idx": 1}
    text |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "shared_expert_sink": True, "use_sconv": True}
    text |= dict.fromkeys(("use_embed_norm", "use_gate_bias", "use_global_scale"), True)
    whole = {"model_type": "inkling_mm_model", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    refuse_unservable(sums, RunFacts())
    for key, other in (("gate_activation", "softmax"), ("norm_after_topk", False), ("q_bias", True), ("o_bias", True)):
        (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": {**text, key: other}}))
        with pytest.raises(LoraError, match=rf"config\.json: lacks {key} = "):
            refuse_unservable(sums, RunFacts())
    (tmp_path / "config.json").write_text(
        json.dumps({**whole, "text_config": {**text, "final_logit_softcapping": 9.0}})
    )
    with pytest.raises(LoraError, match=r"config\.json: lacks final_logit_softcapping = null"):
        refuse_unservable(sums, RunFacts())
    for key in ("use_sconv", "route_scale"):
        less = {**whole, "text_config": {name: value for name, value in text.items() if name != key}}
        (tmp_path / "config.json").write_text(json.dumps(less))
        with pytest.raises(LoraError, match=rf"config\.json: lacks {key}.*SGLang reads Inkling as it is published"):
            refuse_unservable(sums, RunFacts())
    refuse_unservable(local, RunFacts())


def test_what_sglang_leaves_out_of_a_linear_is_held_at_zero_in_adapter_mode_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """B26: the rest of that linear is trained and served; merge mode and a run without rollouts train all of it."""
    monkeypatch.setattr("lora_harness.engines.capabilities.HELD_AT_ZERO", ("self_attn.k_proj",))
    monkeypatch.setattr(
        "lora_harness.engines.capabilities.served_leaves",
        lambda family: (
            [f"self_attn.{leaf}_proj" for leaf in "qvo"] + [f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
        ),
    )
    plugin = load_plugin("qwen3")
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"engine": "sglang", "mode": "adapter"}, ("self_attn.k_proj",)),
        ({"engine": "sglang", "mode": "merge"}, ()),
        ({"engine": "sglang", "train_only": True}, ()),
        ({}, ()),
    ]
    for rollout, pins in cases:
        run_config = config(tmp_path, **rollout)
        refuse_unservable(run_config, RunFacts())
        lora = lora_of_run(run_config, plugin, QWEN3, RunFacts())
        assert lora.pinned_modules == pins
        derived = derive_table(plugin, QWEN3, lora, RunFacts())
        assert {projection(row.hf_module) for row in derived.rows if row.pinned} == set(pins)


@pytest.mark.parametrize(
    "module, leaf",
    [
        ("model.layers.0.self_attn.q_proj", "self_attn.q_proj"),
        ("model.layers.10.mlp.experts.7.up_proj", "mlp.experts.up_proj"),
        ("model.layers.10.mlp.experts.{expert}.up_proj", "mlp.experts.up_proj"),
        ("model.language_model.layers.3.mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_a_projection_is_a_path_within_its_layer(module: str, leaf: str):
    assert projection(module) == leaf
