"""Models with experts on the local engine, alone or within multimodal ones: an adapter on every target is the merged
model, whatever is decoded together."""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import VOCAB, write_tiny_hybrid, write_tiny_inkling, write_tiny_qwen3_moe

from lora_harness.engines import GenerationRequest, SamplingParams
from lora_harness.engines.local import LocalEngine
from lora_harness.engines.model_files import hf_traits, load_hf_model
from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    PeftAdapter,
    RunFacts,
    derive_table,
    load_plugin,
    read_hf_config,
    write_adapter,
)
from lora_plugins_sdk.offline.merge import merge, plan_merge


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inkling(tmp_path_factory.mktemp("inkling"))


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inkling(tmp_path_factory.mktemp("multimodal"), multimodal=True)


@pytest.fixture(scope="module")
def multimodal_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), multimodal=True)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_moe(tmp_path_factory.mktemp("qwen3_moe"))


def random_adapter(base: Path, sharing: str, seed: int) -> PeftAdapter:
    """Factors of every target, both of each pair away from zero, as a run exports them."""
    hf_config = read_hf_config(base)
    plugin = load_plugin(str(hf_config["model_type"]))
    lora = LoraConfig(rank=4, alpha=8, target_modules=("all-linear", "embed_tokens", "lm_head"), expert_sharing=sharing)  # type: ignore[arg-type]
    tensors = {}
    for row in derive_table(plugin, hf_config, lora, RunFacts()).rows:
        draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{row.init_key}".encode()))
        tensors |= plugin.export_tensor(row, 0.1 * torch.randn(row.full_shape, generator=draw))
    modules = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted(modules)}
    return PeftAdapter(tensors=tensors, config=config)


def requests() -> list[GenerationRequest]:
    """Prompts and completions of several lengths, so that rows are padded and leave the batch one by one."""
    return [
        GenerationRequest(
            prompt_ids=tuple(np.random.default_rng(one).integers(0, VOCAB, 1 + 5 * (one % 4)).tolist()),
            sampling=SamplingParams(max_new_tokens=4 + 6 * (one % 4), stop_token_ids=frozenset((5, 6, 7))),
            seed=one,
        )
        for one in range(17)
    ]


@pytest.mark.parametrize(
    ("kind", "sharing", "tolerance"),
    [
        ("base", "none", 1e-5),
        ("base", "outer", 1e-5),
        ("multimodal", "outer", 1e-5),
        ("qwen3_moe", "none", 1e-5),
        # Delta nets decode by another recurrence than they prefill by, which rounds differently.
        ("multimodal_hybrid", "none", 1e-4),
    ],
)
def test_the_engine_serves_the_merged_model(
    kind: str, sharing: str, tolerance: float, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """B31: stacks, fused experts, dense linears called as theirs and a padded head, all through real PEFT, and again
    with the next adapter."""
    base: Path = request.getfixturevalue(kind)
    engine = LocalEngine(base, traits=hf_traits(base, None), max_batch_size=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # PEFT's, of ranks that it would pass over
        for version in (1, 2):
            adapter = random_adapter(base, sharing, version)
            engine.publish(version, adapter.tensors, adapter.config)
    place = write_adapter(adapter, tmp_path / "adapter")
    merge(plan_merge(base, place, tmp_path / "merged"))
    merged, plain = load_hf_model(tmp_path / "merged"), load_hf_model(base)
    differences, effects = [], []
    asked = requests()
    for one, done in zip(asked, engine.generate(asked), strict=True):
        ids = torch.tensor([*one.prompt_ids, *done.token_ids])
        drawn = slice(len(one.prompt_ids) - 1, len(ids) - 1)
        with torch.no_grad():
            wanted, before = (
                torch.log_softmax(model(ids[None]).logits[0, drawn].double(), -1).gather(-1, ids[1:][drawn, None])
                for model in (merged, plain)
            )
        differences.append(float((torch.tensor(done.logprobs).double() - wanted[:, 0]).abs().max()))
        effects.append(float((before - wanted).abs().max()))
    assert max(differences) <= tolerance
    assert min(effects) > 100 * tolerance, "the adapter must matter"


def test_prompts_of_several_lengths_are_not_padded(base: Path) -> None:
    """transformers' Inkling counts padding as positions: log scaling would begin earlier in a padded row."""
    asked = requests()
    exact = hf_traits(base, None)
    assert not exact.left_padding
    engine = LocalEngine(base, traits=exact)
    together = engine.generate(asked)
    alone = [engine.generate([one])[0] for one in asked]
    worst = max(float(np.abs(np.subtract(a.logprobs, b.logprobs)).max()) for a, b in zip(together, alone, strict=True))
    assert worst <= 1e-5


def test_a_model_that_lacks_a_package_is_an_error_with_a_cure(
    multimodal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers plans a vision tower of few layers with scipy."""
    (tmp_path / "model.safetensors").write_bytes((multimodal / "model.safetensors").read_bytes())
    config = json.loads((multimodal / "config.json").read_text())
    config["vision_config"]["n_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("scipy", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LoraError, match=r"transformers cannot build this model: .*scipy.* -> install"):
        load_hf_model(tmp_path)
