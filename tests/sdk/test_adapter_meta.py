"""`adapter_meta.json`: what it records, and that an adapter which contradicts it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from sdk_toy_host import toy_model, toy_plugin

from lora_plugins_sdk import (
    LoraConfig,
    LoraError,
    PeftAdapter,
    adapter_of,
    attach,
    export_adapter,
    read_adapter,
    write_adapter,
)
from lora_plugins_sdk.adapter_meta import META_FILE, AdapterOrigin, read_meta, stored_file

ORIGIN = AdapterOrigin(plugin="toy", plugin_version="1.2", table="a" * 64, base_fingerprint="b" * 64, step=3)
ADAPTER = PeftAdapter(
    tensors={"b": torch.arange(6.0).view(2, 3), "a": torch.ones(1)},
    config={"r": 2, "lora_alpha": 4, "peft_type": "LORA"},
    origin=ORIGIN,
)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_adapter(ADAPTER, tmp_path / "adapter")


def test_it_says_who_made_what(directory: Path) -> None:
    meta = read_meta(directory)
    assert meta is not None and meta.origin == ORIGIN
    assert dict(meta.files) == {WEIGHTS: stored_file(directory / WEIGHTS)}
    assert meta.lora == {"r": 2, "lora_alpha": 4, "use_rslora": False}
    assert meta.versions == {name: version(name) for name in ("lora-plugins-sdk", "torch")}
    assert read_adapter(directory).origin == ORIGIN


def test_an_export_knows_its_plugin_and_table() -> None:
    model = toy_model()
    attach(model, toy_plugin(), HF_CONFIG, LoraConfig(rank=2))
    origin = export_adapter(model).origin
    assert origin is not None and origin.plugin == adapter_of(model).plugin.name
    assert origin.table == adapter_of(model).table.logical_digest()


def test_the_same_adapter_gives_the_same_bytes(tmp_path: Path) -> None:
    """Whatever the order of its tensors, and wherever their memory is."""
    other = replace(ADAPTER, tensors={name: one.clone() for name, one in reversed(list(ADAPTER.tensors.items()))})
    for adapter, name in ((ADAPTER, "one"), (other, "other")):
        for size in (None, 8):
            write_adapter(adapter, tmp_path / f"{name}-{size}", max_shard_bytes=size)
    for size in (None, 8):
        one, other_ = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{name}-{size}").iterdir()}
            for name in ("one", "other")
        )
        assert one == other_ and len(one) == (3 if size is None else 5)


def test_an_adapter_without_it_is_as_good(directory: Path) -> None:
    (directory / META_FILE).unlink()
    assert read_adapter(directory).origin is None


def test_a_changed_tensor_file_is_refused(directory: Path) -> None:
    content = bytearray((directory / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (directory / WEIGHTS).write_bytes(content)
    with pytest.raises(LoraError, match=rf"{WEIGHTS}: differs from what was exported.*remove adapter_meta\.json"):
        read_adapter(directory)
    (directory / META_FILE).unlink()
    assert read_adapter(directory).tensors.keys() == {"a", "b"}


@pytest.mark.parametrize(("key", "value"), [("r", 4), ("lora_alpha", 8), ("use_rslora", True)])
def test_a_changed_scale_is_refused(directory: Path, key: str, value: Any) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(LoraError, match=f"{key}={value!r} in adapter_config.json: it was exported with"):
        read_adapter(directory)


def test_what_does_not_scale_may_be_changed(directory: Path) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    moved = config | {"base_model_name_or_path": "elsewhere", "lora_alpha": 4.0}
    (directory / "adapter_config.json").write_text(json.dumps(moved))
    assert read_adapter(directory).config == moved


def test_files_that_come_and_go_are_named(tmp_path: Path) -> None:
    directory = write_adapter(ADAPTER, tmp_path / "adapter", max_shard_bytes=8)
    meta = json.loads((directory / META_FILE).read_text())
    gone = dict(meta["files"])
    gone["../../secret"] = gone.pop("adapter_model-00001-of-00002.safetensors")
    (directory / META_FILE).write_text(json.dumps(meta | {"files": gone}))
    with pytest.raises(LoraError) as error:
        read_adapter(directory)
    found = {one.subject: one.reason for one in error.value.diagnostics}
    assert found == {
        "../../secret": "is missing from the adapter",
        "adapter_model-00001-of-00002.safetensors": "was not there when the adapter was exported",
    }


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "its format is 2, this version reads 1"),
        ("format", True, "its format is True"),
        ("origin", None, "no table origin"),
        ("origin.colour", "red", "unknown key 'colour'"),
        ("origin.step", -1, "origin.step is"),
        ("origin.step", True, "origin.step is"),
        ("origin.base_fingerprint", "abc", "origin.base_fingerprint is"),
        ("origin.plugin", ["toy"], "origin.plugin is"),
        ("files", [], "no table files"),
        ("files.adapter_model|safetensors", None, "says not what"),
        ("files.adapter_model|safetensors.size", "9", "says not what"),
        ("lora", 3, "no table lora"),
        ("versions", 3, "no table versions"),
    ],
)
def test_another_form_is_refused(directory: Path, path: str, value: Any, message: str) -> None:
    meta = json.loads((directory / META_FILE).read_text())
    *parents, last = (part.replace("|", ".") for part in path.split("."))
    table = meta
    for name in parents:
        table = table[name]
    table[last] = value
    (directory / META_FILE).write_text(json.dumps(meta))
    with pytest.raises(LoraError, match=message) as error:
        read_adapter(directory)
    assert "remove adapter_meta.json" in str(error.value)
