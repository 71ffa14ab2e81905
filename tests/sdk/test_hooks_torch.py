"""Overrides of the hooks that need torch, and observers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sdk_toy import HF_CONFIG
from sdk_toy_host import hf_weights, randomize, toy_inputs, toy_model, toy_plugin
from torch import Tensor

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    ParallelRun,
    attach,
    defaults,
    export_adapter,
    hookimpl,
    import_adapter,
    load_base_weights,
)
from lora_plugins_sdk.branch import site_delta
from lora_plugins_sdk.site_handle import SiteHandle

LORA = LoraConfig(rank=2, alpha=4)


class HalvesTheDelta:
    @hookimpl
    def lora_site_delta(self, plan: Any, run: Any) -> Any:
        usual = site_delta(plan, run)

        def half(output: Tensor, x: Tensor, factors: Any) -> Tensor:
            base = output.clone()
            return (base + usual(output, x, factors)) / 2

        return half


class AttachesByItself:
    def __init__(self) -> None:
        self.paths: list[str] = []

    @hookimpl
    def lora_attach_site(self, module: Any, plan: Any, lora: Any, run: Any, delta: Any) -> Any:
        self.paths.append(plan.host_module)
        return SiteHandle(module, plan, lora, run, delta)


class BuildsItsOwnBase:
    """A model of its own making, whose head comes from a tensor of another name."""

    @hookimpl
    def lora_build_model(self, dtype: Any, overrides: Any) -> Any:
        model = toy_model(dtype)
        for parameter in model.parameters():
            parameter.data.fill_(overrides["fill"])
        return model

    @hookimpl
    def lora_base_weights(self, architecture: Any, hf_config: Any) -> Any:
        return [
            replace(weight, hf=("head.weight",)) if weight.host == "output_layer.weight" else weight
            for weight in defaults.lora_base_weights(architecture, hf_config)
        ]


class Watches:
    lora_observer = True

    def __init__(self) -> None:
        self.seen: list[str] = []

    @hookimpl
    def lora_after_attach(self, adapter: Any) -> None:
        self.seen.append(f"attached {len(adapter.parameters())}")

    @hookimpl
    def lora_after_export(self, tensors: Any, config: Any) -> None:
        self.seen.append(f"exported {len(tensors)} of rank {config['r']}")

    @hookimpl
    def lora_on_error(self, error: Exception, stage: str) -> None:
        self.seen.append(f"{stage} failed")


def test_an_own_delta_is_used() -> None:
    """Half the delta with twice the alpha is the usual adapter."""
    usual, halved, inputs = toy_model(), toy_model(), toy_inputs()
    attach(usual, toy_plugin(), HF_CONFIG, LORA)
    attach(halved, toy_plugin(HalvesTheDelta()), HF_CONFIG, LoraConfig(rank=2, alpha=8))
    randomize(usual)
    randomize(halved)
    torch.testing.assert_close(halved(*inputs), usual(*inputs), rtol=1e-12, atol=1e-12)


def test_an_own_attachment_is_used() -> None:
    plugin, model = AttachesByItself(), toy_model()
    adapter = attach(model, toy_plugin(plugin), HF_CONFIG, LORA)
    assert plugin.paths == [plan.host_module for plan in adapter.table.plans]


def test_an_own_base_is_built_and_loaded(tmp_path: Path) -> None:
    plugin = toy_plugin(BuildsItsOwnBase())
    model = plugin.build_model(HF_CONFIG, ParallelRun.single(), torch.float64, {"fill": 3.0})
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())
    tensors = hf_weights(toy_model())
    tensors["head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    load_base_weights(model, plugin, tmp_path, hf_config=HF_CONFIG)
    assert torch.equal(model(*toy_inputs()), toy_model()(*toy_inputs()))
    with pytest.raises(LoraError, match=r"lm_head.weight: is missing"):
        load_base_weights(model, toy_plugin(), tmp_path, hf_config=HF_CONFIG)


def test_observers_of_other_plugins_are_told() -> None:
    watcher, stranger = Watches(), AttachesByItself()
    plugin = toy_plugin()
    plugin.manager.register(watcher, "watcher")
    plugin.manager.register(stranger, "stranger")
    model = toy_model()
    attach(model, plugin, HF_CONFIG, LORA)
    exported = export_adapter(model)
    import_adapter(model, exported)
    with pytest.raises(LoraError):
        attach(model, plugin, HF_CONFIG, LORA)
    assert watcher.seen == ["attached 24", "exported 30 of rank 2", "attach failed"]
    assert stranger.paths == []


def test_two_projections_of_one_stored_factor_must_be_summed_alike() -> None:
    class Splits:
        @hookimpl
        def lora_grad_sum_groups(self, row: Any) -> str:
            return "tp" if "q_proj" in row.hf_module else "none"

    with pytest.raises(LoraError, match=r"linear_qkv.lora.A: its rows are to be summed over different groups"):
        attach(toy_model(), toy_plugin(Splits()), HF_CONFIG, LORA)


def test_a_plugin_that_builds_no_model_says_so() -> None:
    with pytest.raises(LoraError, match="builds no base model"):
        toy_plugin().build_model(HF_CONFIG, ParallelRun.single(), torch.float32)
