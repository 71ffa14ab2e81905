"""Outputs: the fresh adapter changes nothing, a trained one is what PEFT makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_reference import FoldedModel
from qwen3_tiny import LORA, TARGETS, VOCABULARY, hf_model, make_adapter, microbatches, positions
from qwen3_trainer import adapted_model
from torch import Tensor

from lora_plugins_sdk import (
    LoraConfig,
    detach,
    disable_adapters,
    export_adapter,
    import_adapter,
    read_adapter,
    write_adapter,
)
from lora_plugins_sdk.testing import Layout, current_run, run_world

LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True)]


def forward(model: Any) -> Tensor:
    tokens = microbatches()[0][:, :-1]
    with torch.no_grad():
        return model(tokens, positions(tokens), None)


def life_of_an_adapter(checkpoint: Path, adapter: Path, out: Path, lora: LoraConfig) -> Tensor:
    """Attach, import, export, disable, detach; this rank's adapted logits."""
    run = current_run()
    model, attached = adapted_model(checkpoint, None, run, lora)
    with attached.disabled():
        base = forward(model)
    assert torch.equal(forward(model), base), "a fresh adapter must change nothing"
    saved = read_adapter(adapter)
    import_adapter(model, saved)
    adapted = forward(model)
    assert (adapted - base).abs().max() > 0.1
    exported = export_adapter(model)
    assert exported.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(exported.tensors[name], saved.tensors[name]) for name in saved.tensors)
    if run.tp_rank == 0:
        write_adapter(exported, out)
    with disable_adapters(model):
        assert torch.equal(forward(model), base)
    assert torch.equal(forward(model), adapted)
    detach(model)
    assert torch.equal(forward(model), base)
    assert all(parameter.requires_grad for parameter in model.parameters())
    return adapted


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
def test_equals_peft_and_the_folded_model(
    layout: Layout, rslora: bool, checkpoint: Path, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    """B2, B23, B32, B34: what PEFT computes from the export is what was trained."""
    from peft import PeftModel

    lora = LoraConfig(rank=4, alpha=3, use_rslora=True, target_modules=TARGETS) if rslora else LORA
    adapter = make_adapter(tmp_path / "adapter", checkpoint, lora)
    shards = run_world(life_of_an_adapter, layout, checkpoint, adapter, tmp_path / "exported", lora)
    logits = torch.cat(shards, dim=-1)[..., :VOCABULARY]
    tokens = microbatches()[0][:, :-1]
    peft = PeftModel.from_pretrained(hf_model(checkpoint), str(tmp_path / "exported")).eval()
    folded = FoldedModel(checkpoint, read_adapter(adapter).tensors, lora.scale)
    with torch.no_grad():
        expected = peft(tokens).logits
    figure(f"{layout}: against PEFT", (logits - expected).abs().max().item())
    figure(f"{layout}: against folded", (logits - folded.logits(tokens)).abs().max().item())
    assert (logits - expected).abs().max() <= 1e-5
    assert (logits - folded.logits(tokens)).abs().max() <= 1e-5
