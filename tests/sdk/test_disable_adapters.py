"""`disable_adapters`: the base model, exactly, for as long as the context is open."""

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import randomize, toy_inputs, toy_model, toy_plugin

from lora_plugins_sdk import LoraConfig, LoraError, attach, disable_adapters

LORA = LoraConfig(rank=2, alpha=4)


def test_base_inside_adapter_outside_also_nested() -> None:
    model, inputs = toy_model(), toy_inputs()
    base = model(*inputs)
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    adapted = model(*inputs)
    assert not torch.equal(adapted, base)
    with disable_adapters(model):
        assert torch.equal(model(*inputs), base)
        with disable_adapters(model):
            assert torch.equal(model(*inputs), base)
        assert torch.equal(model(*inputs), base)
    assert torch.equal(model(*inputs), adapted)


def test_an_exception_inside_brings_the_adapter_back() -> None:
    model, inputs = toy_model(), toy_inputs()
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    randomize(model)
    adapted = model(*inputs)
    with pytest.raises(RuntimeError, match="inside"), disable_adapters(model):
        raise RuntimeError("inside")
    assert torch.equal(model(*inputs), adapted)


def test_base_runs_without_a_graph_while_disabled() -> None:
    """The reference pass must not train: no factor takes part, so nothing requires a gradient."""
    model, inputs = toy_model(), toy_inputs()
    attach(model, toy_plugin(), HF_CONFIG, LORA)
    with disable_adapters(model):
        assert not model(*inputs).requires_grad
    assert model(*inputs).requires_grad


def test_without_an_adapter_it_is_an_error() -> None:
    with pytest.raises(LoraError, match="has no adapter attached"), disable_adapters(toy_model()):
        pass
