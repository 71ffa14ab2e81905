"""An adapter in its model's official schema is evaluated as the same one under HF's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_local_experts import random_adapter
from tiny_model import VOCAB, write_tiny_inkling

from lora_harness.config import TrainConfig, parse_config
from lora_harness.evaluate import load_policy
from lora_plugins_sdk import LoraError, load_plugin, module_names, read_hf_config, write_adapter
from lora_plugins_sdk.adapter_meta import AdapterOrigin


def run_of(base: Path) -> TrainConfig:
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    return parse_config(
        {"model": {"path": str(base), "dtype": "float32"}, "task": task, "steps": 1, "lora": {"rank": 4}}
    )


def test_an_export_for_an_engine_is_refused_in_one_line(tmp_path: Path) -> None:
    base = write_tiny_inkling(tmp_path / "base")
    served = replace(random_adapter(base, "outer", 0), origin=AdapterOrigin(engine="sglang"))
    write_adapter(served, tmp_path / "served")
    config = run_of(base)
    with pytest.raises(LoraError, match=r"served: is an export for sglang.*turn it back") as error:
        load_policy(config, tmp_path / "served")
    assert len(error.value.diagnostics) == 1


def test_an_adapter_that_cannot_be_read_is_refused_before_the_base_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_tiny_inkling(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    loaded: list[Path] = []
    monkeypatch.setattr("lora_harness.evaluate.load_hf_model", lambda path, **_: loaded.append(path))
    with pytest.raises(LoraError, match=r"adapter_config\.json"):
        load_policy(run_of(base), tmp_path / "adapter")
    assert not loaded


def test_the_official_schema_gives_the_same_policy(tmp_path: Path) -> None:
    base = write_tiny_inkling(tmp_path / "base")
    architecture = load_plugin(architecture="inkling").architecture
    adapter = random_adapter(base, "outer", 0)
    (schema,) = architecture.adapter_schemas
    write_adapter(adapter, tmp_path / "hf")
    write_adapter(schema.write(adapter, module_names(architecture, read_hf_config(base))), tmp_path / "official")
    config = run_of(base)
    ids = torch.arange(3, 20)[None] % VOCAB
    with torch.no_grad():
        bare, hf, official = (
            load_policy(config, one)(input_ids=ids).logits for one in (None, tmp_path / "hf", tmp_path / "official")
        )
    assert torch.equal(hf, official)
    assert (hf - bare).abs().max() > 0.1
