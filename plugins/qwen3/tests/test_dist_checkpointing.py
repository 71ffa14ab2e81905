"""megatron-core's own checkpoints of an adapted model: saved under one topology, loaded under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_tiny import LORA
from qwen3_trainer import adapted_model
from torch import Tensor

from lora_plugins_sdk import LoraConfig, PeftAdapter, detach, export_adapter, read_adapter
from lora_plugins_sdk.testing import Layout, current_run, run_world

pytestmark = pytest.mark.world
SOME = LoraConfig(rank=4, alpha=8, target_modules=("*.layers.1.*", "*.layers.2.mlp.down_proj"))


def sharded(model: Any) -> dict[str, Any]:
    return model.sharded_state_dict()


def save(checkpoint: Path, adapter: Path | None, directory: Path, lora: LoraConfig) -> tuple[list[str], PeftAdapter]:
    """Save the whole model as a trainer does; the keys, and the adapter that was saved."""
    from megatron.core import dist_checkpointing

    model, _ = adapted_model(checkpoint, adapter, current_run(), lora)
    state = sharded(model)
    keys = sorted(one.key for one in state.values())
    dist_checkpointing.save(state, str(directory))
    return keys, export_adapter(model)


def load(checkpoint: Path, directory: Path, lora: LoraConfig) -> tuple[dict[str, Tensor], bool]:
    """Load it into a model with a fresh adapter; the adapter, and whether detaching gives the old method back."""
    from megatron.core import dist_checkpointing

    model, _ = adapted_model(checkpoint, None, current_run(), lora)
    loaded: Any = dist_checkpointing.load(sharded(model), str(directory))
    model.load_state_dict(loaded, strict=False)
    exported = dict(export_adapter(model).tensors)
    detach(model)
    restored = not any("sharded_state_dict" in vars(module) for module in model.modules())
    return exported, restored and not any("lora" in key for key in sharded(model))


@pytest.mark.parametrize(
    "source", [Layout(tp=2), Layout(tp=2, make_vocab_size_divisible_by=128), Layout(pp=2), Layout(dp=2)], ids=str
)
def test_saved_here_and_loaded_there(source: Layout, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    """B16, B18: shards are told apart, every stage's factors are there, and a padded vocabulary fits anew."""
    directory = tmp_path / "saved"
    directory.mkdir()
    run_world(save, source, checkpoint, adapter, directory, LORA)
    expected = read_adapter(adapter).tensors
    for target in (Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2, sequence_parallel=True)):
        for exported, restored in run_world(load, target, checkpoint, directory, LORA):
            assert exported.keys() == expected.keys() and restored
            for name, tensor in exported.items():
                assert torch.equal(tensor, expected[name]), f"{name} from {source} to {target}"


def test_some_layers_may_be_adapted(checkpoint: Path, tmp_path: Path) -> None:
    """megatron-core stores a layer's tensors as parts of one over all layers; factors are in some layers only."""
    directory = tmp_path / "saved"
    directory.mkdir()
    keys, saved = run_world(save, Layout(tp=2), checkpoint, None, directory, SOME)[0]
    assert len([key for key in keys if ".lora." in key]) == 7 + 4 + 2
    for exported, _ in run_world(load, Layout(pp=2), checkpoint, directory, SOME):
        assert exported.keys() == saved.tensors.keys()
        assert all(torch.equal(tensor, saved.tensors[name]) for name, tensor in exported.items())
