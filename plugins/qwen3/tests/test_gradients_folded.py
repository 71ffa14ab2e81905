"""One process against an independent model: transformers with the adapter folded into its weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import qwen3_compare as compare
from qwen3_reference import FoldedModel
from qwen3_tiny import LORA, TARGETS, make_adapter
from qwen3_trainer import Report, train

from lora_plugins_sdk import LoraConfig, read_adapter
from lora_plugins_sdk.testing import Layout, run_world


def differences(report: Report, checkpoint: Path, adapter: Path, scale: float) -> dict[str, float]:
    folded = FoldedModel(checkpoint, read_adapter(adapter).tensors, scale)
    logits, dx = folded.backward()
    grads = compare.factors([report], Layout(), "grads")
    gradients = []
    for key, grad in grads.items():
        leaf = folded.leaf(*key)
        assert leaf.grad is not None and leaf.grad.abs().max() > 1e-4
        gradients.append((grad - leaf.grad).abs().max().item())
    assert len(gradients) == len(folded.leaves)
    return {
        "logits": compare.largest(compare.logits([report], Layout()), logits),
        "dX": compare.largest(compare.dx([report], Layout()), dx),
        "gradients": max(gradients),
    }


@pytest.mark.world
@pytest.mark.mcore_matrix
def test_gradients_of_every_factor_and_dx(
    checkpoint: Path, adapter: Path, one_process: Report, figure: Callable[[str, float], None]
) -> None:
    """B2, B20, B32: every factor trains, in HF's order and orientation, and dX is complete."""
    found = differences(one_process, checkpoint, adapter, LORA.alpha / LORA.rank)
    for name, value in found.items():
        figure(f"folded: {name}", value)
    assert found["logits"] <= 1e-5 and found["dX"] <= 1e-6 and found["gradients"] <= 1e-6


@pytest.mark.world
def test_rslora(checkpoint: Path, tmp_path: Path, figure: Callable[[str, float], None]) -> None:
    """B34: with alpha / r in place of alpha / sqrt(r) everything here would be half as large."""
    lora = LoraConfig(rank=4, alpha=3, use_rslora=True, target_modules=TARGETS)
    adapter = make_adapter(tmp_path, checkpoint, lora)
    (report,) = run_world(train, Layout(), checkpoint, adapter, lora, steps=1)
    found = differences(report, checkpoint, adapter, 3 / 4**0.5)
    for name, value in found.items():
        figure(f"rsLoRA: {name}", value)
    assert found["logits"] <= 1e-5 and found["dX"] <= 1e-6 and found["gradients"] <= 1e-6
