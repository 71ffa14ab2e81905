"""The branch writes into the base output's own buffer: what that permits, and what autograd must still catch."""

from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import randomize, toy_inputs, toy_model, toy_plugin
from torch import Tensor

from lora_plugins_sdk import LoraConfig, attach

LORA = LoraConfig(rank=2, alpha=4, target_modules=("down_proj", "lm_head"))


def prepared() -> Any:
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    return model


def gradients(model: Any) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == 6
    model.zero_grad()
    return found


def test_the_output_may_be_modified_in_place_by_the_host() -> None:
    """megatron-core's vocabulary-parallel cross entropy subtracts the maximum in place."""
    model, inputs = prepared(), toy_inputs()
    out = model(*inputs)
    (out - 1.5).tanh().sum().backward()
    expected = gradients(model)
    out = model(*inputs)
    out -= 1.5
    out.tanh().sum().backward()
    for mine, other in zip(gradients(model), expected, strict=True):
        assert torch.equal(mine, other)


def test_a_residual_added_in_place_by_the_host() -> None:
    model = prepared()
    mlp = model.decoder.layers[1].mlp
    x = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(1)).double().requires_grad_(True)
    (mlp(x) + x).square().sum().backward()
    expected, x.grad = x.grad, None
    mlp(x).add_(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("saved", [torch.exp, torch.tanh, torch.sigmoid], ids=["exp", "tanh", "sigmoid"])
def test_a_base_output_that_the_host_saved_is_detected(saved: Any) -> None:
    """Operations that keep their own result for the backward: silently wrong gradients, if nobody noticed."""
    model, inputs = toy_model(), toy_inputs()
    linear: Any = model.get_submodule("decoder.layers.1.mlp.linear_fc2")
    plain = linear.forward
    linear.forward = lambda x: (saved(plain(x)[0]), None)
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(*inputs).sum().backward()


def test_a_view_from_a_custom_function_is_accepted() -> None:
    """megatron-core returns views made inside its own autograd functions; autograd forbids writing to those."""
    model, inputs = toy_model(), toy_inputs()
    linear: Any = model.get_submodule("decoder.layers.1.mlp.linear_fc2")
    plain = linear.forward
    linear.forward = lambda x: (ReturnsView.apply(plain(x)[0]), None)
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    out = model(*inputs)
    out.sum().backward()
    viewed, model = gradients(model), prepared()
    other = model(*inputs)
    other.sum().backward()
    assert torch.equal(out, other)
    for mine, expected in zip(viewed, gradients(model), strict=True):
        assert torch.equal(mine, expected)


class ReturnsView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 1.0).view(-1, x.shape[-1]).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_an_input_modified_afterwards_is_detected() -> None:
    """The branch saves its input; a host that overwrites it must not get the gradient of other values."""
    model = prepared()
    x = torch.randn(5, 2, 10).double()
    out, _ = model.decoder.layers[0].mlp.linear_fc2(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_any_memory_layout() -> None:
    """Expanded (`sum`) and transposed gradients reach the branch as they are."""
    model = prepared()
    x = torch.randn(5, 2, 10, generator=torch.Generator().manual_seed(2)).double()
    linear = model.decoder.layers[0].mlp.linear_fc2
    weight = torch.randn(12, 2, 5, generator=torch.Generator().manual_seed(3)).double()
    results = []
    for grad in (weight.permute(2, 1, 0), weight.permute(2, 1, 0).contiguous()):
        linear(x)[0].backward(grad)
        results.append([parameter.grad.clone() for parameter in linear.lora.parameters()])
        model.zero_grad()
    for expanded in (torch.ones(5, 2, 12).double(), torch.ones(1, 1, 12).double().expand(5, 2, 12)):
        linear(x)[0].backward(expanded)
        results.append([parameter.grad.clone() for parameter in linear.lora.parameters()])
        model.zero_grad()
    for first, second in ((0, 1), (2, 3)):
        for mine, expected in zip(results[first], results[second], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-9)


def test_nothing_is_written_without_a_graph_either() -> None:
    model, inputs = prepared(), toy_inputs()
    with torch.no_grad():
        plain = model(*inputs)
    with torch.inference_mode():
        inference = model(*inputs)
    assert torch.equal(plain, inference) and torch.equal(plain, model(*inputs))
