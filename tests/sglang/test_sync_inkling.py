"""The policy of an Inkling on the real SGLang: adapters on all that it has targets for, and merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import inkling_models
import pytest
import raw_engine
import torch
from own_process import OwnProcess
from safetensors.torch import load_file
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
LONG = [(7 * step + 3) % 300 for step in range(90)]
# The third goes on from the second's states, as far as the prefix cache has them.
PROMPTS = ([5, 17, 3, 99, 250], LONG, [*LONG[:70], 8, 8], [7])
Truth = Callable[[list[list[int]]], list[list[float]]]


@pytest.fixture(scope="module")
def model(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inkling")
    reference.run(inkling_models.make_inkling, str(folder))
    return folder


def policy(reference: OwnProcess, folder: Path, layout: str, without: Sequence[str] = ()) -> PeftAdapter:
    """An adapter in HF's names, as a trainer exports it."""
    reference.run(inkling_models.save_policy, str(folder), layout, without)
    config = json.loads((folder / "adapter_config.json").read_text())
    return PeftAdapter(tensors=load_file(folder / "adapter_model.safetensors"), config=config)


def truth(reference: OwnProcess, model: Path, layout: str | None, without: Sequence[str] = ()) -> Truth:
    """What transformers says of sequences."""
    return lambda sequences: reference.run(
        inkling_models.inkling_logprobs, str(model), sequences, layout, "hf", without
    )


@pytest.mark.parametrize(
    ("layout", "without"), [("shared_outer", ()), ("per_expert", ("k_proj", "embed_tokens", "lm_head"))]
)
def test_an_adapter_on_every_target(
    reference: OwnProcess, model: Path, tmp_path: Path, layout: str, without: tuple[str, ...]
) -> None:
    """B24, B28, B30: q, k, v and r together, zeros for one that is missing; shared experts in either layout; the head
    without the rows of its padding, the embedding without its columns."""
    adapter = policy(reference, tmp_path / "adapter", layout, without)
    settings = LoraSettings(
        targets=frozenset(inkling_models.TARGETS) - set(without),
        max_rank=8,
        slots=3,
        shared_outer_experts=layout == "shared_outer",
    )
    arguments = {**LORA_ARGUMENTS, **raw_engine.INKLING_ARGUMENTS, "lora_target_modules": sorted(settings.targets)}
    arguments["experts_shared_outer_loras"] = settings.shared_outer_experts
    with Engines(model, tmp_path, **arguments) as engines:
        sync = AdapterSync(engines.group, Packer(model, settings), settings, MemoryTransport(512))
        assert Asked(engines, sync, "base", PROMPTS).gap(truth(reference, model, None)) <= TOLERANCE
        sync.publish(1, adapter.tensors, adapter.config)
        answers = Asked(engines, sync, "adapter", PROMPTS)
        assert answers.version == 1
        assert answers.gap(truth(reference, model, layout, without)) <= TOLERANCE
        assert answers.gap(truth(reference, model, None)) > 0.05
        if without:
            assert answers.gap(truth(reference, model, layout)) > 1e-3, "what was left out would have shown"


@pytest.mark.parametrize("module", ["mlp.gate", "self_attn.rel_logits_proj", "attn_sconv.conv1d"])
def test_what_is_no_target_is_refused_before_anything_is_sent(
    reference: OwnProcess, model: Path, tmp_path: Path, module: str
) -> None:
    """B26: the engine would say success and end at the first request, or leave the factors out."""
    adapter = policy(reference, tmp_path / "adapter", "shared_outer")
    settings = LoraSettings(targets=frozenset(inkling_models.TARGETS), max_rank=8, slots=3, shared_outer_experts=True)
    extra = {f"base_model.model.model.layers.1.{module}.lora_{one}.weight": torch.ones(4, 4) for one in "AB"}
    with pytest.raises(LoraError, match=rf"{module}.*SGLang serves no LoRA there"):
        Packer(model, settings).pack(1, {**adapter.tensors, **extra}, adapter.config)


def test_merged_weights_have_every_linear_and_zeros_give_the_base_back(
    reference: OwnProcess, model: Path, tmp_path: Path
) -> None:
    """B29, B31: gate and up in turn, four linears in one, shared experts side by side; all checksums are compared."""
    adapter = policy(reference, tmp_path / "adapter", "shared_outer")
    with Engines(model, tmp_path, **raw_engine.INKLING_ARGUMENTS) as engines:
        client = engines.group.clients[0]
        sync = MergeSync(engines.group, Folder(model, 512), dtype=torch.float32, buffer_mib=512)
        pristine = dict(client.weight_checksums())
        assert Asked(engines, sync, "base", PROMPTS).gap(truth(reference, model, None)) <= TOLERANCE
        sync.publish(1, adapter.tensors, adapter.config)
        merged = Asked(engines, sync, "merged", PROMPTS)
        assert merged.version == 1
        changed = {name.split("layers.", 1)[-1] for name in differences(pristine, client.weight_checksums())}
        assert changed >= {
            *(f"0.{leaf}.weight" for leaf in ("attn.qkvr", "attn.wo_ud", "mlp.gate_up_proj", "mlp.down_proj")),
            *(f"2.mlp.{bank}.{leaf}_weight" for bank in ("experts", "shared_experts") for leaf in ("w13", "w2")),
            "2.mlp.shared_experts._w2_lin",
            "llm.embed_tokens.weight",
            "llm.lm_head.weight",
        }
        assert merged.gap(truth(reference, model, "shared_outer")) <= TOLERANCE
        assert merged.gap(truth(reference, model, None)) > 0.05
        sync.publish(2, {name: torch.zeros_like(one) for name, one in adapter.tensors.items()}, adapter.config)
        assert not differences(pristine, client.weight_checksums())
