"""Adapter directories: what is written, what is refused."""

import json
import os
import resource
import shutil
import tempfile
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
    names = ["adapter_config.json", "adapter_meta.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in directory.iterdir()) == names and os.listdir(tmp_path / "runs") == ["adapter"]
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


def test_an_adapter_is_replaced_whole_and_only_when_asked(tmp_path: Path) -> None:
    directory, other = tmp_path / "adapter", PeftAdapter(tensors={"x": torch.zeros(2)}, config={"r": 9})
    write_adapter(ADAPTER, directory, max_shard_bytes=8)
    with pytest.raises(LoraError, match="exists already"):
        write_adapter(other, directory)
    assert read_adapter(directory).config == ADAPTER.config
    write_adapter(other, directory, replace=True)
    assert set(read_adapter(directory).tensors) == {"x"} and read_adapter(directory).config == {"r": 9}
    assert os.listdir(tmp_path) == ["adapter"] and len(os.listdir(directory)) == 3


def test_what_is_no_adapter_is_not_replaced(tmp_path: Path) -> None:
    """Replacing is of the whole directory: a home directory must not go that way."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LoraError, match=r"holds notes\.txt, which is no adapter's"):
        write_adapter(ADAPTER, tmp_path, replace=True)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_an_adapter_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    directory = write_adapter(ADAPTER, tmp_path / "adapter")
    with pytest.raises(TypeError):
        write_adapter(PeftAdapter(tensors=ADAPTER.tensors, config={"r": {1}}), directory, replace=True)
    assert read_adapter(directory).config == ADAPTER.config and os.listdir(tmp_path) == ["adapter"]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_process_that_died_while_replacing(tmp_path: Path, replaced: bool) -> None:
    """Between its two renames there are the old adapter and the new one, each whole, under hidden names."""
    directory = write_adapter(ADAPTER, tmp_path / "adapter")
    directory.rename(tmp_path / ".adapter.replaced")
    new = PeftAdapter(tensors={"x": torch.zeros(2)}, config={"r": 9 if replaced else {9}})
    if replaced:
        write_adapter(new, directory, replace=True)
    else:
        with pytest.raises(TypeError):
            write_adapter(new, directory, replace=True)
    assert read_adapter(directory).config == (new.config if replaced else ADAPTER.config)
    assert os.listdir(tmp_path) == ["adapter"]


def test_num_bytes() -> None:
    assert ADAPTER.num_bytes == 6 * 4 + 2


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(LoraError, match=r"taken.*exists already"):
        write_adapter(ADAPTER, tmp_path / "taken")
    with pytest.raises(LoraError, match=r"within.*cannot be written"):
        write_adapter(ADAPTER, tmp_path / "taken" / "within")


def test_a_read_only_directory_and_a_full_disk_leave_what_was_there() -> None:
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    try:
        directory = write_adapter(ADAPTER, folder / "adapter")
        before = {path.name: path.read_bytes() for path in directory.iterdir()}
        folder.chmod(0o555)
        if root:  # to whom no directory is read-only
            os.seteuid(65534)
        try:
            for output in (directory, folder / "other"):
                with pytest.raises(LoraError, match=r"cannot be written \(Permission denied\)"):
                    write_adapter(ADAPTER, output, replace=True)
        finally:
            if root:
                os.seteuid(0)
        folder.chmod(0o755)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        for size in (0, 100, 300):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
            try:
                with pytest.raises(LoraError, match="cannot be written"):
                    write_adapter(ADAPTER, directory, replace=True)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert os.listdir(folder) == ["adapter"]
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    finally:
        shutil.rmtree(folder)


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
