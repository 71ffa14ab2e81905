"""The policy of a Qwen3.5-MoE hybrid on the real SGLang: merged weights with everything in them, and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hybrid_models
import pytest
import raw_engine
import torch
from own_process import OwnProcess
from safetensors.torch import load_file, save_file
from sync_engines import LORA_ARGUMENTS, Asked, Engines

from lora_harness.engines.sglang.sync.adapter_mode import AdapterSync
from lora_harness.engines.sglang.sync.engine_weights import differences
from lora_harness.engines.sglang.sync.fold import Folder
from lora_harness.engines.sglang.sync.merge_mode import MergeSync
from lora_harness.engines.sglang.sync.package import LoraSettings, Packer
from lora_harness.engines.sglang.sync.transport import MemoryTransport
from lora_plugins_sdk import LoraError, PeftAdapter

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
MAKERS = {"text": hybrid_models.make_hybrid, "multimodal": hybrid_models.make_multimodal_hybrid}


def make(reference: OwnProcess, folder: Path, kind: str) -> Path:
    """A hybrid's directory; a multimodal one has its experts fused, as Qwen publishes them."""
    folder.mkdir()
    reference.run(MAKERS[kind], str(folder))
    if kind == "multimodal":
        fuse_experts(folder / "model.safetensors")
    return folder


def fuse_experts(file: Path) -> None:
    tensors = load_file(file)
    for block in {name.split("experts.")[0] + "experts" for name in tensors if ".experts." in name}:
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{block}.{expert}.{leaf}_proj.weight") for expert in range(8)])
            for leaf in ("gate", "up", "down")
        )
        tensors |= {f"{block}.gate_up_proj": torch.cat([gates, ups], dim=1), f"{block}.down_proj": downs}
    save_file(tensors, file, metadata={"format": "pt"})


def policy(reference: OwnProcess, model: Path, folder: Path, layout: str, gates: str) -> PeftAdapter:
    reference.run(hybrid_models.save_policy, str(model), str(folder), layout, gates)
    config = json.loads((folder / "adapter_config.json").read_text())
    return PeftAdapter(tensors=load_file(folder / "adapter_model.safetensors"), config=config)


Truth = Callable[[list[list[int]]], list[list[float]]]


def truth(reference: OwnProcess, model: Path, layout: str | None, gates: str = "") -> Truth:
    """What transformers says of sequences."""
    return lambda sequences: reference.run(hybrid_models.hybrid_logprobs, str(model), sequences, layout, gates)


@pytest.mark.parametrize(("kind", "layout"), [("text", "per_expert"), ("multimodal", "shared_outer")])
def test_merged_weights_have_every_linear_and_zeros_give_the_base_back(
    reference: OwnProcess, tmp_path: Path, kind: str, layout: str
) -> None:
    """B29, B31: gated queries, both gates of the delta nets, routed and shared experts, embedding and head; all
    checksums are compared."""
    model = make(reference, tmp_path / "model", kind)
    adapter = policy(reference, model, tmp_path / "adapter", layout, "trained")
    with Engines(model, tmp_path, **raw_engine.HYBRID_ARGUMENTS, enable_multimodal=False) as engines:
        client = engines.group.clients[0]
        sync = MergeSync(engines.group, Folder(model, 512), dtype=torch.float32, buffer_mib=512)
        pristine = dict(client.weight_checksums())
        assert Asked(engines, sync, "base").gap(truth(reference, model, None)) <= TOLERANCE
        sync.publish(1, adapter.tensors, adapter.config)
        merged = Asked(engines, sync, "merged")
        assert merged.version == 1
        changed = {name.split("layers.", 1)[-1] for name in differences(pristine, client.weight_checksums())}
        assert changed >= {
            *(f"0.linear_attn.{leaf}.weight" for leaf in ("in_proj_qkvz", "in_proj_ba", "out_proj")),
            *(f"1.{leaf}" for leaf in ("qkv_proj.weight", "mlp.experts.w13_weight", "mlp.experts.w2_weight")),
            *("model.embed_tokens.weight", "lm_head.weight"),
        }
        assert merged.gap(truth(reference, model, layout, "trained")) <= TOLERANCE
        assert merged.gap(truth(reference, model, None)) > 0.1
        assert merged.gap(truth(reference, model, layout, "pinned")) > 0.001, (
            "the gates of the delta nets are not in it"
        )
        sync.publish(2, {name: torch.zeros_like(one) for name, one in adapter.tensors.items()}, adapter.config)
        assert not differences(pristine, client.weight_checksums())


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_an_adapter_on_all_that_is_served_with_pinned_gates(reference: OwnProcess, tmp_path: Path, layout: str) -> None:
    """B24, B26, B27, B30, B36: HF's in_proj_qkv is split as SGLang has it, experts have the layout that it was started
    for; gates at zero are left out, and trained ones refused."""
    model = make(reference, tmp_path / "model", "text")
    adapter = policy(reference, model, tmp_path / "pinned", layout, "pinned")
    trained = policy(reference, model, tmp_path / "trained", layout, "trained")
    settings = LoraSettings(
        targets=frozenset(hybrid_models.TARGETS), max_rank=8, slots=3, shared_outer_experts=layout == "shared_outer"
    )
    arguments = {**LORA_ARGUMENTS, **raw_engine.HYBRID_ARGUMENTS, "lora_target_modules": sorted(settings.targets)}
    arguments["experts_shared_outer_loras"] = settings.shared_outer_experts
    with Engines(model, tmp_path, **arguments, enable_multimodal=False) as engines:
        sync = AdapterSync(engines.group, Packer(model, settings), settings, MemoryTransport(512))
        sync.publish(1, adapter.tensors, adapter.config)
        with pytest.raises(LoraError, match=r"linear_attn\.in_proj_a.*SGLang serves no LoRA there"):
            sync.publish(2, trained.tensors, trained.config)
        answers = Asked(engines, sync, "adapter")
        assert answers.version == 1
        assert answers.gap(truth(reference, model, layout, "pinned")) <= TOLERANCE
        assert answers.gap(truth(reference, model, None)) > 0.1
