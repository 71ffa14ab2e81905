"""Adam's moments in full form, for any trainer; under several topologies see the harness's resume tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import ToyModel, toy_inputs, toy_model, toy_plugin

from lora_plugins_sdk import (
    LoraAdapter,
    LoraConfig,
    LoraError,
    adapter_of,
    attach,
    export_adapter,
    gather_adam_moments,
    import_adapter,
    load_adam_moments,
)

NAME = "exp_avg.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapted() -> tuple[ToyModel, LoraAdapter, torch.optim.AdamW]:
    model = toy_model()
    adapter = attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2, alpha=4))
    return model, adapter, torch.optim.AdamW(adapter.parameters(), lr=0.01)


def train(model: ToyModel, optimizer: torch.optim.AdamW, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(*toy_inputs()).square().mean().backward()
        optimizer.step()


def test_another_trainer_goes_on_bit_for_bit():
    """B15: factors and moments are all that AdamW needs; without the moments the next update is another one."""
    model, adapter, optimizer = adapted()
    train(model, optimizer, 3)
    saved, moments = export_adapter(model), gather_adam_moments(adapter, optimizer)
    assert len(moments) == 2 * len(adapter.table.rows) and NAME in moments
    train(model, optimizer, 2)
    expected = [parameter.detach().clone() for parameter in adapter.parameters()]
    for restored in (True, False):
        other, fresh, its_optimizer = adapted()
        import_adapter(other, saved)
        if restored:
            load_adam_moments(fresh, its_optimizer, moments, step=3)
        train(other, its_optimizer, 2)
        assert all(map(torch.equal, fresh.parameters(), expected)) is restored


def test_moments_share_no_memory_with_the_optimizer():
    model, adapter, optimizer = adapted()
    train(model, optimizer, 1)
    moments = gather_adam_moments(adapter, optimizer)
    before = {name: tensor.clone() for name, tensor in moments.items()}
    load_adam_moments(adapter, optimizer, moments, step=1)
    train(model, optimizer, 1)
    assert all(torch.equal(moments[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda moments: moments.pop(NAME), "is missing"),
        (lambda moments: moments.update(more=torch.zeros(1)), "belongs to no factor"),
        (
            lambda moments: moments.update({NAME: torch.zeros(12, 2)}),
            r"is torch.float32 \[12, 2\], expected float32 \[2, 12\]",
        ),
        (lambda moments: moments.update({NAME: moments[NAME].bfloat16()}), "is torch.bfloat16"),
        (lambda moments: moments[NAME].fill_(float("nan")), "NaN or infinite"),
    ],
)
def test_moments_that_do_not_fit_change_nothing(edit: Callable[[dict[str, Any]], Any], said: str):
    model, adapter, optimizer = adapted()
    train(model, optimizer, 1)
    moments = gather_adam_moments(adapter, optimizer)
    kept = gather_adam_moments(adapter, optimizer)
    edit(moments)
    with pytest.raises(LoraError, match=said):
        load_adam_moments(adapter, optimizer, moments, step=9)
    assert all(torch.equal(kept[name], one) for name, one in gather_adam_moments(adapter, optimizer).items())
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_a_trainable_parameter_of_the_base_is_named():
    model, adapter, _ = adapted()
    adapter.refuse_other_trainable()
    model.get_parameter("embedding.weight").requires_grad_(True)
    with pytest.raises(LoraError, match=r"embedding\.weight: is trainable and no part of the adapter"):
        adapter_of(model).refuse_other_trainable()
