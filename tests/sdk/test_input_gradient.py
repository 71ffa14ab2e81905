"""The branch adds its share of dX inside the gradient that the frozen linear makes, however autograd is asked."""

from typing import Any

import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import randomize, toy_model, toy_plugin
from torch import Tensor

from lora_plugins_sdk import LoraConfig, attach
from lora_plugins_sdk.input_gradient import BranchInput, InputShare, input_share

LORA = LoraConfig(rank=2, alpha=4, target_modules=("down_proj",))


def prepared() -> tuple[Any, Tensor, Tensor]:
    """An adapted row-parallel linear, an input and the gradient of its output."""
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    x = torch.randn(5, 2, 10, generator=torch.Generator().manual_seed(1)).double().requires_grad_(True)
    grad = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(2)).double()
    return model.get_submodule("decoder.layers.0.mlp.linear_fc2"), x, grad


def expected_dx(linear: Any, grad: Tensor) -> Tensor:
    factors = linear.lora
    folded = linear.weight + factors.scale * (factors.bs[0] @ factors.a)
    return grad @ folded.detach().to(grad.dtype)


def close(mine: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


def test_dx_is_complete_and_no_gradient_of_the_caller_is_written() -> None:
    linear, x, grad = prepared()
    before = grad.clone()
    linear(x)[0].backward(grad)
    assert x.grad is not None
    close(x.grad, expected_dx(linear, grad))
    assert torch.equal(grad, before)


def test_a_second_reader_of_the_input_keeps_its_gradient() -> None:
    """The marked alias belongs to the linear and its branch; the residual reads the input itself."""
    linear, x, grad = prepared()
    seen: list[Tensor] = []
    residual = x * 1.0
    residual.register_hook(lambda one: seen.append(one))
    (linear(x)[0][..., :10] + residual).backward(grad[..., :10])
    assert x.grad is not None
    padded = torch.nn.functional.pad(grad[..., :10], (0, 2))
    close(x.grad, expected_dx(linear, padded) + grad[..., :10])
    assert torch.equal(seen[0], grad[..., :10])


def test_a_share_left_by_an_earlier_pass_is_not_added_again() -> None:
    """Gradients of the factors alone never reach the input; the next pass starts from its own share."""
    linear, x, grad = prepared()
    out = linear(x)[0]
    torch.autograd.grad(out, list(linear.lora.parameters()), 3 * grad, retain_graph=True)
    for _ in range(2):
        (dx,) = torch.autograd.grad(out, x, grad, retain_graph=True)
        close(dx, expected_dx(linear, grad))


def test_only_a_marked_input_takes_a_share() -> None:
    """Dropout puts an operation between: its own backward must see the branch's gradient."""
    x = torch.randn(3, 4, requires_grad=True)
    marked = BranchInput.apply(x)
    assert isinstance(marked, Tensor)
    assert isinstance(input_share(marked), InputShare)
    assert input_share(marked * 0.5) is None
    assert input_share(x) is None
    with torch.no_grad():
        assert input_share(BranchInput.apply(x)) is None  # type: ignore[arg-type]
