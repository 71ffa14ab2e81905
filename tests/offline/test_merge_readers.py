"""Merged directories against transformers and PEFT, and against the adapter attached to a Megatron model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_plugins_sdk import (
    LoraConfig,
    attach,
    export_adapter,
    load_base_weights,
    load_plugin,
    read_hf_config,
    write_adapter,
)
from lora_plugins_sdk.offline.merge import merge, plan_merge

TOKENS = torch.arange(2 * 9).view(2, 9) * 7 % 61


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 in several weight files, every weight large enough to matter."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config: dict[str, Any] = dict(load_plugin(architecture="qwen3").architecture.tiny_config)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**config))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    directory = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def hf(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def peft_adapter(checkpoint: Path, directory: Path, **options: Any) -> Path:
    """An adapter made and saved by PEFT, B not zero."""
    import peft

    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
    model = peft.get_peft_model(hf(checkpoint), peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(str(directory))
    return directory


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["alpha/r", "rslora"])
def test_the_same_as_peft(checkpoint: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """B34 and the oracle: PEFT's own merge, and its logits with the adapter beside the base."""
    import peft

    adapter = peft_adapter(checkpoint, tmp_path / "adapter", **options)
    report = merge(plan_merge(checkpoint, adapter, tmp_path / "merged"))
    assert report.folds == 4 * 7 + 2
    beside = peft.PeftModel.from_pretrained(hf(checkpoint), adapter).eval()
    expected = logits(beside)
    assert (expected - logits(hf(checkpoint))).abs().max() > 0.5
    torch.testing.assert_close(logits(hf(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-5)
    theirs = beside.merge_and_unload().state_dict()
    ours = hf(tmp_path / "merged").state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def test_a_bfloat16_base_merged_in_float32_has_the_logits_of_the_adapter(checkpoint: Path, tmp_path: Path) -> None:
    """B35: no rounding of the delta is between the two."""
    import peft

    hf(checkpoint, torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter = peft_adapter(tmp_path / "base", tmp_path / "adapter")
    expected = logits(peft.PeftModel.from_pretrained(hf(tmp_path / "base"), adapter).eval())
    merge(plan_merge(tmp_path / "base", adapter, tmp_path / "wide", "float32"))
    torch.testing.assert_close(logits(hf(tmp_path / "wide")), expected, rtol=1e-4, atol=1e-5)
    merge(plan_merge(tmp_path / "base", adapter, tmp_path / "same"))
    rounded = hf(tmp_path / "same").state_dict()
    for name, tensor in hf(tmp_path / "wide").state_dict().items():
        assert torch.equal(rounded[name], tensor.bfloat16().float()), name


@pytest.mark.mcore_matrix
def test_the_same_as_the_attached_adapter(checkpoint: Path, tmp_path: Path) -> None:
    """The logits of a Megatron model with the adapter attached are those of the merged base without one."""
    from lora_plugins_sdk.hosts.initialize import initialize_megatron
    from lora_plugins_sdk.run import RunFacts

    run, plugin, config = initialize_megatron(RunFacts()), load_plugin("qwen3"), read_hf_config(checkpoint)
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    lora = LoraConfig(rank=3, alpha=5.0, target_modules=("all-linear", "embed_tokens", "lm_head"))

    def model(directory: Path) -> Any:
        built = plugin.build_model(config, run, torch.float32)
        load_base_weights(built, plugin, directory, run)
        return built.eval()

    adapted = model(checkpoint)
    adapter = attach(adapted, plugin, config, lora, run)
    torch.manual_seed(4)
    for parameter in adapter.parameters():
        parameter.data.normal_(std=0.2)
    write_adapter(export_adapter(adapted), tmp_path / "adapter")
    merge(plan_merge(checkpoint, tmp_path / "adapter", tmp_path / "merged"))
    with torch.no_grad():
        expected = adapted(TOKENS, positions, None)
        assert (expected - model(checkpoint)(TOKENS, positions, None)).abs().max() > 0.5
        torch.testing.assert_close(model(tmp_path / "merged")(TOKENS, positions, None), expected, rtol=1e-4, atol=1e-5)
