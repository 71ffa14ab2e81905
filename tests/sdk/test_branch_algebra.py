"""The branch against the obvious form: scale * B A added to the weight, differentiated by autograd."""

import pytest
import torch
from sdk_toy import ARCHITECTURE, HF_CONFIG
from sdk_toy_host import ToyModel, randomize, toy_inputs, toy_model, toy_plugin
from torch import Tensor
from torch.func import functional_call

from lora_plugins_sdk import LoraAdapter, LoraConfig, adapter_of, attach

Factors = dict[str, dict[str, Tensor]]  # HF module -> {"A": [r, in], "B": [out, r]}


def leaves(adapter: LoraAdapter) -> Factors:
    """Every factor as a leaf of its own, in double precision."""
    found: Factors = {}
    for factors in adapter.factors():
        for row in factors.plan.rows:
            leaf = factors.local(row).double().clone().requires_grad_(True)
            found.setdefault(row.hf_module, {})[row.factor] = leaf
    return found


def folded_output(model: ToyModel, factors: Factors, scale: float, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """The base model's output with `W + scale * B A` in place of each adapted weight, row by row in host order."""
    dims, weights = ARCHITECTURE.dims(HF_CONFIG), {}
    for site in ARCHITECTURE.sites:
        index = site.pack.resolve(dims, [one.section_rows(dims) for one in site.projections], 1).host_index()
        for layer in range(2) if site.per_layer else [0]:
            names = [one.hf.format(layer=layer) for one in site.projections]
            if any(name in factors for name in names):
                products = {name: scale * factors[name]["B"] @ factors[name]["A"] for name in names if name in factors}
                weight = f"{site.path.format(layer=layer)}.weight"
                zero = torch.zeros_like(model.get_parameter(weight)[0])
                delta = [products[names[part]][row] if names[part] in products else zero for part, row in index]
                weights[weight] = model.get_parameter(weight) + torch.stack(delta)
    return functional_call(model, weights, inputs)


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=2, alpha=4, target_modules=("all-linear", "lm_head")),
        LoraConfig(rank=3, alpha=3, use_rslora=True),
        LoraConfig(rank=2, alpha=1, target_modules=("q_proj", "v_proj", "up_proj")),
        LoraConfig(rank=1, alpha=2, target_modules=("k_proj", "*.layers.1.mlp.*")),
    ],
    ids=["everything", "rslora", "parts-of-packs", "some-layers"],
)
def test_output_and_gradients_equal_the_folded_model(lora: LoraConfig) -> None:
    """B2, B32, B34: order of packed rows, orientation of A and B, scale."""
    model, inputs = toy_model(), toy_inputs()
    tokens, patches = inputs
    adapter = attach(model, toy_plugin(), HF_CONFIG, lora)
    randomize(model)
    factors = leaves(adapter)
    weight = torch.randn(5, 2, 7, generator=torch.Generator().manual_seed(9)).double()

    patches.requires_grad_(True)
    output = model(tokens, patches)
    (torch.tanh(output) * weight).sum().backward()
    dx, patches.grad = patches.grad, None
    grads = {
        (row.hf_module, row.factor): parameter.grad[row.stacked_at : row.stacked_at + row.local_shape[0]]
        for site in adapter.factors()
        for row in site.plan.rows
        for parameter in [site.get_parameter(row.param)]
        if parameter.grad is not None
    }

    with adapter.disabled():
        expected = folded_output(model, factors, lora.scale, (tokens, patches))
    (torch.tanh(expected) * weight).sum().backward()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert dx is not None and patches.grad is not None
    torch.testing.assert_close(dx, patches.grad, rtol=1e-10, atol=1e-12)
    assert len(grads) == 2 * len(factors)
    for module, pair in factors.items():
        for factor, leaf in pair.items():
            assert leaf.grad is not None and leaf.grad.abs().max() > 1e-4, module
            # The stored gradient is float32, as the factor is.
            torch.testing.assert_close(grads[module, factor], leaf.grad.float(), rtol=1e-6, atol=1e-8)


def test_gradients_accumulate_over_microbatches() -> None:
    model, (tokens, patches) = toy_model(), toy_inputs()
    adapter = attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, alpha=4))
    randomize(model)
    model(tokens, patches).square().sum().backward()
    together = [parameter.grad.clone() for parameter in adapter.parameters() if parameter.grad is not None]
    for parameter in adapter.parameters():
        parameter.grad = None
    for part in range(2):
        model(tokens[:, part : part + 1], patches[:, part : part + 1]).square().sum().backward()
    for parameter, expected in zip(adapter.parameters(), together, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_bfloat16_host_is_close_to_the_exact_result() -> None:
    """The factors stay float32 and are cast for the product; the result has the host's precision."""
    exact, inputs = toy_model(), toy_inputs()
    attach(exact, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, alpha=4))
    randomize(exact)
    exact_output = exact(*inputs)
    exact_output.tanh().sum().backward()

    model, (tokens, patches) = toy_model(torch.bfloat16), toy_inputs(torch.bfloat16)
    adapter = attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, alpha=4))
    randomize(model)
    output = model(tokens, patches)
    output.tanh().sum().backward()
    assert output.dtype == torch.bfloat16
    assert (output.double() - exact_output).norm() / exact_output.norm() < 0.03
    for (name, mine), expected in zip(adapter.named_parameters(), adapter_of(exact).parameters(), strict=True):
        assert mine.dtype == torch.float32 and mine.grad is not None and mine.grad.dtype == torch.float32
        assert expected.grad is not None
        assert torch.cosine_similarity(mine.grad.flatten(), expected.grad.flatten(), dim=0) > 0.98, name
