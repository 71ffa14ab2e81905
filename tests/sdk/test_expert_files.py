"""Factors of routed experts as files: names, exact inverses, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sdk_experts_host import HF_CONFIG, MoeModel, moe_model, moe_plugin, moe_tokens
from sdk_toy_host import randomize
from torch import Tensor

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    PeftAdapter,
    adapter_of,
    attach,
    export_adapter,
    gather_adam_moments,
    import_adapter,
    load_adam_moments,
    read_adapter,
    write_adapter,
)

EXPERTS = "base_model.model.model.layers.0.mlp.experts"
Tensors = dict[str, Tensor]


def adapted(sharing: str, seed: int | None = 0) -> MoeModel:
    model = moe_model()
    attach(model, moe_plugin(), HF_CONFIG, LoraConfig(rank=4, alpha=4, expert_sharing=sharing))
    if seed is not None:
        randomize(model, seed)
    return model


def test_names_and_shapes() -> None:
    own, outer = (export_adapter(adapted(sharing)).tensors for sharing in ("none", "outer"))
    assert len(own) == 2 * 4 * 3 * 2 and len(outer) == 2 * 3 * 2
    assert own[f"{EXPERTS}.3.gate_proj.lora_A.weight"].shape == (4, 8)
    assert own[f"{EXPERTS}.3.down_proj.lora_B.weight"].shape == (8, 4)
    assert outer[f"{EXPERTS}.up_proj.lora_A.weight"].shape == (1, 4, 8)
    assert outer[f"{EXPERTS}.up_proj.lora_B.weight"].shape == (4, 12, 4)
    assert outer[f"{EXPERTS}.down_proj.lora_A.weight"].shape == (4, 4, 12)
    assert outer[f"{EXPERTS}.down_proj.lora_B.weight"].shape == (1, 8, 4)


@pytest.mark.parametrize("sharing", ["none", "outer"])
def test_a_written_adapter_comes_back_bit_for_bit(tmp_path: Path, sharing: str) -> None:
    model = adapted(sharing)
    write_adapter(export_adapter(model), tmp_path / "adapter")
    other = adapted(sharing, seed=None)
    import_adapter(other, read_adapter(tmp_path / "adapter"))
    assert all(map(torch.equal, adapter_of(model).parameters(), adapter_of(other).parameters()))
    assert torch.equal(model(moe_tokens()[0]), other(moe_tokens()[0]))


@pytest.mark.parametrize("sharing", ["none", "outer"])
def test_moments_of_adam_come_back(sharing: str) -> None:
    model = adapted(sharing)
    adapter = adapter_of(model)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.01)
    model(moe_tokens()[0]).square().sum().backward()
    optimizer.step()
    moments = gather_adam_moments(adapter, optimizer)
    other = adapter_of(adapted(sharing))
    restored = torch.optim.AdamW(other.parameters(), lr=0.01)
    load_adam_moments(other, restored, moments, step=1)
    for one, same in zip(adapter.parameters(), other.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[one][name], restored.state[same][name])


def _transposed(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].transpose(-1, -2).contiguous()})


def _without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def _another(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(4, 8)})


def _one_expert_fewer(tensors: Tensors) -> None:
    tensors[f"{EXPERTS}.up_proj.lora_B.weight"] = tensors[f"{EXPERTS}.up_proj.lora_B.weight"][:3]


@pytest.mark.parametrize(
    ("sharing", "edit", "words"),
    [
        ("none", _without(f"{EXPERTS}.2.up_proj.lora_B.weight"), r"experts\.2\.up_proj\.lora_B\.weight: is missing"),
        ("none", _another(f"{EXPERTS}.4.up_proj.lora_A.weight"), r"experts\.4\.up_proj\.lora_A\.weight: has no place"),
        ("none", _transposed(f"{EXPERTS}.1.down_proj.lora_A.weight"), r"experts\.1\.down_proj.*is transposed"),
        (
            "outer",
            _transposed(f"{EXPERTS}.up_proj.lora_B.weight"),
            r"up_proj\.lora_B\.weight: is transposed.*\[4, 4, 12\]",
        ),
        ("outer", _one_expert_fewer, r"up_proj\.lora_B\.weight: is of another size: shape \[3, 12, 4\]"),
    ],
    ids=["missing", "one-too-many", "transposed", "packed-transposed", "packed-fewer"],
)
def test_what_does_not_fit_is_refused_with_nothing_written(
    sharing: str, edit: Callable[[Tensors], Any], words: str
) -> None:
    """B31, B33: every expert is there, and each the right way round."""
    saved = export_adapter(adapted(sharing, seed=1))
    tensors = dict(saved.tensors)
    edit(tensors)
    model = adapted(sharing)
    before = [parameter.detach().clone() for parameter in adapter_of(model).parameters()]
    with pytest.raises(LoraError, match=words):
        import_adapter(model, PeftAdapter(tensors=tensors, config=saved.config))
    assert all(map(torch.equal, before, adapter_of(model).parameters()))


@pytest.mark.parametrize(("saved", "attached"), [("none", "outer"), ("outer", "none")])
def test_an_adapter_of_the_other_sharing_is_named_so(saved: str, attached: str) -> None:
    with pytest.raises(LoraError, match=f"attach with expert_sharing='{saved}'$"):
        import_adapter(adapted(attached), export_adapter(adapted(saved)))
