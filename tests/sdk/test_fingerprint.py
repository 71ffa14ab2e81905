"""The base's fingerprint: the same for the same weights however they are stored, another for any fine-tune."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_plugins_sdk import LoraError, base_fingerprint

CONFIG = {"model_type": "toy", "hidden_size": 4, "transformers_version": "5.0", "_name_or_path": "here"}


def write(directory: Path, *shards: dict[str, torch.Tensor], **config: object) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    for index, shard in enumerate(shards):
        save_file(shard, directory / f"model-{index}.safetensors")
    return base_fingerprint(directory)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(100, 300, generator=generator) for name in ("a", "b")}


def test_shards_and_the_writer_of_the_config_do_not_matter(tmp_path):
    a, b = ({name: tensor} for name, tensor in weights().items())
    one = write(tmp_path / "one", weights())
    assert write(tmp_path / "two", b, a, transformers_version="6", _name_or_path="there") == one and len(one) == 64


@pytest.mark.parametrize("row", [0, 49, 99])
def test_other_values_sizes_dtypes_names_and_configs_do(tmp_path, row):
    found = {write(tmp_path / "base", weights()), write(tmp_path / "config", weights(), hidden_size=8)}
    moved = weights()
    moved["b"][row] += 1e-6
    found.add(write(tmp_path / "moved", moved))
    found.add(write(tmp_path / "shape", {name: one.view(300, 100) for name, one in weights().items()}))
    found.add(write(tmp_path / "dtype", {name: one.view(torch.int32) for name, one in weights().items()}))
    found.add(write(tmp_path / "name", {f"model.{name}": one for name, one in weights().items()}))
    assert len(found) == 6


def test_a_directory_without_weights(tmp_path):
    with pytest.raises(LoraError, match=r"holds no \*\.safetensors"):
        write(tmp_path / "empty")
