"""Adapters as files: merged offline, inspected, and read by the real PEFT beside transformers' model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen3_moe_tiny import CONFIG, hf_model, make_checkpoint, save_tensors, tokens
from torch import Tensor

from lora_plugins_sdk import PeftAdapter, write_adapter
from lora_plugins_sdk.offline.adapter import read_plain_adapter
from lora_plugins_sdk.offline.inspect import base_facts
from lora_plugins_sdk.offline.merge import merge, plan_merge
from lora_plugins_sdk.peft_parameters import from_parameters, hf_parameters, to_parameters
from lora_plugins_sdk.testing.conformance.problem import make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.subject import Subject


def random_adapter(sharing: str, config: dict[str, Any] = CONFIG, **changes: Any) -> PeftAdapter:
    """On every projection, the router, the embedding and the head included; no B is zero."""
    subject = Subject.of("qwen3_moe", hf_config=config, expert_sharing=sharing)
    return peft_adapter(subject, make_problem(subject, **changes).factors, **changes)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(tokens()).logits


def with_peft(directory: Path, adapter: PeftAdapter) -> Tensor:
    """transformers' logits with the adapter beside the base."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    readable = to_parameters(adapter, hf_parameters(Subject.of("qwen3_moe").selected.architecture, CONFIG))
    model: Any = get_peft_model(hf_model(directory), LoraConfig(**readable.config))
    result = set_peft_model_state_dict(model, dict(readable.tensors))
    assert not result.unexpected_keys and not any("lora_" in name for name in result.missing_keys)
    return logits(model)


@pytest.mark.parametrize("stored", ["each", "fused"])
@pytest.mark.parametrize("sharing", ["none", "outer"])
def test_a_merge_is_what_peft_computes(sharing: str, stored: str, checkpoint: Path, tmp_path: Path) -> None:
    """B30, B31, B33: dense linears, routers and every expert, into either form of checkpoint."""
    base = checkpoint
    if stored == "fused":
        base = save_tensors(tmp_path / "fused", CONFIG, hf_model(checkpoint).state_dict())
    adapter = random_adapter(sharing)
    directory = write_adapter(adapter, tmp_path / "adapter")
    merge(plan_merge(base, directory, tmp_path / "merged"))
    merged, beside = logits(hf_model(tmp_path / "merged")), with_peft(base, adapter)
    assert (merged - logits(hf_model(base))).abs().max() > 0.1
    assert (merged - beside).abs().max() <= 1e-5


def test_an_inspection_finds_every_pair_a_place(checkpoint: Path, tmp_path: Path) -> None:
    adapter = read_plain_adapter(write_adapter(random_adapter("none"), tmp_path / "adapter"), checkpoint)
    facts = base_facts(adapter, checkpoint)
    assert facts.plugin == "qwen3_moe" and not facts.problems
    found = {one.kind: one.total for one in facts.coverage if one.adapted == one.total}
    kinds = {"self_attn.q_proj": 4, "mlp.up_proj": 2, "mlp.gate": 2, "mlp.experts.*.up_proj": 2 * 8}
    assert {f"model.layers.*.{kind}": count for kind, count in kinds.items()}.items() <= found.items()
    assert len(found) == len(facts.coverage) == 4 + 3 + 1 + 3 + 2


def test_there_and_back() -> None:
    """B30: names per expert, and PEFT's parameters of all experts; dense linears keep their names."""
    parameters = hf_parameters(Subject.of("qwen3_moe").selected.architecture, CONFIG)
    adapter = random_adapter("none")
    fused = to_parameters(adapter, parameters)
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight" in fused.tensors
    assert "model.layers.0.mlp.down_proj.weight" in fused.config["target_parameters"]
    back = from_parameters(fused, parameters)
    assert back.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in adapter.tensors.items())


def test_peft_reads_an_export_as_it_is_where_every_layer_has_experts(tmp_path: Path) -> None:
    """PEFT has names of its own for the experts of this family, and none for dense layers between them."""
    from peft import PeftModel

    config = CONFIG | {"mlp_only_layers": []}
    base = make_checkpoint(tmp_path / "base", config)
    targets = ("all-linear",)
    adapter = random_adapter("none", config, target_modules=targets)
    leaves = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapter.tensors})
    named = PeftAdapter(tensors=adapter.tensors, config=dict(adapter.config) | {"target_modules": leaves})
    directory = write_adapter(named, tmp_path / "adapter")
    merge(plan_merge(base, directory, tmp_path / "merged"))
    beside = logits(PeftModel.from_pretrained(hf_model(base), directory))
    assert (beside - logits(hf_model(base))).abs().max() > 0.1
    assert (beside - logits(hf_model(tmp_path / "merged"))).abs().max() <= 1e-5
