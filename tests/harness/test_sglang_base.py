"""A base that SGLang would build as another model, or of another width, is refused before anything starts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file

from lora_harness.config import TrainConfig, parse_config
from lora_harness.config.rollout import SglangSection
from lora_harness.engines.capabilities import refuse_unservable
from lora_harness.engines.sglang import opening
from lora_harness.engines.sglang.attached import misfits, refuse_unfit
from lora_harness.engines.sglang.base_fit import refuse_unfit_base
from lora_harness.engines.sglang.http import HttpClient
from lora_harness.engines.sglang.sync.engine_group import EngineGroup
from lora_plugins_sdk import LoraError, PeftAdapter, RunFacts, load_plugin

HYBRID = dict(load_plugin(architecture="qwen36_moe").architecture.tiny_config)
QWEN3 = dict(load_plugin(architecture="qwen3").architecture.tiny_config)


def config(directory: Path, hf_config: dict[str, Any], **rollout: Any) -> TrainConfig:
    (directory / "config.json").write_text(json.dumps(hf_config))
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    section = {"engine": "sglang", "mode": "adapter", **rollout}
    raw = {"model": {"path": str(directory)}, "task": task, "steps": 1, "lora": {"rank": 4}, "rollout": section}
    return parse_config(raw)


def test_full_attention_at_no_interval(tmp_path: Path) -> None:
    uneven = HYBRID | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
    with pytest.raises(LoraError, match=r"layer_types: has full attention in layers 0, 3 of 4"):
        refuse_unservable(config(tmp_path, uneven), RunFacts())
    base_alone = config(tmp_path, uneven, mode=None, train_only=True)
    with pytest.raises(LoraError, match="layer_types"):
        refuse_unservable(base_alone, RunFacts())
    refuse_unservable(config(tmp_path, uneven, engine="local", mode=None), RunFacts())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention_factor": 1.4}, "attention_factor = 1.4: gives transformers another factor"),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, "mscale = 1.0 and mscale_all_dim = 0.0: gives transformers another"),
        ({"attention_factor": 0.1 * math.log(4.0) + 1.0}, None),
        ({"mscale": 0.7, "mscale_all_dim": 0.3}, None),
        ({}, None),
    ],
)
def test_yarn_whose_factor_sglang_does_not_read(tmp_path: Path, more: dict[str, float], words: str | None) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
    run = config(tmp_path, QWEN3 | {"rope_parameters": rope | more})
    if words is None:
        refuse_unservable(run, RunFacts())
        return
    with pytest.raises(LoraError, match=re.escape(words)):
        refuse_unservable(run, RunFacts())


QWEN3_MOE = {**load_plugin(architecture="qwen3_moe").architecture.quickstart_config, "vocab_size": 61}


def test_dense_layers_of_a_qwen3_moe(tmp_path: Path) -> None:
    """SGLang would build experts there, whose weights nobody sets."""
    dense = QWEN3_MOE | {"mlp_only_layers": [0], "intermediate_size": 48}
    for rollout in ({"mode": "adapter"}, {"mode": "merge"}, {"mode": None, "train_only": True}):
        with pytest.raises(LoraError, match=r"mlp_only_layers = \[0\]: makes layers dense.*rollout\.engine = 'local'"):
            refuse_unservable(config(tmp_path, dense, **rollout), RunFacts())
    refuse_unservable(config(tmp_path, dense, engine="local", mode=None), RunFacts())


def test_fused_experts_of_a_qwen3_moe(tmp_path: Path) -> None:
    """SGLang passes over such names."""
    run = config(tmp_path, QWEN3_MOE)
    layer, weights = "model.layers.0.mlp", tmp_path / "model.safetensors"
    save_file({f"{layer}.gate.weight": torch.ones(2), f"{layer}.experts.0.down_proj.weight": torch.ones(2)}, weights)
    refuse_unservable(run, RunFacts())
    save_file({f"{layer}.gate.weight": torch.ones(2), f"{layer}.experts.down_proj": torch.ones(2)}, weights)
    with pytest.raises(
        LoraError, match=r"experts\.down_proj and the like: SGLang reads a Qwen3-MoE with tensors of each"
    ):
        refuse_unservable(run, RunFacts())
    refuse_unservable(config(tmp_path, QWEN3_MOE, engine="local", mode=None), RunFacts())


@pytest.mark.parametrize("rollout", [{"mode": "adapter"}, {"mode": None, "train_only": True}])
def test_a_width_that_the_engines_ranks_do_not_divide(tmp_path: Path, rollout: dict[str, Any]) -> None:
    """SGLang on a CPU pads it and ends at the first request of an adapter, which it does not pad."""
    odd = QWEN3 | {"intermediate_size": 50}
    refuse_unservable(config(tmp_path, odd, **rollout), RunFacts())
    refuse_unservable(config(tmp_path, odd, **rollout, sglang={"arguments": {"tp_size": 2}}), RunFacts())
    with pytest.raises(LoraError, match=r"intermediate_size = 50: SGLang needs a multiple of 4 on 4 ranks.*tp_size"):
        refuse_unservable(config(tmp_path, odd, **rollout, sglang={"arguments": {"tp_size": 4}}), RunFacts())


def test_widths_that_sglangs_own_kernels_pad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(LoraError, match=r"(?s)moe_intermediate_size = 20: .*of 32 for its CPU kernels.*expert_inter"):
        refuse_unservable(config(tmp_path, HYBRID), RunFacts())
    refuse_unservable(config(tmp_path, QWEN3 | {"intermediate_size": 64}), RunFacts())
    refuse_unservable(config(tmp_path, HYBRID, sglang={"urls": ["http://127.0.0.1:1"]}), RunFacts())


SPARSE = {"model_type": "qwen2_moe", "num_experts": 8, "moe_intermediate_size": 24, "intermediate_size": 50}
INKLING = {
    "model_type": "inkling_mm_model",
    "text_config": {"intermediate_size": 24, "dense_intermediate_size": 36, "moe_intermediate_size": 25},
}


@pytest.mark.parametrize(
    ("hf_config", "arguments", "refused"),
    [
        (SPARSE, {"tp_size": 4}, None),  # the width of dense layers, of which it has none
        (SPARSE | {"num_experts": None, "num_local_experts": 8}, {"tp_size": 4}, None),
        (SPARSE | {"mlp_only_layers": [1]}, {"tp_size": 4}, "intermediate_size = 50"),
        (SPARSE | {"decoder_sparse_step": 2}, {"tp_size": 4}, "intermediate_size = 50"),
        (SPARSE, {"tp_size": 16}, "moe_intermediate_size = 24: SGLang needs a multiple of 16 on 16 ranks"),
        (SPARSE, {"tp_size": 16, "ep_size": 2}, None),  # an expert is shared by 8 ranks
        (SPARSE, {"tp_size": 16, "ep_size": 1}, "moe_intermediate_size = 24"),
        (SPARSE, {"tp_size": 64, "ep_size": 4}, "moe_intermediate_size = 24: SGLang needs a multiple of 16 on 16"),
        (SPARSE, {"tp_size": 64, "ep_size": 4, "moe_dp_size": 2}, None),
        (
            SPARSE | {"shared_expert_intermediate_size": 24},
            {"tp_size": 16, "ep_size": 16},
            "shared_expert_intermediate_size = 24",
        ),
        (INKLING, {"tp_size": 4}, None),
        (INKLING, {"tp_size": 8}, "dense_intermediate_size = 36: SGLang needs a multiple of 8"),
        (INKLING, {"tp_size": 9, "ep_size": 9}, r"\bintermediate_size = 24: SGLang needs a multiple of 9"),
    ],
)
def test_how_many_ranks_share_a_width(
    hf_config: dict[str, Any], arguments: dict[str, int], refused: str | None
) -> None:
    section = SglangSection(arguments=arguments)
    if refused is None:
        refuse_unfit_base(section, hf_config)
        return
    with pytest.raises(LoraError, match=refused) as told:
        refuse_unfit_base(section, hf_config)
    assert str(told.value).count("SGLang needs") == 1


def test_widths_on_a_named_device_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    refuse_unfit_base(SglangSection(arguments={"device": "cuda"}), SPARSE)
    for arguments in ({}, {"device": "cpu"}):
        with pytest.raises(LoraError, match=r"moe_intermediate_size = 24: .*of 32 for its CPU kernels"):
            refuse_unfit_base(SglangSection(arguments=arguments), SPARSE)


def test_a_server_that_builds_another_model_is_told_the_keys() -> None:
    wanted = {"text_config": {"full_attention_interval": 2}}
    [found] = misfits("u", {"json_model_override_args": "{}"}, None, wanted)
    assert "another model than the trainer" in found.reason
    assert """--json-model-override-args '{"text_config": {"full_attention_interval": 2}}'""" in found.cure
    more = {"text_config": {"full_attention_interval": 2, "hidden_act": "silu"}}
    assert not list(misfits("u", {"json_model_override_args": json.dumps(more)}, None, wanted))
    assert not list(misfits("u", {}, None, {}))


def told(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> EngineGroup:
    """A server that says it was started with these."""
    monkeypatch.setattr(HttpClient, "information", lambda self: arguments)
    return EngineGroup([HttpClient("http://127.0.0.1:1")])


def test_a_server_reads_its_own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can be read from here; a server elsewhere is taken to read what the trainer does."""
    here = HYBRID | {"layer_types": ["linear_attention", "full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(here | {"full_attention_interval": 2}))
    refuse_unfit(told(monkeypatch, model_path=str(tmp_path)), None, here)
    for path in (str(tmp_path / "elsewhere"), "Qwen/Qwen3.5"):
        with pytest.raises(LoraError, match="another model than the trainer"):
            refuse_unfit(told(monkeypatch, model_path=path), None, here)
        refuse_unfit(told(monkeypatch, model_path=path), None, here | {"full_attention_interval": 2})
    (tmp_path / "config.json").write_text(json.dumps(here))
    with pytest.raises(LoraError, match="another model than the trainer"):
        refuse_unfit(told(monkeypatch, model_path=str(tmp_path)), None, here | {"full_attention_interval": 2})
    nested = {"model_type": "qwen3_5_moe", "text_config": here}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    with pytest.raises(LoraError, match=r"""args '{"text_config": {"full_attention_interval": 2}}'"""):
        refuse_unfit(told(monkeypatch, model_path=str(tmp_path)), None, here)


def test_a_servers_own_inkling_must_be_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INKLING))
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    group = told(monkeypatch, model_path=str(tmp_path))
    with pytest.raises(LoraError, match=rf"{tmp_path}: holds .*SGLang reads Inkling as it is published"):
        refuse_unfit(group, None, INKLING)


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_no_engine_is_started_for_a_base_whose_config_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """After the start nothing would stop them before the process ends."""
    started: list[Any] = []
    monkeypatch.setattr(opening, "connect", lambda *args, **options: started.append(args) or EngineGroup([]))
    run = config(tmp_path, QWEN3 | {key: "many"}, mode=None, train_only=True, sglang={"urls": ["http://127.0.0.1:1"]})
    with pytest.raises((ValueError, TypeError, StrictDataclassError)):
        opening.open_sglang(run, PeftAdapter(tensors={}, config={}))
    assert not started
