"""What is refused before anything is sent to an engine, each with the tensor or setting by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import VOCAB, write_tiny_qwen3
from torch import Tensor

from lora_harness.engines.sglang.sync.fold import Folder
from lora_harness.engines.sglang.sync.package import LoraSettings, Packer
from lora_harness.engines.sglang.sync.transport import DirectoryTransport, MemoryTransport
from lora_plugins_sdk.errors import LoraError
from lora_plugins_sdk.peft_names import factor_name
from lora_plugins_sdk.weight_files import read_weight_files

RANK = 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(TARGETS)}
SETTINGS = LoraSettings(
    targets=frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"}),
    max_rank=8,
    slots=3,
)
LAYER, EMBEDDING = "base_model.model.model.layers.1", "base_model.model.model.embed_tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def tensors(model: Path) -> dict[str, Tensor]:
    base = read_weight_files(model)
    found: dict[str, Tensor] = {}
    for name in base.where:
        module = name.removesuffix(".weight")
        if (leaf := module.rsplit(".", 1)[-1]) in TARGETS:
            embedding = leaf == "embed_tokens"
            out, width = reversed(base.tensor(name).shape) if embedding else base.tensor(name).shape
            found[factor_name(module, "A", embedding=embedding)] = torch.randn(RANK, width)
            found[factor_name(module, "B", embedding=embedding)] = torch.randn(out, RANK)
    return found


def test_a_package_holds_every_tensor_with_its_checksum(model: Path, tensors: dict[str, Tensor]) -> None:
    """B24, B36: all 2 * (2 * 7 + 2) factors, under the names of the engine, in memory of their own."""
    package = Packer(model, SETTINGS).pack(1, tensors, CONFIG)
    assert package.name == "policy-v1" and len(package.tensors) == 32
    assert package.checksums.keys() == package.tensors.keys() == tensors.keys()
    assert set(package.config["target_modules"]) == SETTINGS.targets
    assert package.num_bytes == sum(one.numel() * 4 for one in tensors.values())
    for name, one in package.tensors.items():
        assert torch.equal(one, tensors[name])
        assert one.untyped_storage().data_ptr() != tensors[name].untyped_storage().data_ptr()


def _renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [one for one in tensors if old in one]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _value(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][0, 0] = value

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_renamed("layers.1.", "layers.7."), "the base has 2 layers"),
        (_renamed("layers.1.self_attn.q_proj", "layers.1.self_attn.query"), r"layers\.1\.self_attn\.query"),
        (_renamed("base_model.model.model.layers.1.", "base_model.model.decoder.layers.1."), "serves no LoRA there"),
        (_renamed("layers.1.mlp.down_proj", "layers.1.mlp.experts.0.down_proj"), r"experts\.0\.down_proj"),
        (lambda tensors: tensors.clear(), "there are none"),
        (lambda tensors: tensors.pop(f"{LAYER}.mlp.up_proj.lora_B.weight"), "has one factor of two"),
        (
            lambda tensors: tensors.update({f"{LAYER}.mlp.up_proj.lora_B.weight": torch.ones(47, RANK)}),
            r"has shape \[47, 4\], the engine copies it into \[48, 4\]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.mlp.up_proj.lora_A.weight": torch.ones(RANK, 31)}),
            r"has shape \[4, 31\], the engine copies it into \[4, 32\]",
        ),
        (
            lambda tensors: tensors.update({f"{EMBEDDING}.lora_embedding_A": torch.ones(RANK, VOCAB + 2)}),
            rf"embed_tokens: has {VOCAB + 2} columns of lora_embedding_A, and the base has {VOCAB} tokens",
        ),
        (_value(f"{LAYER}.mlp.up_proj.lora_A.weight", math.nan), "up_proj.lora_A.weight: holds NaN or infinite"),
        (_value("base_model.model.lm_head.lora_B.weight", math.inf), "lm_head.lora_B.weight: holds NaN or infinite"),
    ],
)
def test_tensors_that_the_engine_would_misuse(
    model: Path, tensors: dict[str, Tensor], change: Callable[[dict[str, Tensor]], object], expected: str
) -> None:
    """B24, B29, B36: names, shapes and values are checked against the engine's base before anything is sent."""
    change(tensors)
    with pytest.raises(LoraError, match=expected):
        Packer(model, SETTINGS).pack(1, tensors, CONFIG)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LoraSettings(targets=SETTINGS.targets, max_rank=2, slots=3), "r=4: the engines take ranks up to 2"),
        (LoraSettings(targets=SETTINGS.targets - {"o_proj"}, max_rank=8, slots=3), "o_proj: the engines were started"),
    ],
)
def test_what_the_engines_were_not_started_for(
    model: Path, tensors: dict[str, Tensor], settings: LoraSettings, expected: str
) -> None:
    """B41: a slot that the engine would not fill keeps what an earlier adapter left there."""
    with pytest.raises(LoraError, match=expected):
        Packer(model, settings).pack(1, tensors, CONFIG)


