"""`lora-plugins merge`, `inspect` and `diff` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_files import (
    ALPHA,
    MODULES,
    PREFIX,
    RANK,
    TARGETS,
    adapter_tensors,
    base_tensors,
    fingerprint,
    make_adapter,
    make_base,
    slow_merge,
    weights,
)

Run = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_base(tmp_path / "base")
    make_adapter(tmp_path / "adapter")
    return tmp_path


def merge_arguments(place: Path, *more: str) -> list[str]:
    paths = (str(place / name) for name in ("base", "adapter", "merged"))
    return [
        "merge",
        *[part for pair in zip(("--base", "--adapter", "--output"), paths, strict=True) for part in pair],
        *more,
    ]


def test_merge(place: Path, lora_plugins: Run) -> None:
    (place / "base" / "m.gguf").write_bytes(b"x")
    result = lora_plugins(*merge_arguments(place))
    assert result.code == 0, result.err
    assert f"{len(MODULES)} deltas (rank 3, scale 2)" in result.out
    assert "left out: m.gguf (weights in another format, without the adapter)" in result.out
    assert f"merged: {len(MODULES)} of {len(base_tensors())} tensors changed" in result.out and "note" not in result.out
    for name, tensor in slow_merge(base_tensors(), adapter_tensors(), ALPHA / RANK).items():
        torch.testing.assert_close(weights(place / "merged")[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_path_where_nothing_is_is_told_from_one_without_an_adapter(place: Path, lora_plugins: Run) -> None:
    nowhere, file, adapter = (str(place / name) for name in ("nowhere", "base/config.json", "adapter"))
    for arguments in (("inspect",), ("diff", adapter), ("export", "--output", str(place / "out"))):
        for path, reason in (
            (nowhere, "no such directory"),
            (file, "is not a directory"),
            (str(place / "base"), "has no adapter_config.json"),
        ):
            done = lora_plugins(*arguments, path)
            assert done.code == 2 and f"{path}: {reason}" in done.err
    done = lora_plugins("export", adapter, "--output", str(place / "out"), "--base", nowhere)
    assert done.code == 2 and f"--base {nowhere}: no such directory" in done.err


def test_dry_run_checks_and_writes_nothing(place: Path, lora_plugins: Run) -> None:
    before = fingerprint(place)
    result = lora_plugins(*merge_arguments(place, "--dry-run"))
    assert result.code == 0 and "dry run: nothing was written" in result.out and fingerprint(place) == before
    make_adapter(place / "adapter", use_dora=True)
    assert lora_plugins(*merge_arguments(place, "--dry-run")).code == 2


@pytest.mark.parametrize("more", [[], ["--base", "b", "--adapter", "a", "--output", "o"]])
def test_unmerge_is_refused_with_a_way_out(more: list[str], lora_plugins: Run) -> None:
    """B35: merged and unmerged weights drift from the base; the base itself is still there."""
    result = lora_plugins("merge", "--unmerge", *more)
    assert result.code == 2 and "were rounded" in result.err and "use the base" in result.err


def test_a_delta_that_is_rounded_away_is_said(place: Path, lora_plugins: Run) -> None:
    """B35: what a bfloat16 base cannot hold of the delta, and that --dtype float32 can."""
    small = {name: one * (1e-3 if "lora_B" in name else 1) for name, one in adapter_tensors().items()}
    make_base(place / "base", base_tensors(torch.bfloat16))
    make_adapter(place / "adapter", small)
    result = lora_plugins(*merge_arguments(place))
    assert result.code == 0 and "% of the delta (Frobenius norm); --dtype float32 keeps it" in result.out
    (place / "merged").rename(place / "rounded")
    result = lora_plugins(*merge_arguments(place, "--dtype", "float32"))
    assert result.code == 0 and "note" not in result.out


def test_a_trimmed_vocabulary_and_a_zero_delta_are_said(place: Path, lora_plugins: Run) -> None:
    """B42: nothing is trimmed in silence."""
    tensors = {name: one * 0 if "lora_B" in name else one for name, one in adapter_tensors().items()}
    head = f"{PREFIX}lm_head.lora_B.weight"
    make_adapter(place / "adapter", {**tensors, head: torch.zeros(16, RANK)})
    result = lora_plugins(*merge_arguments(place))
    assert "trimmed: 5 zero rows of lm_head beyond the base's vocabulary" in result.out
    assert "note: the adapter's delta is zero, so the result is the base" in result.out


def test_inspect(place: Path, lora_plugins: Run) -> None:
    make_adapter(place / "adapter", base_model_name_or_path="some/base")
    result = lora_plugins("inspect", str(place / "adapter"))
    assert result.code == 0
    lines = {line.split()[0]: line for line in result.out.splitlines() if line}
    assert lines["rank"].split()[1] == "3" and lines["scale"].split()[1] == "2" and "some/base" in lines["base_model"]
    assert ", ".join(TARGETS) in lines["target_modules"] and "float32" in lines["dtypes"]
    assert "model.layers.*.mlp.up_proj" in lines and "[10, 8]" in lines["model.layers.*.mlp.up_proj"]


def test_inspect_as_json_has_every_module(place: Path, lora_plugins: Run) -> None:
    result = lora_plugins("inspect", str(place / "adapter"), "--base", str(place / "base"), "--json")
    found = json.loads(result.out)
    assert result.code == 0 and {one["module"] for one in found["modules"]} == MODULES.keys()
    assert (found["rank"], found["alpha"], found["scale"]) == (RANK, ALPHA, ALPHA / RANK)
    assert found["bytes"] == sum(one.nbytes for one in adapter_tensors().values())
    assert found["base"]["problems"] == [] and found["base"]["model_type"] == "toy"


def test_inspect_exits_with_1_when_the_base_does_not_fit(place: Path, lora_plugins: Run) -> None:
    make_base(place / "base", tie_word_embeddings=True)
    for more in ([], ["--json"]):
        result = lora_plugins("inspect", str(place / "adapter"), "--base", str(place / "base"), *more)
        assert result.code == 1 and "tie_word_embeddings" in result.out


def test_diff(place: Path, lora_plugins: Run) -> None:
    tensors = adapter_tensors()
    name = f"{PREFIX}lm_head.lora_B.weight"
    make_adapter(place / "other", {**tensors, name: tensors[name] + 0.5})
    same = lora_plugins("diff", str(place / "adapter"), str(place / "adapter"))
    assert same.code == 0 and f"{len(MODULES)} of {len(MODULES)} common modules are equal" in same.out
    other = lora_plugins("diff", str(place / "adapter"), str(place / "other"))
    assert other.code == 1 and "lm_head" in other.out and "up_proj" not in other.out
    assert lora_plugins("diff", str(place / "adapter"), str(place / "other"), "--tolerance", "100").code == 0
    found = json.loads(lora_plugins("diff", str(place / "adapter"), str(place / "other"), "--json").out)
    assert found["differs"] is True and found["deltas"]["lm_head"] > 0 and found["config"] == {}
    make_adapter(place / "elsewhere", {name.replace(PREFIX, f"{PREFIX}llm."): one for name, one in tensors.items()})
    apart = ["diff", str(place / "adapter"), str(place / "elsewhere")]
    assert "no module is in both" in lora_plugins(*apart).out
    assert "no module is in both" not in lora_plugins(*apart, "--base", str(place / "base")).out
    make_adapter(place / "other", lora_alpha=1.0, target_modules=["lm_head"])
    text = lora_plugins("diff", str(place / "adapter"), str(place / "other"))
    assert text.code == 1 and "lora_alpha" in text.out and "target_modules" in text.out


@pytest.mark.parametrize(
    "command", [["merge", "--base", "x", "--adapter", "x", "--output", "x"], ["inspect", "x"], ["diff", "x", "x"]]
)
def test_without_torch_a_command_says_what_to_install(command: list[str], tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {command!r}\n"
    code += "from lora_plugins_sdk.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "needs torch, not installed -> install lora-plugins-sdk[megatron]" in result.stderr
