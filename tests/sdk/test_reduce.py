"""Wiring of the reduction, without any megatron-core."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import ToyModel, toy_inputs, toy_model, toy_plugin

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    adapter_of,
    attach,
    detach,
    reduce,
    reduce_grads,
    reduce_grads_in_finalize,
)


def adapted(finalize: Any = None) -> ToyModel:
    model = toy_model()
    model.config = SimpleNamespace(finalize_model_grads_func=finalize)  # type: ignore[assignment]
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2))
    return model


def test_the_host_finalizes_first_with_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous reduction of the same buffers must not be in flight when the factors are summed."""
    calls: list[Any] = []
    model = adapted(lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(reduce, "reduce_grads", lambda model: calls.append(model))
    reduce_grads_in_finalize([model])
    config: Any = model.config
    config.finalize_model_grads_func([model], 7, pg_collection=None)
    assert calls == [(([model], 7), {"pg_collection": None}), [model]]


def test_chunks_that_share_a_config_are_wired_once() -> None:
    calls: list[int] = []
    model = adapted(lambda: calls.append(1))
    other = torch.nn.Module()
    other.config = model.config
    reduce_grads_in_finalize([model, other])
    config: Any = model.config
    config.finalize_model_grads_func()
    assert calls == [1]


def test_detach_leaves_a_function_that_someone_else_set() -> None:
    model = adapted(lambda: None)
    reduce_grads_in_finalize(model)
    config: Any = model.config
    config.finalize_model_grads_func = mine = object()
    detach(model)
    assert config.finalize_model_grads_func is mine


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_trainer_that_sets_the_function_anew_is_stopped(wrapped: bool) -> None:
    """Its own function would run alone, and replicated factors would get their rank's part of the gradient."""
    model = adapted(lambda: None)
    reduce_grads_in_finalize(model)
    config: Any = model.config
    model(*toy_inputs())
    config.finalize_model_grads_func = partial(config.finalize_model_grads_func) if wrapped else lambda: None
    with torch.no_grad():
        model(*toy_inputs())
    if wrapped:
        model(*toy_inputs())
        return
    with pytest.raises(LoraError, match=r"was set anew .*call reduce_grads_in_finalize after that"):
        model(*toy_inputs())
    reduce_grads_in_finalize(model)
    model(*toy_inputs())
    detach(model)
    model(*toy_inputs())


def test_a_host_without_a_config() -> None:
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2))
    with pytest.raises(LoraError, match="no megatron-core config to wire into"):
        reduce_grads_in_finalize(model)


def test_one_process_has_nothing_to_sum() -> None:
    model = adapted()
    model(*toy_inputs()).square().sum().backward()
    before = [parameter.grad for parameter in adapter_of(model).parameters()]
    copies = [grad.clone() for grad in before if grad is not None]
    reduce_grads(model)
    for parameter, grad, copy in zip(adapter_of(model).parameters(), before, copies, strict=True):
        assert grad is not None and parameter.grad is grad and torch.equal(copy, grad)


@pytest.mark.parametrize("function", [reduce_grads, reduce_grads_in_finalize])
def test_without_an_adapter(function: Any) -> None:
    with pytest.raises(LoraError, match="has no adapter attached"):
        function(toy_model())
