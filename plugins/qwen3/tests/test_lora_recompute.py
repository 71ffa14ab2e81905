"""B19: with a frozen embedding, recomputed layers must still see an input that requires a gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qwen3_compare as compare
import torch
from qwen3_tiny import LORA, microbatches, positions
from qwen3_trainer import Factor, Report, adapted_model, local, loss_of
from torch import Tensor

from lora_plugins_sdk import LoraConfig, reduce_grads
from lora_plugins_sdk.testing import Layout, current_run, run_world

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
EVERY = [FULL, BLOCK, SELECTIVE, MLP]
NAMES = ["full", "block", "core_attn", "mlp"]


def gradients(
    checkpoint: Path, adapter: Path | None, lora: LoraConfig, overrides: dict[str, Any]
) -> tuple[dict[Factor, Tensor], dict[Factor, int]]:
    """Gradients of the mean loss, the embedding's output being the leaf that it is in real training."""
    run = current_run()
    model, attached = adapted_model(checkpoint, adapter, run, lora, overrides=overrides)
    torch.manual_seed(11)
    batches = microbatches()
    for tokens in batches:
        logits = model(tokens[:, :-1], positions(tokens[:, :-1]), None)
        assert logits.requires_grad
        (loss_of(logits, tokens[:, 1:], run) / len(batches)).backward()
    reduce_grads(model)
    rows = [row for factors in attached.factors() for row in factors.plan.rows]
    return local(attached, "grad"), {(row.hf_module, row.factor): row.partition_dim for row in rows}


def full_gradients(layout: Layout, *arguments: Any) -> dict[Factor, Tensor]:
    ranks = run_world(gradients, layout, *arguments)
    if layout.tp == 1:
        return ranks[0][0]
    (first, split), (second, _) = ranks
    full = {}
    for factor, dim in split.items():
        assert dim >= 0 or torch.equal(first[factor], second[factor])
        full[factor] = first[factor] if dim < 0 else torch.cat([first[factor], second[factor]], dim=dim)
    return full


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("overrides", EVERY, ids=NAMES)
def test_same_gradients(
    overrides: dict[str, Any],
    layout: Layout,
    checkpoint: Path,
    adapter: Path,
    one_process: Report,
    figure: Callable[[str, float], None],
) -> None:
    """B19: without the cure the adapter has no gradient at all, and nothing says so."""
    expected = compare.factors([one_process], Layout(), "grads")
    difference = compare.largest_difference(full_gradients(layout, checkpoint, adapter, LORA, overrides), expected)
    figure(f"{layout}: recomputed", difference)
    assert difference <= 1e-6


@pytest.mark.world
@pytest.mark.parametrize("overrides", EVERY, ids=NAMES)
def test_adapter_on_the_mlp_alone(overrides: dict[str, Any], checkpoint: Path) -> None:
    """B19: nothing before the first MLP trains, so its input would not require a gradient either."""
    lora = LoraConfig(rank=4, target_modules=("linear_fc1", "linear_fc2"))
    plain = full_gradients(Layout(), checkpoint, None, lora, {})
    recomputed = full_gradients(Layout(), checkpoint, None, lora, overrides)
    assert compare.largest_difference(recomputed, plain) <= 1e-6
    assert all(grad.abs().max() > 0 for (_, factor), grad in recomputed.items() if factor == "B")


@pytest.mark.world
@pytest.mark.parametrize("overrides", [FULL, MLP], ids=["full", "mlp"])
def test_dropout_masks_are_the_same_when_recomputed(overrides: dict[str, Any], checkpoint: Path, adapter: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8, dropout=0.2, target_modules=LORA.target_modules)
    plain = full_gradients(Layout(), checkpoint, adapter, lora, {})
    recomputed = full_gradients(Layout(), checkpoint, adapter, lora, overrides)
    without = full_gradients(Layout(), checkpoint, adapter, LORA, {})
    assert compare.largest_difference(recomputed, plain) <= 1e-6
    assert compare.largest_difference(without, plain) > 1e-3
