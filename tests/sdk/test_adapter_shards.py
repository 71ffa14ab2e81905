"""Adapters in several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lora_plugins_sdk import LoraError, PeftAdapter, read_adapter, write_adapter
from lora_plugins_sdk.adapter_files import INDEX_FILE, adapter_digest, adapter_directory, adapter_weights

ADAPTER = PeftAdapter(
    tensors={name: torch.full((2, 3), float(n)) for n, name in enumerate("edcba")}, config={"r": 2, "lora_alpha": 4}
)
FIRST = "adapter_model-00001-of-00003.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Five tensors of 24 bytes, two in a file."""
    return write_adapter(ADAPTER, tmp_path / "adapter", max_shard_bytes=50)


def test_it_comes_back(directory: Path) -> None:
    files = adapter_weights(directory)
    assert [len(header.tensors) for _, header in sorted(files.headers.items())] == [2, 2, 1]
    found = read_adapter(directory).tensors
    assert found.keys() == ADAPTER.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in ADAPTER.tensors.items())
    index = json.loads((directory / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": ADAPTER.num_bytes} and index["weight_map"]["a"] == FIRST


@pytest.mark.parametrize(("size", "files"), [(None, 1), (5 * 24, 1), (5 * 24 - 1, 2), (24, 5), (1, 5)])
def test_no_file_holds_more_than_it_may_unless_one_tensor_does(tmp_path: Path, size: int | None, files: int) -> None:
    directory = write_adapter(ADAPTER, tmp_path / "adapter", max_shard_bytes=size)
    assert len(adapter_weights(directory).headers) == files
    assert (directory / INDEX_FILE).exists() == (files > 1)


def test_a_shard_of_another_export_is_not_left_beside(directory: Path) -> None:
    (directory / "adapter_model-00004-of-00004.safetensors").write_bytes((directory / FIRST).read_bytes())
    with pytest.raises(LoraError, match=r"00004-of-00004\.safetensors: is not named by adapter_model"):
        read_adapter(directory)


def test_one_file_beside_several(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes((directory / FIRST).read_bytes())
    with pytest.raises(LoraError, match=r"adapter_model\.safetensors: is not named by"):
        read_adapter(directory)
    (directory / INDEX_FILE).unlink()
    with pytest.raises(LoraError, match=r"is beside adapter_model\.safetensors, without an index"):
        read_adapter(directory)


@pytest.mark.parametrize("way", ["../elsewhere/{}", "{place}/{}", "./{}", "sub/../{}", "absent"])
def test_an_index_leads_nowhere_else(directory: Path, way: str) -> None:
    elsewhere = directory.parent / "elsewhere"
    write_adapter(ADAPTER, elsewhere, max_shard_bytes=50)
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] = {name: way.format(file, place=elsewhere) for name, file in index["weight_map"].items()}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(LoraError, match=r"names '.*', which is not in the directory"):
        read_adapter(directory)


def test_a_lost_shard_is_named(directory: Path) -> None:
    (directory / FIRST).unlink()
    with pytest.raises(LoraError, match=f"names '{FIRST}', which is not in the directory"):
        read_adapter(directory)


def test_a_digest_is_of_the_tensors(directory: Path, tmp_path: Path) -> None:
    same = write_adapter(ADAPTER, tmp_path / "same", max_shard_bytes=50)
    (same / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4, "base_model_name_or_path": "moved"}')
    assert adapter_digest(same) == adapter_digest(directory)
    other = PeftAdapter(tensors={**ADAPTER.tensors, "a": torch.zeros(2, 3)}, config=ADAPTER.config)
    assert adapter_digest(write_adapter(other, tmp_path / "other", max_shard_bytes=50)) != adapter_digest(directory)


def test_a_checkpoint_means_its_adapter(tmp_path: Path) -> None:
    directory = write_adapter(ADAPTER, tmp_path / "step-000003" / "adapter")
    assert adapter_directory(directory) == adapter_directory(tmp_path / "step-000003") == directory
    with pytest.raises(LoraError, match=r"has no adapter_config\.json.*a checkpoint"):
        adapter_directory(tmp_path)
