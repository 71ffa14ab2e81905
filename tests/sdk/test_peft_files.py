"""Adapter directories: what is written, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_plugins_sdk import LoraError, PeftAdapter, read_adapter, write_adapter

ADAPTER = PeftAdapter(
    tensors={"b": torch.arange(6.0).view(2, 3), "a": torch.ones(1, dtype=torch.bfloat16)},
    config={"r": 2, "peft_type": "LORA"},
)


def test_write_and_read(tmp_path: Path) -> None:
    directory = write_adapter(ADAPTER, tmp_path / "runs" / "adapter")
    assert sorted(path.name for path in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    back = read_adapter(directory)
    assert back.config == ADAPTER.config
    assert back.tensors.keys() == ADAPTER.tensors.keys()
    for name, tensor in ADAPTER.tensors.items():
        assert back.tensors[name].dtype == tensor.dtype and torch.equal(back.tensors[name], tensor)


def test_views_and_transposes_are_written_as_their_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    write_adapter(PeftAdapter(tensors={"t": base.t(), "first": base[0]}, config={}), tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(written["t"], base.t()) and torch.equal(written["first"], base[0])


def test_writing_again_replaces_both_files(tmp_path: Path) -> None:
    write_adapter(ADAPTER, tmp_path)
    write_adapter(PeftAdapter(tensors={"x": torch.zeros(2)}, config={"r": 9}), tmp_path)
    assert set(read_adapter(tmp_path).tensors) == {"x"} and read_adapter(tmp_path).config == {"r": 9}


def test_num_bytes() -> None:
    assert ADAPTER.num_bytes == 6 * 4 + 2


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(LoraError, match=r"taken.*cannot be written"):
        write_adapter(ADAPTER, tmp_path / "taken")


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_adapter(ADAPTER, tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(LoraError, match=f"has no {missing}"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", "{", "is not JSON"),
        ("adapter_config.json", json.dumps([1]), "no JSON object"),
        ("adapter_model.safetensors", "nonsense", "is not a safetensors file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    write_adapter(ADAPTER, tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(LoraError, match=f"{file}.*{message}"):
        read_adapter(tmp_path)
