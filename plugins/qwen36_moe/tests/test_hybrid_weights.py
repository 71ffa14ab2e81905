"""The declared base weights against the copy by hand, bit for bit, from every form of checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_tiny import CONFIG, hf_model, make_checkpoint
from hybrid_weights import copy_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_plugins_sdk import LoraError, load_base_weights, load_plugin, read_hf_config
from lora_plugins_sdk.testing import Layout, current_run, run_world

LAYOUTS = [
    Layout(),
    Layout(pp=2),
    Layout(tp=2, etp=1, sequence_parallel=True),
    Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hybrid"))


def one_tensor_per_expert(checkpoint: Path, directory: Path) -> Path:
    """As transformers saves it."""
    names = load_file(checkpoint / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names
    return checkpoint


def experts_fused(checkpoint: Path, directory: Path) -> Path:
    """As transformers holds it in memory."""
    tensors = {name: tensor.clone() for name, tensor in hf_model(checkpoint).state_dict().items()}
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 40, 36)
    return save(directory, CONFIG, tensors)


def vision_language(checkpoint: Path, directory: Path) -> Path:
    """A language model within a vision-language checkpoint, experts fused as in Qwen's own files."""
    fused = load_file(experts_fused(checkpoint, directory) / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in fused.items()}
    others = {name: torch.ones(3) for name in ("model.visual.patch_embed.proj.weight", "mtp.norm.weight")}
    config = {"model_type": "qwen3_5_moe", "text_config": CONFIG, "vision_config": {"model_type": "qwen3_5_moe_vision"}}
    return save(directory, config, wrapped | others)


def save(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def loaded_and_copied(directory: Path, checkpoint: Path) -> list[str]:
    """Names of parameters on this rank that differ between the two."""
    run, plugin = current_run(), load_plugin(architecture="qwen36_moe")
    config = read_hf_config(directory)
    loaded, copied = (plugin.build_model(config, run, torch.float32) for _ in range(2))
    load_base_weights(loaded, plugin, directory, run)
    copy_weights(copied, hf_model(checkpoint).state_dict(), CONFIG)
    by_hand = dict(copied.named_parameters())
    return [name for name, one in loaded.named_parameters() if not torch.equal(one, by_hand[name])]


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("form", [one_tensor_per_expert, experts_fused, vision_language])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_parameter_is_the_one_copied_by_hand(layout: Layout, form: Any, checkpoint: Path, tmp_path: Path) -> None:
    """B23: gate and up, and the experts' numbers, under TP, expert TP and EP."""
    directory = form(checkpoint, tmp_path / "form")
    assert run_world(loaded_and_copied, layout, directory, checkpoint) == [[]] * layout.world_size


def refusal(directory: Path) -> str:
    run, plugin = current_run(), load_plugin(architecture="qwen36_moe")
    model = plugin.build_model(read_hf_config(directory), run, torch.float32)
    try:
        load_base_weights(model, plugin, directory, run)
    except LoraError as error:
        return str(error)
    return ""


@pytest.mark.world
@pytest.mark.parametrize(
    ("name", "add", "words"),
    [
        ("model.layers.0.linear_attn.in_proj_b.weight", False, "in_proj_b.weight: is missing"),
        ("model.layers.1.mlp.shared_expert_gate.weight", False, "shared_expert_gate.weight: is missing"),
        ("model.layers.0.mlp.experts.gate_up_proj", False, "mlp.experts.0.gate_proj.weight: is missing"),
        ("model.layers.0.linear_attn.in_proj_ba.weight", True, "in_proj_ba.weight: is in the checkpoint and has no"),
    ],
)
def test_every_tensor_is_accounted_for(name: str, add: bool, words: str, checkpoint: Path, tmp_path: Path) -> None:
    directory = experts_fused(checkpoint, tmp_path / "form")
    tensors = load_file(directory / "model.safetensors")
    if add:
        tensors[name] = torch.zeros(2)
    else:
        del tensors[name]
    (message,) = run_world(refusal, Layout(), save(directory, CONFIG, tensors))
    assert words in message
