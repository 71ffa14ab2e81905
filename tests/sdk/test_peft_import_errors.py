"""Adapters that do not fit: one clear error, and no factor was touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import ToyModel, randomize, toy_model, toy_plugin
from torch import Tensor

from lora_plugins_sdk import LoraConfig, LoraError, PeftAdapter, adapter_of, attach, export_adapter, import_adapter

LORA = LoraConfig(rank=2, alpha=4, target_modules=("all-linear",))
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


def adapted(lora: LoraConfig = LORA, seed: int = 0) -> ToyModel:
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, lora)
    randomize(model, seed)
    return model


def refused(saved: PeftAdapter) -> LoraError:
    model = adapted(seed=1)
    before = [parameter.detach().clone() for parameter in adapter_of(model).parameters()]
    with pytest.raises(LoraError) as error:
        import_adapter(model, saved)
    assert all(map(torch.equal, adapter_of(model).parameters(), before))
    return error.value


def change(edit: Callable[[dict[str, Tensor]], None]) -> PeftAdapter:
    exported = export_adapter(adapted())
    tensors = dict(exported.tensors)
    edit(tensors)
    return PeftAdapter(tensors=tensors, config=exported.config)


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("edit", "subject", "reason"),
    [
        (lambda tensors: tensors.pop(A), A, "is missing"),
        (put("base_model.model.lm_head.lora_A.weight", torch.zeros(2, 12)), "lm_head", "has no place"),
        (put(A, torch.zeros(12, 2)), A, "is transposed: shape [12, 2], expected [2, 12]"),
        (put(B, torch.zeros(2, 12)), B, "is transposed"),
        (put(A, torch.zeros(3, 12)), A, "is of another rank than 2"),
        (put(A, torch.zeros(2, 13)), A, "is of another size"),
        (put(A, torch.zeros(24)), A, "is of another size"),
        (put(A, torch.full((2, 12), float("nan"))), A, "NaN or infinite"),
        (put(B, torch.full((12, 2), float("inf"))), B, "NaN or infinite"),
        (put(B, torch.zeros(12, 2, dtype=torch.int8)), B, "has dtype torch.int8"),
    ],
    ids=["missing", "extra", "transposed-A", "transposed-B", "rank", "size", "flat", "nan", "inf", "int8"],
)
def test_a_tensor_that_does_not_fit_is_named(edit: Any, subject: str, reason: str) -> None:
    """B33: an orientation that fits by chance elsewhere is refused here by shape."""
    found = refused(change(edit)).diagnostics
    assert len(found) == 1 and subject in found[0].subject and reason in found[0].reason and found[0].cure


def test_everything_that_does_not_fit_is_reported_at_once() -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[A]
        tensors[B] = torch.zeros(12, 3)
        tensors["stray"] = torch.zeros(1)

    assert {one.subject for one in refused(change(edit)).diagnostics} == {A, B, "stray"}


@pytest.mark.parametrize(
    ("config", "subject"),
    [
        ({"r": 4}, "r=4"),
        ({"lora_alpha": 8}, "lora_alpha=8"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern={'q_proj': 4}"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]]"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=[1]"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    ],
)
def test_a_config_that_means_something_else_is_named(config: dict[str, Any], subject: str) -> None:
    exported = export_adapter(adapted())
    saved = PeftAdapter(tensors=exported.tensors, config={**exported.config, **config})
    assert [one.subject for one in refused(saved).diagnostics] == [subject]


def test_what_peft_writes_by_default_is_accepted() -> None:
    """PEFT fills in every option it knows; those that mean plain LoRA are no obstacle."""
    peft = pytest.importorskip("peft")
    exported = export_adapter(adapted())
    defaults = peft.LoraConfig(r=2, lora_alpha=4).to_dict()
    config = {**defaults, "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    model = adapted(seed=1)
    import_adapter(model, PeftAdapter(tensors=exported.tensors, config=config))
    again = export_adapter(model).tensors
    assert all(torch.equal(again[name], tensor) for name, tensor in exported.tensors.items())


def test_an_rslora_adapter_is_not_read_as_a_plain_one() -> None:
    """B34: same tensors, other scale."""
    model = adapted(LoraConfig(rank=2, alpha=4, use_rslora=True))
    with pytest.raises(LoraError, match=r"use_rslora=False: the attached adapter has True"):
        import_adapter(model, export_adapter(adapted()))


def test_another_rank_is_one_problem() -> None:
    exported = export_adapter(adapted(LoraConfig(rank=3, alpha=4, target_modules=("all-linear",))))
    assert [one.subject for one in refused(exported).diagnostics] == ["r=3"]
    tensors = {**exported.tensors, A: torch.zeros(5, 12)}
    assert [one.subject for one in refused(PeftAdapter(tensors=tensors, config=exported.config)).diagnostics] == [
        "r=3",
        A,
    ]


def test_many_problems_are_sorted_and_their_message_is_short() -> None:
    exported = export_adapter(adapted())
    tensors = {name: tensor * float("nan") for name, tensor in exported.tensors.items()}
    error = refused(PeftAdapter(tensors=tensors, config=exported.config))
    assert [one.subject for one in error.diagnostics] == sorted(tensors) and len(tensors) > 20
    assert len(str(error).splitlines()) == 22
    assert str(error).endswith(f"... and {len(tensors) - 20} more")


def test_without_an_attached_adapter() -> None:
    with pytest.raises(LoraError, match="has no adapter attached"):
        import_adapter(toy_model(), export_adapter(adapted()))
