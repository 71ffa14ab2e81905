"""Factors of routed experts in megatron-core's own checkpoints, from one expert layout to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sdk_experts_host import HF_CONFIG, moe_model, moe_plugin
from sdk_toy_host import randomize
from torch import Tensor

from lora_plugins_sdk import LoraConfig, PeftAdapter, adapter_of, attach, export_adapter, import_adapter
from lora_plugins_sdk.testing import Layout, current_run, run_world

pytestmark = pytest.mark.world
LAYOUTS = [
    Layout(),
    Layout(dp=2, ep=2),
    Layout(tp=2, etp=1, ep=2, sequence_parallel=True),
    Layout(tp=2, dp=2, ep=2, sequence_parallel=True),
]


def factors_of(lora: LoraConfig) -> tuple[Any, dict[str, Any]]:
    """A model with a fresh adapter, and the sharded state of its factors as the host linears give it."""
    run, model = current_run(), moe_model(current_run())
    adapter = attach(model, moe_plugin(), HF_CONFIG, lora, run)
    state: dict[str, Any] = {}
    for handle in adapter.handles:
        state |= handle.module.sharded_state_dict(prefix=f"{handle.plan.host_module}.")
    assert len(state) > 2 * len(adapter.handles), "the experts' own weights are in it too"
    return model, {name: one for name, one in state.items() if ".lora." in name}


def save(saved: PeftAdapter, directory: Path, lora: LoraConfig) -> None:
    from megatron.core import dist_checkpointing

    model, state = factors_of(lora)
    import_adapter(model, saved)
    dist_checkpointing.save(state, str(directory))


def load(directory: Path, lora: LoraConfig) -> dict[str, Tensor]:
    from megatron.core import dist_checkpointing

    model, state = factors_of(lora)
    loaded: Any = dist_checkpointing.load(state, str(directory))
    named = {f"{name}": parameter for name, parameter in adapter_of(model).named_parameters()}
    with torch.no_grad():
        for name, tensor in loaded.items():
            named[name].copy_(tensor)
    return dict(export_adapter(model).tensors)


@pytest.mark.parametrize("sharing", ["none", "outer"])
@pytest.mark.parametrize("source", LAYOUTS[1:], ids=str)
def test_saved_here_and_loaded_there(source: Layout, sharing: str, tmp_path: Path) -> None:
    """B16, B18: experts over EP, shards over ETP, and shared factors stored once."""
    lora = LoraConfig(rank=4, alpha=4, expert_sharing=sharing)
    model = moe_model()
    attach(model, moe_plugin(), HF_CONFIG, lora)
    randomize(model, 5)
    saved = export_adapter(model)
    directory = tmp_path / "saved"
    directory.mkdir()
    run_world(save, source, saved, directory, lora)
    for target in LAYOUTS:
        for exported in run_world(load, target, directory, lora):
            assert exported.keys() == saved.tensors.keys()
            for name, tensor in exported.items():
                assert torch.equal(tensor, saved.tensors[name]), f"{name} from {source} to {target}"
