"""Every topology against one process: outputs, dX, the gradient of every factor, three optimizer steps, export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import qwen3_compare as compare
import torch
from qwen3_trainer import STEPS, Report, train

from lora_plugins_sdk.testing import Layout, run_world

LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, pp=2, sequence_parallel=True),
]


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_equals_one_process(
    layout: Layout, checkpoint: Path, adapter: Path, one_process: Report, figure: Callable[[str, float], None]
) -> None:
    """B1, B2, B3: replicated factors under TP and SP, packed rows, the sum on `main_grad`, several steps."""
    reports = run_world(train, layout, checkpoint, adapter)
    single = [one_process]
    expected = compare.factors(single, Layout(), "grads")
    assert min(one.abs().max() for one in expected.values()) > 1e-4
    differences = {
        "logits": compare.largest(compare.logits(reports, layout), compare.logits(single, Layout())),
        "dX": compare.largest(compare.dx(reports, layout), compare.dx(single, Layout())),
        "gradients": compare.largest_difference(compare.factors(reports, layout, "grads"), expected),
    }
    for step in range(STEPS):
        mine = compare.factors(reports, layout, "weights", step)
        weights = compare.factors(single, Layout(), "weights", step)
        differences[f"factors after step {step + 1}"] = compare.largest_difference(mine, weights)
    for name, value in differences.items():
        figure(f"{layout}: {name}", value)
    for rank in reports:
        assert rank.exported.keys() == one_process.exported.keys()
        assert all(torch.equal(rank.exported[name], one) for name, one in reports[0].exported.items())
    assert differences.pop("logits") <= 1e-5
    assert max(differences.values()) <= 1e-6
