"""The policy of a Qwen3-MoE whose experts share outer factors, on the real SGLang: merged weights, and the adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import moe_models
import pytest
import sync_engines
import torch
from own_process import OwnProcess
from sync_engines import LORA_ARGUMENTS, Asked, Engines

from lora_harness.engines.sglang.sync.adapter_mode import AdapterSync
from lora_harness.engines.sglang.sync.engine_weights import differences
from lora_harness.engines.sglang.sync.fold import Folder
from lora_harness.engines.sglang.sync.merge_mode import MergeSync
from lora_harness.engines.sglang.sync.package import Packer
from lora_harness.engines.sglang.sync.transport import MemoryTransport
from lora_plugins_sdk import PeftAdapter, write_adapter
from lora_plugins_sdk.offline.merge import merge, plan_merge
from lora_plugins_sdk.testing.conformance.problem import make_problem, peft_adapter
from lora_plugins_sdk.testing.conformance.subject import Subject

TOLERANCE = 1e-5
ALL = ("all-linear", "embed_tokens", "lm_head")
SETTINGS = replace(sync_engines.SETTINGS, shared_outer_experts=True)


@pytest.fixture(scope="module")
def model(reference: OwnProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    reference.run(moe_models.make_qwen3_moe, str(folder))
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path) -> PeftAdapter:
    """On all that SGLang serves, as the plugin writes it; both factors of every pair away from zero."""
    subject = Subject.of("qwen3_moe", hf_config=model, expert_sharing="outer")
    return peft_adapter(subject, make_problem(subject, target_modules=ALL).factors, target_modules=ALL)


@pytest.fixture(scope="module")
def merged(model: Path, adapter: PeftAdapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with the adapter merged offline, for transformers."""
    folder = tmp_path_factory.mktemp("merged")
    merge(plan_merge(model, write_adapter(adapter, folder / "adapter"), folder / "base"))
    return folder / "base"


def gap(answers: Asked, reference: OwnProcess, base: Path) -> float:
    return answers.gap(lambda sequences: reference.run(moe_models.qwen3_moe_logprobs, str(base), sequences, None))


def test_the_adapter_is_the_merged_checkpoint(
    reference: OwnProcess, model: Path, merged: Path, adapter: PeftAdapter, tmp_path: Path
) -> None:
    arguments = LORA_ARGUMENTS | {"experts_shared_outer_loras": True}
    with Engines(model, tmp_path, **arguments) as engines:
        sync = AdapterSync(engines.group, Packer(model, SETTINGS), SETTINGS, MemoryTransport(512))
        sync.publish(1, adapter.tensors, adapter.config)
        answers = Asked(engines, sync, "adapter")
        assert answers.version == 1
        assert gap(answers, reference, merged) <= TOLERANCE
        assert gap(answers, reference, model) > 0.1


def test_merged_weights_are_the_merged_checkpoint_and_zeros_give_the_base_back(
    reference: OwnProcess, model: Path, merged: Path, adapter: PeftAdapter, tmp_path: Path
) -> None:
    """All checksums are compared."""
    with Engines(model, tmp_path) as engines:
        client = engines.group.clients[0]
        sync = MergeSync(engines.group, Folder(model, 512), dtype=torch.float32, buffer_mib=512)
        pristine = dict(client.weight_checksums())
        assert gap(Asked(engines, sync, "base"), reference, model) <= TOLERANCE
        sync.publish(1, adapter.tensors, adapter.config)
        answers = Asked(engines, sync, "merged")
        assert answers.version == 1
        assert gap(answers, reference, merged) <= TOLERANCE
        assert gap(answers, reference, model) > 0.1
        sync.publish(2, {name: torch.zeros_like(one) for name, one in adapter.tensors.items()}, adapter.config)
        assert not differences(pristine, client.weight_checksums())