@pytest.mark.parametrize("leaf", ["embed_tokens", "lm_head"])
def test_one_of_embedding_and_head_where_the_engines_have_both(
    model: Path, tensors: dict[str, Tensor], leaf: str
) -> None:
    """B41: SGLang clears their slots together or not at all."""
    rest = {name: one for name, one in tensors.items() if leaf not in name}
    with pytest.raises(LoraError, match=f"{leaf}: the engines were started for it"):
        Packer(model, SETTINGS).pack(1, rest, CONFIG)


def test_a_version_that_lost_a_layer(model: Path, tensors: dict[str, Tensor]) -> None:
    """B36: the set of a run's tensors does not change; what the engine lacks would be served as zeros."""
    packer = Packer(model, SETTINGS)
    packer.pack(1, tensors, CONFIG)
    for name in [one for one in tensors if "layers.1.mlp.down_proj" in one]:
        del tensors[name]
    with pytest.raises(LoraError, match=r"down_proj\.lora_A\.weight: was in the version before and is missing now"):
        packer.pack(2, tensors, CONFIG)


def test_an_adapter_larger_than_the_buffer(model: Path, tensors: dict[str, Tensor]) -> None:
    package = Packer(model, SETTINGS).pack(1, tensors, CONFIG)
    MemoryTransport(1).check(package)
    with pytest.raises(LoraError, match="set sync_buffer_mib to 1 or more, or send adapters through a directory"):
        MemoryTransport(0).check(package)


def test_directories_appear_whole_and_go_away(model: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    """What a killed process left is removed by the next owner; two owners at a time are refused."""
    root = tmp_path / "policy"
    (root / ".policy-v1.partial").mkdir(parents=True)
    (root / "policy-v1").mkdir()
    transport = DirectoryTransport(root)
    package = Packer(model, SETTINGS).pack(1, tensors, CONFIG)
    transport.prepare(package)
    assert {one.name for one in root.iterdir()} == {".lock", "policy-v1"}
    with pytest.raises(LoraError, match="another process is writing it"):
        DirectoryTransport(root)
    transport.close()
    assert not list(root.glob("*policy*"))


def test_a_merge_larger_than_the_buffer(model: Path, tensors: dict[str, Tensor]) -> None:
    folded = Folder(model, 1).fold(1, tensors, CONFIG)
    assert len(folded.folds) == 16
    with pytest.raises(LoraError, match="and a bucket is 0 MiB at most"):
        Folder(model, 0).fold(1, tensors, CONFIG)


def test_a_base_that_changed_is_not_merged_into(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    """B35: the base of a merge is the one that the run began with."""
    model = write_tiny_qwen3(tmp_path / "model")
    folder = Folder(model, 1)
    write_tiny_qwen3(model, layers=3)
    with pytest.raises(LoraError, match="changed since the run began"):
        folder.fold(1, tensors, CONFIG)
