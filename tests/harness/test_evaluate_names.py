"""An adapter in its model's official schema is evaluated as the same one under HF's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_local_experts import random_adapter
from tiny_model import VOCAB, write_tiny_inkling

from lora_harness.config import parse_config
from lora_harness.evaluate import load_policy
from lora_plugins_sdk import LoraError, load_plugin, module_names, read_hf_config, write_adapter
from lora_plugins_sdk.adapter_meta import AdapterOrigin


def test_an_export_for_an_engine_is_refused_in_one_line(tmp_path: Path) -> None:
    base = write_tiny_inkling(tmp_path / "base")
    served = replace(random_adapter(base, "outer", 0), origin=AdapterOrigin(engine="sglang"))
    write_adapter(served, tmp_path / "served")
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    config = parse_config(
        {"model": {"path": str(base), "dtype": "float32"}, "task": task, "steps": 1, "lora": {"rank": 4}}
    )
    with pytest.raises(LoraError, match=r"served: is an export for sglang.*turn it back") as error:
        load_policy(config, tmp_path / "served")
    assert len(error.value.diagnostics) == 1


def test_the_official_schema_gives_the_same_policy(tmp_path: Path) -> None:
    base = write_tiny_inkling(tmp_path / "base")
    architecture = load_plugin(architecture="inkling").architecture
    adapter = random_adapter(base, "outer", 0)
    (schema,) = architecture.adapter_schemas
    write_adapter(adapter, tmp_path / "hf")
    write_adapter(schema.write(adapter, module_names(architecture, read_hf_config(base))), tmp_path / "official")
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    config = parse_config(
        {"model": {"path": str(base), "dtype": "float32"}, "task": task, "steps": 1, "lora": {"rank": 4}}
    )
    ids = torch.arange(3, 20)[None] % VOCAB
    with torch.no_grad():
        bare, hf, official = (
            load_policy(config, one)(input_ids=ids).logits for one in (None, tmp_path / "hf", tmp_path / "official")
        )
    assert torch.equal(hf, official)
    assert (hf - bare).abs().max() > 0.1
