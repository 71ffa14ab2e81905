"""B21: pipeline stages that train nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import qwen3_compare as compare
from qwen3_tiny import make_adapter
from qwen3_trainer import train

from lora_plugins_sdk import LoraConfig
from lora_plugins_sdk.testing import Layout, run_world


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, pp=2, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("layer", [0, 3])
def test_targets_on_one_stage_only(
    layer: int, layout: Layout, checkpoint: Path, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    """The other stage has no parameter to train; before the first target there is no gradient to pass on either."""
    lora = LoraConfig(rank=4, alpha=8, target_modules=(f"*.layers.{layer}.*",))
    adapter = make_adapter(tmp_path, checkpoint, lora)
    single = run_world(train, Layout(), checkpoint, adapter, lora)
    reports = run_world(train, layout, checkpoint, adapter, lora)
    assert {len(rank.grads) for rank in reports} == {0, 14}
    expected = compare.factors(single, Layout(), "grads")
    gradients = compare.largest_difference(compare.factors(reports, layout, "grads"), expected)
    dx = compare.largest(compare.dx(reports, layout), compare.dx(single, Layout()))
    figure(f"{layout}, layer {layer}: gradients", gradients)
    assert gradients <= 1e-6 and dx <= 1e-6
    for rank in reports:
        assert rank.exported.keys() == single[0].exported.keys()
