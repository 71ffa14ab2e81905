"""A linear that TP does not split, on two ranks."""

import pytest
import torch
from sdk_toy import ARCHITECTURE, HF_CONFIG
from sdk_toy_host import Linear
from torch import Tensor, nn

from lora_plugins_sdk import Architecture, LoraConfig, SelectedPlugin, adapter_of, attach, export_adapter, reduce_grads
from lora_plugins_sdk.testing import Layout, current_run, run_world

ONE_SITE = Architecture(
    name="toy", model_types=("toy",), sites=tuple(site for site in ARCHITECTURE.sites if site.region == "vision")
)


def step() -> tuple[Tensor, list[Tensor]]:
    """dX of this rank's tokens and the gradient of A and B."""
    run = current_run()
    model = nn.Module()
    model.vision = nn.Module()
    linear = model.vision.patch_linear = Linear(5, 12)
    generator = torch.Generator().manual_seed(1)
    linear.weight.data.copy_(torch.randn(12, 5, generator=generator))
    attach(model, SelectedPlugin.of(ONE_SITE), HF_CONFIG, LoraConfig(rank=2, alpha=4), run)
    for parameter in adapter_of(model).parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(8, 3, 5, generator=generator)
    if run.facts.sequence_parallel:
        x = x.chunk(run.facts.tp)[run.tp_rank]
    x.requires_grad_(True)
    linear(x)[0].square().sum().backward()
    reduce_grads(model)
    assert x.grad is not None
    assert len(export_adapter(model).tensors) == 2
    return x.grad, [parameter.grad for parameter in adapter_of(model).parameters() if parameter.grad is not None]


@pytest.mark.world
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_replicated_site(layout: Layout) -> None:
    """B9: both factors are replicated; under SP each rank saw half of the tokens, so both are summed."""
    ((dx, grads),) = run_world(step, Layout())
    ranks = run_world(step, layout)
    mine = torch.cat([part for part, _ in ranks]) if layout.sequence_parallel else ranks[1][0]
    assert (mine - dx).abs().max() <= 1e-6 * dx.abs().max()
    assert len(grads) == 2
    for rank, (_, factors) in enumerate(ranks):
        for grad, expected, first in zip(factors, grads, ranks[0][1], strict=True):
            assert torch.equal(grad, first), rank
            assert (grad - expected).abs().max() <= 1e-6 * expected.abs().max()
