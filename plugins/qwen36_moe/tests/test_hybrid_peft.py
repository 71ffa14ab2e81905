"""Adapters on fused experts in PEFT's form: the real PEFT on transformers' model against folded weights, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_tiny import CONFIG, fold, hf_model, make_checkpoint, random_adapter, tokens

from lora_plugins_sdk import LoraConfig, LoraError, load_plugin
from lora_plugins_sdk.peft_parameters import from_parameters, hf_parameters, to_parameters

EVERY = ("all-linear", "embed_tokens", "lm_head", "router")
PARAMETERS = hf_parameters(load_plugin(architecture="qwen36_moe").architecture, CONFIG)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hybrid"))


def peft_logits(checkpoint: Path, adapter: Any) -> torch.Tensor:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    model: Any = get_peft_model(hf_model(checkpoint), PeftConfig(**adapter.config))
    slots = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert {name: slot.shape for name, slot in slots.items()} == {
        name: tensor.shape for name, tensor in adapter.tensors.items()
    }
    assert not set_peft_model_state_dict(model, dict(adapter.tensors)).unexpected_keys
    with torch.no_grad():
        return model.eval()(tokens()).logits


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rslora"])
@pytest.mark.parametrize("sharing", ["none", "outer"])
@pytest.mark.parametrize("targets", [EVERY, ("*experts*gate_proj", "*experts*down_proj"), ("*experts*down_proj",)])
def test_peft_computes_what_folded_weights_compute(
    targets: tuple[str, ...], sharing: str, rslora: bool, checkpoint: Path
) -> None:
    """B31, B33: the experts of a fused parameter are wired, and in its own orientation."""
    lora = LoraConfig(rank=4, alpha=3, target_modules=targets, expert_sharing=sharing, use_rslora=rslora)
    adapter, factors = random_adapter(lora)
    model = hf_model(checkpoint)
    with torch.no_grad():
        base = model(tokens()).logits
        fold(model, factors, lora.scale)
        expected = model(tokens()).logits
    logits = peft_logits(checkpoint, to_parameters(adapter, PARAMETERS))
    assert (expected - base).abs().max() > 0.1
    assert (logits - expected).abs().max() <= 1e-5


def test_there_and_back() -> None:
    """B30: an engine's names per expert, and PEFT's parameters of all experts."""
    adapter, _ = random_adapter(LoraConfig(rank=4, alpha=6, target_modules=EVERY))
    fused = to_parameters(adapter, PARAMETERS)
    assert not any(".experts.0." in name for name in fused.tensors)
    back = from_parameters(fused, PARAMETERS)
    assert back.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in adapter.tensors.items())
    assert "target_parameters" not in back.config and back.config["r"] == 4


def test_without_experts_nothing_changes() -> None:
    adapter, _ = random_adapter(LoraConfig(rank=4, target_modules=("o_proj",)))
    assert to_parameters(adapter, PARAMETERS) is adapter and from_parameters(adapter, PARAMETERS) is adapter


def test_what_is_refused() -> None:
    adapter, _ = random_adapter(LoraConfig(rank=4, alpha=6, target_modules=EVERY))
    some = {name: tensor for name, tensor in adapter.tensors.items() if ".experts.3.up_proj.lora_A" not in name}
    with pytest.raises(LoraError, match=r"up_proj: its A factors are those of 7 of 8 experts"):
        to_parameters(replace_tensors(adapter, some), PARAMETERS)
    fused = to_parameters(adapter, PARAMETERS)
    name = next(name for name in fused.tensors if name.endswith("experts.base_layer.lora_B.weight"))
    dense = dict(fused.tensors) | {name: torch.ones_like(fused.tensors[name])}
    with pytest.raises(LoraError, match="rows of one projection use the ranks of another"):
        from_parameters(replace_tensors(fused, dense), PARAMETERS)
    narrow = dict(fused.tensors) | {name: fused.tensors[name][:, 8:]}
    with pytest.raises(LoraError, match="gate_up_proj: its factors have shapes"):
        from_parameters(replace_tensors(fused, narrow), PARAMETERS)


def replace_tensors(adapter: Any, tensors: dict[str, torch.Tensor]) -> Any:
    from dataclasses import replace

    return replace(adapter, tensors=tensors)
