"""The reduction with and without megatron-core's buffers, and with the buffers' variants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qwen3_compare as compare
from qwen3_tiny import LORA
from qwen3_trainer import Report, adapted_model, plain_backward, train

from lora_plugins_sdk import LoraError, detach, reduce_grads_in_finalize
from lora_plugins_sdk.testing import Layout, current_run, run_world

SP = Layout(tp=2, sequence_parallel=True)


def check(reports: list[Report], layout: Layout, one_process: Report, record: Callable[[str, float], None]) -> None:
    expected = compare.factors([one_process], Layout(), "grads")
    gradients = compare.largest_difference(compare.factors(reports, layout, "grads"), expected)
    dx = compare.largest(compare.dx(reports, layout), compare.dx([one_process], Layout()))
    record(f"{layout}: gradients", gradients)
    record(f"{layout}: dX", dx)
    assert gradients <= 1e-6 and dx <= 1e-6


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), SP], ids=str)
def test_plain_backward_then_reduce_grads(
    layout: Layout, checkpoint: Path, adapter: Path, one_process: Report, figure: Callable[[str, float], None]
) -> None:
    """B1: any trainer can call `reduce_grads` after its backward; gradients are then in `.grad`."""
    check(run_world(plain_backward, layout, checkpoint, adapter), layout, one_process, figure)


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_grad_reduce": True, "bucket_size": 2000},
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
        {"average_in_collective": True},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2, dp=2, sequence_parallel=True)], ids=str)
def test_variants_of_the_gradient_buffers(
    options: dict[str, Any],
    layout: Layout,
    checkpoint: Path,
    adapter: Path,
    one_process: Report,
    figure: Callable[[str, float], None],
) -> None:
    """B3: the sum over TP comes after the host's own reduction, also where that left each rank one shard."""
    reports = run_world(train, layout, checkpoint, adapter, ddp_options=options, steps=1)
    check(reports, layout, one_process, figure)


def wire_twice(checkpoint: Path) -> str:
    model, _ = adapted_model(checkpoint, None, current_run(), LORA)
    config: Any = model.config
    original = config.finalize_model_grads_func
    reduce_grads_in_finalize(model)
    try:
        reduce_grads_in_finalize(model)
        message = ""
    except LoraError as error:
        message = str(error)
    detach(model)
    assert config.finalize_model_grads_func is original
    try:
        reduce_grads_in_finalize(model)
    except LoraError as error:
        return f"{message}\n{error}"
    return message


@pytest.mark.world
def test_wiring_is_done_once_and_undone_by_detach(checkpoint: Path) -> None:
    """A second wiring would sum twice, silently; one that outlives its adapter would fail the next step."""
    (message,) = run_world(wire_twice, Layout(), checkpoint)
    assert "reduces the adapter's gradients already" in message
    assert "has no adapter attached" in message
