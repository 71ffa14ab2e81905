"""Base weights of routed experts: from one tensor each or all in one, every rank its own part, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sdk_experts_host import HF_CONFIG, MoeModel, hf_weights, moe_model, moe_plugin
from torch import Tensor

from lora_plugins_sdk import LoraError, ParallelRun, RunFacts, load_base_weights

Tensors = dict[str, Tensor]
EXPERTS = "model.layers.0.mlp.experts"


def fuse(tensors: Tensors) -> None:
    """As transformers keeps the experts of a live model: `[experts, out, in]`."""
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        of = {
            leaf: torch.stack([tensors.pop(f"{prefix}.{expert}.{leaf}.weight") for expert in range(4)])
            for leaf in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([of["gate_proj"], of["up_proj"]], dim=1)
        tensors[f"{prefix}.down_proj"] = of["down_proj"]


def checkpoint(directory: Path, *edits: Callable[[Tensors], Any]) -> Path:
    tensors = hf_weights()
    for edit in edits:
        edit(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    return directory


def empty_model(run: ParallelRun) -> MoeModel:
    model = moe_model(run)
    for parameter in model.parameters():
        parameter.data.fill_(-7)
    return model


@pytest.mark.parametrize("fused", [False, True], ids=["one-each", "fused"])
@pytest.mark.parametrize("facts", [RunFacts(), RunFacts(dp=2, ep=2), RunFacts(dp=4, ep=2, etp=2)], ids=str)
def test_every_rank_gets_its_experts_and_its_shard(tmp_path: Path, facts: RunFacts, fused: bool) -> None:
    """B23: global expert numbers, and gate|up cut per shard, not across it."""
    directory = checkpoint(tmp_path, *([fuse] if fused else []))
    for ep_rank in range(facts.ep):
        for etp_rank in range(facts.etp):
            run = ParallelRun(facts=facts, ep_rank=ep_rank, etp_rank=etp_rank)
            model, expected = empty_model(run), moe_model(run)
            load_base_weights(model, moe_plugin(), directory, run)
            for name, parameter in expected.named_parameters():
                assert torch.equal(model.get_parameter(name), parameter), (name, ep_rank, etp_rank)


def _transpose(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.down_proj"] = tensors[f"{EXPERTS}.down_proj"].transpose(1, 2)


def _one_fewer(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.gate_up_proj"] = tensors[f"{EXPERTS}.gate_up_proj"][:3]


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([lambda one: one.pop(f"{EXPERTS}.2.up_proj.weight")], r"experts\.2\.up_proj\.weight: is missing"),
        (
            [lambda one: one.update({f"{EXPERTS}.4.up_proj.weight": torch.zeros(12, 8)})],
            r"experts\.4\.up_proj\.weight: is in the checkpoint and has no place",
        ),
        (
            [lambda one: one.update({f"{EXPERTS}.1.gate_proj.weight": torch.zeros(8, 12)})],
            r"experts\.1\.gate_proj\.weight: is transposed",
        ),
        ([fuse, _transpose], r"experts\.down_proj: is transposed: it has shape \[4, 12, 8\].*\[experts, out, in\]"),
        ([fuse, _one_fewer], r"gate_up_proj: has shape \[3, 24, 8\], the config gives \[4, 24, 8\]"),
        (
            [fuse, lambda one: one.update({f"{EXPERTS}.0.up_proj.weight": torch.zeros(12, 8)})],
            r"experts\.0\.up_proj\.weight: is in the checkpoint and has no place",
        ),
    ],
    ids=["missing", "one-too-many", "transposed", "fused-transposed", "fused-fewer", "both"],
)
def test_what_does_not_fit_is_refused_with_nothing_written(tmp_path: Path, edits: list[Any], words: str) -> None:
    """B31, B33: no expert is left as it was without a word, none is read the wrong way round."""
    model = empty_model(ParallelRun.single())
    with pytest.raises(LoraError, match=words):
        load_base_weights(model, moe_plugin(), checkpoint(tmp_path, *edits))
    assert all(bool((parameter == -7).all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("built", "loaded", "words"),
    [
        (
            RunFacts(),
            RunFacts(dp=2, ep=2),
            r"linear_fc1: holds 4 experts, the config and expert parallel size 2 give 2",
        ),
        (RunFacts(), RunFacts(dp=2, etp=2), r"weight0 \[24, 8\]: .* would give \[12, 8\]"),
    ],
    ids=["ep", "etp"],
)
def test_a_model_of_other_sizes_is_refused(tmp_path: Path, built: RunFacts, loaded: RunFacts, words: str) -> None:
    model = empty_model(ParallelRun(facts=built))
    with pytest.raises(LoraError, match=words):
        load_base_weights(model, moe_plugin(), checkpoint(tmp_path), ParallelRun(facts=loaded))
