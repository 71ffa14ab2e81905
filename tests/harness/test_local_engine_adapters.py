"""What the local engine takes as an adapter, what it refuses, and that it then samples with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engine_cases import (
    adapter_config,
    adapter_tensors,
    request,
    save_model,
)
from torch import Tensor

from lora_harness.engines.local import LocalEngine
from lora_plugins_sdk.errors import LoraError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3"))


def test_adapter_swap_changes_output_and_stamp(model_dir: Path) -> None:
    """B37, B41: rollouts stayed on the base, or on the previous adapter, after a reload."""
    engine = LocalEngine(model_dir)
    config = adapter_config()
    first, second = (adapter_tensors(model_dir, config, seed) for seed in (1, 2))
    asked = [request(6, seed=i) for i in range(4)]
    base = engine.generate(asked)
    outputs = [base]
    for version, tensors in ((1, first), (2, second), (5, first)):
        engine.publish(version, tensors, config)
        outputs.append(engine.generate(asked))
        assert {one.adapter_version for one in outputs[-1]} == {version} == {engine.adapter_version}
    drawn = [[one.token_ids for one in done] for done in outputs]
    assert drawn[1] == drawn[3]
    assert drawn[0] != drawn[1] != drawn[2]


def test_adapter_tensors_are_copied(model_dir: Path) -> None:
    """B24: the engine's adapter shared storage with the trainer's."""
    engine = LocalEngine(model_dir)
    config = adapter_config()
    tensors = adapter_tensors(model_dir, config)
    engine.publish(1, tensors, config)
    asked = [request(6, seed=3)]
    before = engine.generate(asked)
    for tensor in tensors.values():
        tensor.zero_()
    assert engine.generate(asked) == before


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"] = torch.zeros(3, 32)


def _transpose(tensors: dict[str, Tensor]) -> None:
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    tensors[name] = tensors[name].T.contiguous()


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"][2, 1] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_drop, r"layers\.1\.self_attn\.q_proj\.lora_B\.weight: missing"),
        (_add, r"layers\.0\.self_attn\.k_proj\.lora_A\.weight: the model .* no such factor"),
        (_transpose, r"down_proj\.lora_A\.weight: shape is \(48, 3\).* ask for \(3, 48\)"),
        (_nan, r"down_proj\.lora_B\.weight: holds NaN"),
    ],
)
@pytest.mark.parametrize("loaded_before", [False, True])
def test_spoilt_adapter_is_refused_whole(model_dir: Path, spoil: Any, said: str, loaded_before: bool) -> None:
    """B29, B36: tensors that match nothing were dropped, and the policy stayed the base."""
    engine = LocalEngine(model_dir)
    config = adapter_config()
    if loaded_before:
        engine.publish(1, adapter_tensors(model_dir, config, 1), config)
    asked = [request(6, seed=3)]
    before = engine.generate(asked)
    spoilt = adapter_tensors(model_dir, config, 2)
    spoil(spoilt)
    with pytest.raises(LoraError, match=said):
        engine.publish(2, spoilt, config)
    assert engine.generate(asked) == before
    engine.publish(2, adapter_tensors(model_dir, config, 2), config)
    assert engine.generate(asked) != before


def test_wrong_rank_is_refused(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    with pytest.raises(LoraError, match="rank"):
        engine.publish(1, adapter_tensors(model_dir, adapter_config(rank=2)), adapter_config(rank=3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"lora_rank_typo": 1}, "lora_rank_typo"),
        ({"target_modules": ["no_such_proj"]}, "PEFT refuses"),
    ],
)
def test_bad_adapter_config(model_dir: Path, changes: dict[str, Any], said: str) -> None:
    """B45: unknown config keys crashed PEFT with a bare TypeError."""
    engine = LocalEngine(model_dir)
    with pytest.raises(LoraError, match=said):
        engine.publish(1, adapter_tensors(model_dir, adapter_config()), adapter_config(**changes))


def test_changed_config_and_stale_version(model_dir: Path) -> None:
    engine = LocalEngine(model_dir)
    tensors = adapter_tensors(model_dir, adapter_config())
    engine.publish(2, tensors, adapter_config())
    with pytest.raises(LoraError, match="lora_alpha"):
        engine.publish(3, tensors, adapter_config(lora_alpha=7))
    for stale in (0, 1, 2):
        with pytest.raises(LoraError, match="version 2 is loaded"):
            engine.publish(stale, tensors, adapter_config())


def test_rslora_scale_is_honoured(model_dir: Path) -> None:
    """B34: alpha / r where the config asks for alpha / sqrt(r)."""
    asked = [request(6, seed=3)]
    done = []
    for config in (adapter_config(use_rslora=True), adapter_config(lora_alpha=6 * 3**0.5)):
        engine = LocalEngine(model_dir)
        engine.publish(1, adapter_tensors(model_dir, adapter_config()), config)
        done.append(engine.generate(asked)[0])
    assert done[0].token_ids == done[1].token_ids
    np.testing.assert_allclose(done[0].logprobs, done[1].logprobs, atol=1e-5)
