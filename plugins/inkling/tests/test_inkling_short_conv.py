"""Short convolutions: the definition, and the same result when the text lies in pieces on several ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_plugin_inkling.model.short_conv import ShortConv
from lora_plugins_sdk.testing import Layout, current_run, run_world

CHANNELS, KERNEL = 6, 5


def _inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (tokens, 3, CHANNELS), (CHANNELS, 1, KERNEL), (tokens, 3, CHANNELS)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def _definition(x: Tensor, weight: Tensor) -> Tensor:
    """torch's convolution over the channels, padded at the front, plus the input."""
    padded = nn.functional.pad(x.permute(1, 2, 0), (KERNEL - 1, 0))
    return x + nn.functional.conv1d(padded, weight, groups=CHANNELS).permute(2, 0, 1)


def _split(tokens: int) -> dict[str, Tensor]:
    """This rank's output, and gradients of its input and of the weight."""
    run = current_run()
    config = SimpleNamespace(sequence_parallel=run.facts.sequence_parallel, params_dtype=torch.float32)
    conv = ShortConv(config, CHANNELS, KERNEL, split_channels=False, tp_group=run.tp_group)
    x, weight, upstream = _inputs(tokens)
    conv.weight.data.copy_(weight)
    mine = x.chunk(run.facts.tp)[run.tp_rank].clone().requires_grad_(True)
    y = conv(mine)
    (y * upstream.chunk(run.facts.tp)[run.tp_rank]).sum().backward()
    assert mine.grad is not None and conv.weight.grad is not None
    marked: Any = conv.weight
    return {"y": y.detach(), "dx": mine.grad, "dw": conv.weight.grad, "summed": torch.tensor(marked.sequence_parallel)}


@pytest.mark.world
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(tp=4, sequence_parallel=True)], ids=str
)
@pytest.mark.parametrize("tokens", [16, 4], ids=["long parts", "parts shorter than the kernel"])
def test_text_in_pieces(tokens: int, layout: Layout) -> None:
    """With 4 tokens on 4 ranks each output needs the parts of all ranks before."""
    x, weight, upstream = _inputs(tokens)
    x.requires_grad_(True)
    weight.requires_grad_(True)
    y = _definition(x, weight)
    (y * upstream).sum().backward()
    assert x.grad is not None and weight.grad is not None
    ranks = run_world(_split, layout, tokens)
    assert all(bool(rank["summed"]) == layout.sequence_parallel for rank in ranks)
    torch.testing.assert_close(torch.cat([rank["y"] for rank in ranks]), y.detach())
    torch.testing.assert_close(torch.cat([rank["dx"] for rank in ranks]), x.grad)
    torch.testing.assert_close(sum(rank["dw"] for rank in ranks), weight.grad, rtol=1e-5, atol=1e-5)


def _half() -> Tensor:
    config = SimpleNamespace(sequence_parallel=False, params_dtype=torch.float32)
    conv = ShortConv(config, CHANNELS, KERNEL, split_channels=True, tp_group=None)
    x, weight, _ = _inputs(8)
    conv.weight.data.copy_(weight)
    return conv(x.bfloat16()).detach()


@pytest.mark.world
def test_half_precision_is_summed_in_single() -> None:
    x, weight, _ = _inputs(8)
    (y,) = run_world(_half, Layout())
    assert torch.equal(y, _definition(x.bfloat16().float(), weight).bfloat16())
