"""A frozen copy of an adapter computes as the adapter did when it was made."""

from __future__ import annotations

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import randomize, toy_inputs, toy_model, toy_plugin

from lora_plugins_sdk import FrozenAdapter, LoraConfig, LoraError, adapter_of, attach


def test_the_frozen_adapter_computes_and_the_live_one_comes_back():
    """B43: neither training nor an error within the context changes either of the two."""
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, alpha=4))
    randomize(model, seed=1)
    parameters = adapter_of(model).parameters()
    storage = [parameter.data_ptr() for parameter in parameters]
    frozen, then = FrozenAdapter(model), model(*toy_inputs())
    randomize(model, seed=2)
    now = model(*toy_inputs())
    assert not torch.equal(then, now)
    for _ in range(2):
        with torch.no_grad(), frozen.active():
            assert torch.equal(model(*toy_inputs()), then)
        assert torch.equal(model(*toy_inputs()), now)
    with pytest.raises(RuntimeError), frozen.active():
        raise RuntimeError
    assert torch.equal(model(*toy_inputs()), now)
    assert [parameter.data_ptr() for parameter in parameters] == storage


def test_a_model_without_an_adapter():
    with pytest.raises(LoraError, match="has no adapter attached"):
        FrozenAdapter(toy_model())
