"""Ranks that do not fit together: an error on every rank, and nothing changed; never a hang."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_plugins_sdk import LoraConfig, LoraError, ParallelRun, RunFacts, attach, load_plugin, read_hf_config
from lora_plugins_sdk.manager import SelectedPlugin
from lora_plugins_sdk.testing import Layout, current_run, run_world

WORLDS = [Layout(tp=2), Layout(dp=2), Layout(pp=2), Layout(tp=2, pp=2)]


def is_last(run: ParallelRun) -> bool:
    facts = run.facts
    return (run.tp_rank, run.pp_rank, run.dp_rank) == (facts.tp - 1, facts.pp - 1, facts.dp - 1)


def attach_with(checkpoint: Path, odd: dict[str, Any]) -> str:
    """Attach, the last rank with other options; what this rank was told."""
    run, plugin, config = current_run(), load_plugin(architecture="qwen3"), dict(read_hf_config(checkpoint))
    model = plugin.build_model(config, run, torch.float32)
    options: dict[str, Any] = {"rank": 4}
    if is_last(run):
        options |= odd.get("lora", {})
        config |= odd.get("config", {})
        if "version" in odd:
            plugin = SelectedPlugin(
                name=plugin.name, version=odd["version"], architecture=plugin.architecture, manager=plugin.manager
            )
        if odd.get("loses_layer"):
            layers: Any = model.get_submodule("decoder.layers")
            del layers[-1]
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        attach(model, plugin, config, LoraConfig(**options), run)
    except LoraError as error:
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
        assert not any(isinstance(module, nn.Module) and hasattr(module, "lora") for module in model.modules())
        return str(error)
    return "attached"


@pytest.mark.world
@pytest.mark.parametrize("layout", WORLDS, ids=str)
def test_every_rank_hears_of_a_difference(layout: Layout, checkpoint: Path) -> None:
    """Also a rank that shares no group with the odd one (tp2xpp2: rank 0)."""
    odd_rank = f"rank (dp {layout.dp - 1}, pp {layout.pp - 1}, tp {layout.tp - 1})"
    for odd, reason in (
        ({"lora": {"rank": 8}}, "differs from rank (dp 0, pp 0, tp 0) in table"),
        ({"lora": {"seed": 1}}, "differs from rank (dp 0, pp 0, tp 0) in table"),
        ({"version": "9.9"}, "in version: 9.9 against"),
    ):
        for message in run_world(attach_with, layout, checkpoint, odd):
            assert message.startswith(odd_rank) and reason in message


@pytest.mark.world
@pytest.mark.parametrize("layout", WORLDS, ids=str)
def test_every_rank_hears_of_one_that_cannot_attach(layout: Layout, checkpoint: Path) -> None:
    """The odd rank fails before it reaches the comparison; the others must not wait for it."""
    for odd, reason in (
        ({"lora": {"rank": 1000}}, "rank=1000: larger than"),
        ({"lora": {"target_modules": ("q_porj",)}}, "did you mean 'q_proj'"),
        ({"config": {"intermediate_size": 192}}, "its weight has shape"),
    ):
        *others, own = run_world(attach_with, layout, checkpoint, odd)
        assert reason in own and "cannot attach" not in own
        for message in others:
            assert "cannot attach" in message and reason in message


@pytest.mark.world
def test_a_lost_layer(checkpoint: Path) -> None:
    """B22: a stage that lost a layer is an error, not an adapter without it."""
    for message in run_world(attach_with, Layout(pp=2), checkpoint, {"loses_layer": True}):
        assert message.startswith("decoder.layers.3.") and "is on no pipeline stage" in message
    for message in run_world(attach_with, Layout(dp=2), checkpoint, {"loses_layer": True}):
        assert "holds other modules than rank (dp 0, pp 0, tp 0)" in message


def attach_local_numbers(checkpoint: Path) -> str:
    """A host whose stages all count their layers from the start."""
    run, plugin, config = current_run(), load_plugin(architecture="qwen3"), read_hf_config(checkpoint)
    model = plugin.build_model(config, run, torch.float32)
    layers: Any = model.get_submodule("decoder.layers")
    for local, layer in enumerate(layers):
        layer.layer_number = local + 1
    try:
        attach(model, plugin, config, LoraConfig(rank=4), run)
    except LoraError as error:
        return str(error)
    return "attached"


@pytest.mark.world
def test_stages_that_claim_the_same_layers(checkpoint: Path) -> None:
    """B22: one half of the model twice is not the model."""
    for message in run_world(attach_local_numbers, Layout(pp=2), checkpoint):
        assert message.startswith("decoder.layers.2.") and "is on no pipeline stage" in message


def attach_other_split(checkpoint: Path) -> str:
    """A run description that is not the one the model was built with."""
    run, plugin, config = current_run(), load_plugin(architecture="qwen3"), read_hf_config(checkpoint)
    model = plugin.build_model(config, run, torch.float32)
    facts = RunFacts(tp=2, sequence_parallel=not run.facts.sequence_parallel)
    try:
        attach(model, plugin, config, LoraConfig(rank=4), replace(run, facts=facts))
    except LoraError as error:
        return str(error)
    return "attached"


@pytest.mark.world
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_sequence_parallelism_that_the_model_does_not_have(layout: Layout, checkpoint: Path) -> None:
    for message in run_world(attach_other_split, layout, checkpoint):
        assert f"was built with sequence_parallel={layout.sequence_parallel}, the run says otherwise" in message
