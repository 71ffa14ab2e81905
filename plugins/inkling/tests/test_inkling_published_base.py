"""A base of transformers written as published: every reader gets the same model back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inkling_tiny import CONFIG, make_model, tokens
from safetensors.torch import save_file
from transformers import AutoModelForMultimodalLM

from lora_plugins_sdk import BaseCheckpoint, LoraError, load_plugin
from lora_plugins_sdk.hf_tensors import HfTensors
from lora_plugins_sdk.serving.sglang_config import unpublished_keys

# A published config counts the dense layers, which are the first ones.
LAYERS: dict[str, Any] = {**CONFIG, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
PLUGIN = load_plugin("inkling_text")


def published(model: Any) -> BaseCheckpoint:
    config = json.loads(model.config.to_json_string())
    return PLUGIN.published_base(BaseCheckpoint(config=config, tensors=model.state_dict()))


def test_transformers_and_the_trainer_read_the_same_model_and_sglang_finds_its_keys(tmp_path: Path) -> None:
    model = make_model(LAYERS)
    written = published(model)
    save_file({name: one.contiguous() for name, one in written.tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(written.config))

    loaded, report = AutoModelForMultimodalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.config.text_config.mlp_layer_types == LAYERS["mlp_layer_types"]
    assert sum(one.numel() for name, one in loaded.named_parameters() if "tower" in name) < 20_000
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens()).logits, model(tokens()).logits, rtol=0, atol=1e-5)

    assert unpublished_keys(written.config) == []
    dims, before = (PLUGIN.architecture.dims(config) for config in (written.config, LAYERS))
    for key in ("conv_kernel_size", "intermediate_size", "moe_intermediate_size", "max_position_embeddings"):
        assert dims.resolve(key) == before.resolve(key), key
    stored = PLUGIN.base_tensors(written.config, HfTensors(tmp_path))
    for name, tensor in model.state_dict().items():
        read = stored.part(name.replace("model.", "model.language_model.", 1), slice(None))
        assert torch.equal(read, tensor[: len(read)]), name


def test_a_dense_layer_after_a_sparse_one_is_refused() -> None:
    with pytest.raises(LoraError, match=r"mlp_layer_types .* has dense layers after a sparse one"):
        published(make_model())
