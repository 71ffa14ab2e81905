"""What lies beside the weights: copied, left out with a word, or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from offline_files import LAYERS, base_tensors, fingerprint, make_adapter, make_base
from safetensors.torch import save_file

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.offline.merge import MergePlan, merge, plan_merge


def plan(place: Path) -> MergePlan:
    return plan_merge(place / "base", make_adapter(place / "adapter"), place / "merged")


@pytest.mark.parametrize("shards", [1, 3])
def test_every_other_file_is_copied_as_it_is(tmp_path: Path, shards: int) -> None:
    base = make_base(tmp_path / "base", shards=shards)
    (base / "tokenizer.json").chmod(0o440)
    (base / "training_args.bin").write_bytes(b"arguments")
    merge(plan(tmp_path))
    before, after = fingerprint(base), fingerprint(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.endswith(".safetensors")}
    assert (tmp_path / "merged" / "tokenizer.json").stat().st_mode & 0o777 == 0o440
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_headers_and_metadata_stay(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    save_file(base_tensors(), base / "model.safetensors", metadata={"format": "pt", "maker": "me"})
    merge(plan(tmp_path))
    one, other = (path.read_bytes() for path in (base / "model.safetensors", tmp_path / "merged" / "model.safetensors"))
    end = 8 + int.from_bytes(one[:8], "little")
    assert one[:end] == other[:end] and b'"maker":"me"' in one[:end] and one != other


def test_weights_in_other_formats_are_left_out_with_a_word(tmp_path: Path) -> None:
    """They do not hold the adapter; a reader that prefers them would get the base."""
    base = make_base(tmp_path / "base", shards=2)
    (base / "original").mkdir()
    (base / ".git").mkdir()
    for name in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        ".git/HEAD",
        "m.gguf",
    ):
        (base / name).write_bytes(b"x")
    found = plan(tmp_path)
    assert set(found.others.left) == {
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "m.gguf",
        ".git",
    }
    assert all(found.others.left.values())
    merge(found)
    assert not fingerprint(tmp_path / "merged").keys() & found.others.left.keys()


def test_links_out_of_the_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (base / "README.md").symlink_to(tmp_path / "secret")
    (base / "more").symlink_to(tmp_path / "elsewhere")
    (base / "gone.json").symlink_to(tmp_path / "nowhere")
    (base / "loop.json").symlink_to(base / "loop.json")
    (base / "long.json").symlink_to("x" * 300)
    os.mkfifo(base / "pipe")
    before = fingerprint(tmp_path / "elsewhere"), sorted(os.listdir(tmp_path))
    with pytest.raises(LoraError) as error:
        plan(tmp_path)
    named = {Path(one.subject).name for one in error.value.diagnostics}
    assert named == {"README.md", "more", "gone.json", "loop.json", "long.json", "pipe"}
    assert (fingerprint(tmp_path / "elsewhere"), sorted([*before[1], "adapter"])) == (
        before[0],
        sorted(os.listdir(tmp_path)),
    )


def test_weights_that_are_links_out_of_the_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (base / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (base / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(LoraError, match=r"model\.safetensors: is a symbolic link"):
        plan(tmp_path)


def test_a_snapshot_of_a_hugging_face_cache_is_read_through_its_links(tmp_path: Path) -> None:
    real = make_base(tmp_path / "real", shards=2)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(path for path in sorted(real.iterdir()) if path.is_file()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    (tmp_path / "base").symlink_to(snapshot)
    assert merge(plan(tmp_path)).folds == 3 * LAYERS + 1
    assert not any(path.is_symlink() for path in (tmp_path / "merged").iterdir())
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {path.name for path in snapshot.iterdir()}


def test_a_link_within_the_base_becomes_a_file(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    (base / "same.json").symlink_to("tokenizer.json")
    merge(plan(tmp_path))
    copied = tmp_path / "merged" / "same.json"
    assert not copied.is_symlink() and copied.read_text() == (base / "tokenizer.json").read_text()


def test_a_read_only_config_is_rewritten_with_the_dtype(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", shards=2)
    (base / "config.json").chmod(0o400)
    (base / "model.safetensors.index.json").chmod(0o400)
    adapter = make_adapter(tmp_path / "adapter")
    merge(plan_merge(base, adapter, tmp_path / "merged", "bfloat16"))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tensors_without_elements_and_odd_dtypes_pass_through(tmp_path: Path) -> None:
    odd = {
        "model.none": torch.zeros(0, 4),
        "model.flag": torch.tensor([True]),
        "model.f8": torch.zeros(3).to(torch.float8_e4m3fn),
    }
    base = make_base(tmp_path / "base", {**base_tensors(), **odd})
    merge(plan(tmp_path))
    one, other = (path.read_bytes() for path in (base / "model.safetensors", tmp_path / "merged" / "model.safetensors"))
    assert len(one) == len(other)
