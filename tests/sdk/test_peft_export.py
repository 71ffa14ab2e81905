"""What an export holds, and that import is its exact inverse."""

from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import ToyModel, randomize, toy_inputs, toy_model, toy_plugin

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    PeftAdapter,
    adapter_of,
    attach,
    export_adapter,
    hookimpl,
    import_adapter,
)

LORA = LoraConfig(rank=2, alpha=4, target_modules=("all-linear", "lm_head"))


def adapted(lora: LoraConfig = LORA, seed: int = 0, plugin: Any = None) -> ToyModel:
    model = toy_model()
    attach(model, toy_plugin(plugin), HF_CONFIG, lora)
    randomize(model, seed)
    return model


def test_names_and_shapes_are_pefts() -> None:
    exported = export_adapter(adapted())
    shapes = {name: tuple(tensor.shape) for name, tensor in exported.tensors.items()}
    assert shapes["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] == (2, 12)
    assert shapes["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"] == (6, 2)
    assert shapes["base_model.model.lm_head.lora_B.weight"] == (7, 2)
    assert len(shapes) == 2 * (2 * 7 + 2)


def test_config_is_minimal() -> None:
    """B45: an unknown key makes an older PEFT refuse the adapter."""
    assert export_adapter(adapted(), "some/base").config == {
        "base_model_name_or_path": "some/base",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": 2,
        "target_modules": [
            *("down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "patch_proj", "q_proj", "up_proj", "v_proj")
        ],
        "task_type": "CAUSAL_LM",
    }


def test_rslora_is_in_the_config() -> None:
    """B34: without the flag a reader scales by alpha / r."""
    config = export_adapter(adapted(LoraConfig(rank=2, alpha=4.5, use_rslora=True))).config
    assert config["use_rslora"] is True and config["lora_alpha"] == 4.5


def test_partly_adapted_names_are_given_in_full() -> None:
    lora = LoraConfig(rank=2, target_modules=("q_proj", "*.layers.1.mlp.up_proj"))
    config = export_adapter(adapted(lora)).config
    assert config["target_modules"] == ["model.layers.1.mlp.up_proj", "q_proj"]


def test_import_is_the_exact_inverse() -> None:
    source, inputs = adapted(seed=1), toy_inputs()
    exported = export_adapter(source)
    target = adapted(seed=2)
    assert not torch.equal(target(*inputs), source(*inputs))
    import_adapter(target, exported)
    assert torch.equal(target(*inputs), source(*inputs))
    again = export_adapter(target).tensors
    assert again.keys() == exported.tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in exported.tensors.items())


def test_an_export_shares_no_memory_with_the_parameters() -> None:
    """B24: whoever scales or keeps an export must not change the trained adapter."""
    model = adapted()
    before = [parameter.detach().clone() for parameter in adapter_of(model).parameters()]
    exported = export_adapter(model)
    for tensor in exported.tensors.values():
        tensor.zero_()
    assert all(map(torch.equal, adapter_of(model).parameters(), before))
    storages = [tensor.untyped_storage().data_ptr() for tensor in exported.tensors.values()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_no_import_would_take_are_not_exported(value: float) -> None:
    model = adapted()
    dict(adapter_of(model).named_parameters())["decoder.layers.1.mlp.linear_fc2.lora.A"].data[0, 0] = value
    with pytest.raises(LoraError, match="NaN or infinite") as error:
        export_adapter(model)
    names = [one.subject for one in error.value.diagnostics]
    assert names == ["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]


def test_an_import_keeps_the_parameters_in_place() -> None:
    """B14: an optimizer holds the parameters; new ones would leave it training the old."""
    model = adapted()
    before = [(id(parameter), parameter.data_ptr()) for parameter in adapter_of(model).parameters()]
    import_adapter(model, export_adapter(adapted(seed=3)))
    assert before == [(id(parameter), parameter.data_ptr()) for parameter in adapter_of(model).parameters()]


def test_other_dtypes_are_converted() -> None:
    exported = export_adapter(adapted(seed=1))
    half = PeftAdapter(
        tensors={name: one.to(torch.bfloat16) for name, one in exported.tensors.items()}, config=exported.config
    )
    model = adapted(seed=2)
    import_adapter(model, half)
    again = export_adapter(model).tensors
    assert all(torch.equal(again[name], tensor.float()) for name, tensor in half.tensors.items())


class Transposes:
    """Stores A the other way round, as some engines do."""

    @hookimpl
    def lora_export_tensor(self, row: Any, tensor: Any) -> dict[str, Any]:
        return {f"{row.hf_name}.t": tensor.t()} if row.factor == "A" else {row.hf_name: tensor}

    @hookimpl
    def lora_import_tensor(self, row: Any, tensors: Any) -> Any:
        return tensors[f"{row.hf_name}.t"].t() if row.factor == "A" else tensors[row.hf_name]


def test_an_override_of_both_directions() -> None:
    source = adapted(seed=1, plugin=Transposes())
    exported = export_adapter(source)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.t"
    assert tuple(exported.tensors[name].shape) == (12, 2)
    target = adapted(seed=2, plugin=Transposes())
    import_adapter(target, exported)
    assert torch.equal(target(*toy_inputs()), source(*toy_inputs()))
