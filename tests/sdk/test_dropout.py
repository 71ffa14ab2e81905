"""Dropout on the branch's input: off in eval, reproducible, and the same again when activations are recomputed."""

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import ToyModel, randomize, toy_inputs, toy_model, toy_plugin
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lora_plugins_sdk import LoraConfig, attach
from lora_plugins_sdk.factors import LoraFactors


def model_with(dropout: float) -> ToyModel:
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, alpha=4, dropout=dropout))
    randomize(model)
    return model


def test_off_in_eval_and_at_zero() -> None:
    """B44: rollouts in eval mode must be the policy that the loss sees with dropout 0."""
    inputs = toy_inputs()
    exact = model_with(0.0)(*inputs)
    model = model_with(0.5)
    assert not torch.equal(model(*inputs), exact)
    assert torch.equal(model.eval()(*inputs), exact)


def test_a_model_in_eval_mode_takes_an_adapter_in_eval_mode() -> None:
    model, inputs = toy_model().eval(), toy_inputs()
    model.decoder.layers[1].train()
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, alpha=4, dropout=0.5))
    for name, module in model.named_modules():
        assert module.training == name.startswith("decoder.layers.1"), name
    randomize(model)
    model.decoder.layers[1].eval()
    assert torch.equal(model(*inputs), model.eval()(*inputs))


def test_at_zero_the_global_generator_is_left_alone() -> None:
    model, inputs = model_with(0.0), toy_inputs()
    before = torch.get_rng_state()
    model(*inputs)
    assert torch.equal(before, torch.get_rng_state())


def test_seeded_by_the_global_generator() -> None:
    model, inputs = model_with(0.3), toy_inputs()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(*inputs))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_see_the_same_mask(reentrant: bool) -> None:
    inputs = toy_inputs()
    gradients: list[list[Tensor]] = []
    for recompute in (False, True):
        model = model_with(0.3)
        torch.manual_seed(3)
        x = model.embedding(inputs[0]).requires_grad_(True)
        for layer in model.decoder.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        x.square().sum().backward()
        gradients.append([one.grad for one in model.parameters() if one.grad is not None])
    assert gradients[0] and len(gradients[0]) == len(gradients[1])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_share_of_zeros_and_expected_value() -> None:
    model = model_with(0.25)
    factors = model.get_submodule("decoder.layers.0.mlp.linear_fc2.lora")
    assert isinstance(factors, LoraFactors)
    x = torch.ones(400, 100)
    dropped = factors.drop(x)
    assert dropped.eq(0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
