"""Base weights by declaration: from transformers' and the published layout, each rank its part, nothing left over."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from inkling_tiny import CONFIG, make_model, save_checkpoint
from inkling_weights import host_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_plugin_inkling.model.published import from_published, to_published
from lora_plugins_sdk import LoraError, load_base_weights, load_plugin, read_hf_config
from lora_plugins_sdk.testing import Layout, current_run, run_world

LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(pp=2),
    Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def hf() -> dict[str, Tensor]:
    return dict(make_model().state_dict())


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, hf: dict[str, Tensor]) -> dict[str, Path]:
    """One model in transformers' layout, in the published one with towers, and the same under transformers' names."""
    plain = save_checkpoint(tmp_path_factory.mktemp("plain"))
    tower = {"model.visual.layers.norm_0.weight": torch.ones(3)}
    published = _save(tmp_path_factory.mktemp("published"), to_published(hf) | tower)
    renamed = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in hf.items()}
    tower = {"model.vision_tower.encoder_layers.0.layer_norm.weight": torch.ones(3)}
    multimodal = _save(tmp_path_factory.mktemp("multimodal"), renamed | tower)
    return {"transformers": plain, "published": published, "multimodal": multimodal}


def _save(directory: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "inkling_mm_model", "text_config": CONFIG}))
    return directory


def _differences(directory: Path, hf: dict[str, Tensor]) -> dict[str, float]:
    run, plugin = current_run(), load_plugin("inkling_text")
    model = plugin.build_model(read_hf_config(directory), run, torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load_base_weights(model, plugin, directory, run)
    expected = host_tensors(model, hf, CONFIG)
    return {name: (value - expected[name]).abs().max().item() for name, value in model.named_parameters()}


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["transformers", "published", "multimodal"])
def test_every_parameter_is_what_the_copy_by_hand_gives(
    kind: str, layout: Layout, directories: dict[str, Path], hf: dict[str, Tensor]
) -> None:
    for differences in run_world(_differences, layout, directories[kind], hf):
        assert differences and not any(differences.values()), {k: v for k, v in differences.items() if v}


def test_published_layout_is_transformers_own(hf: dict[str, Tensor]) -> None:
    """transformers' conversion table, applied to our published names and tensors, gives its own model back."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    rules: Any = get_checkpoint_conversion_mapping("inkling_mm_model")
    assert rules
    back: dict[str, Tensor] = {}
    for published, tensor in to_published(hf).items():
        name, tensors = published, [tensor]
        targets = [name]
        for rule in rules:
            (source,) = rule.source_patterns if isinstance(rule.source_patterns, list) else [rule.source_patterns]
            if not re.search(source, name):
                continue
            patterns = rule.target_patterns if isinstance(rule.target_patterns, list) else [rule.target_patterns]
            targets = [re.sub(source, pattern.replace("\\", ""), name) for pattern in patterns]
            if isinstance(rule, WeightConverter):
                for operation in rule.operations:
                    keys = [name] if len(tensors) == 1 and type(operation).__name__ == "Interleave" else targets
                    made: Any = operation.convert({name: tensors[0]}, [name], keys)
                    tensors = list(made.values())
            name = targets[0]
        back |= {re.sub("language_model.", "", one): part for one, part in zip(targets, tensors, strict=True)}
    assert back.keys() == hf.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, hf[name]), name


def test_both_directions_are_inverse(hf: dict[str, Tensor]) -> None:
    published = to_published(hf)
    assert all(name.startswith("model.llm.") for name in published)
    back = {name: tensor for one in published.items() for name, tensor in from_published(*one)}
    assert back.keys() == hf.keys() and all(torch.equal(back[name], tensor) for name, tensor in hf.items())
    again = to_published(back)
    assert again.keys() == published.keys() and all(torch.equal(again[name], published[name]) for name in again)


def test_other_tensors_stay_as_they_are() -> None:
    tower = {"model.visual.layers.linear_0.weight": torch.ones(2, 2)}
    assert to_published(tower) == tower and dict(from_published(*next(iter(tower.items())))) == tower


def _refused(directory: Path) -> str:
    run, plugin = current_run(), load_plugin("inkling_text")
    model = plugin.build_model(CONFIG, run, torch.float32)
    try:
        load_base_weights(model, plugin, directory, run, hf_config=CONFIG)
    except LoraError as error:
        return str(error)
    return "loaded"


@pytest.mark.world
def test_missing_and_unknown_tensors_are_named(directories: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(directories["transformers"] / "model.safetensors")
    gone = tensors.pop("model.layers.1.mlp.shared_experts.down_proj")
    save_file(tensors | {"model.layers.1.mlp.extra": gone}, tmp_path / "model.safetensors")
    (message,) = run_world(_refused, Layout(), tmp_path)
    assert "model.layers.1.mlp.shared_experts.down_proj.weight: is missing from the checkpoint" in message
    assert "model.layers.1.mlp.extra: is in the checkpoint and has no place in the model" in message
