"""A merged base is what the formula says, whatever the files look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from offline_files import (
    ALPHA,
    HIDDEN,
    LAYERS,
    LINEARS,
    MODULES,
    PREFIX,
    RANK,
    VOCABULARY,
    adapter_tensors,
    base_tensors,
    fingerprint,
    make_adapter,
    make_base,
    slow_merge,
    weights,
)
from torch import Tensor

from lora_plugins_sdk.offline import shard
from lora_plugins_sdk.offline.merge import MergeReport, merge, plan_merge

SCALE = ALPHA / RANK
INNER_EXPERT = 6


def merged(base: Path, adapter: Path, dtype: str | None = None) -> tuple[dict[str, Tensor], MergeReport]:
    output = base.parent / f"merged-{dtype}"
    before = fingerprint(base), fingerprint(adapter)
    report = merge(plan_merge(base, adapter, output, dtype))
    assert (fingerprint(base), fingerprint(adapter)) == before
    return weights(output), report


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("chunk", [1, 2**18], ids=["row by row", "whole"])
def test_every_weight_is_the_sum_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, chunk: int
) -> None:
    monkeypatch.setattr(shard, "_CHUNK_ELEMENTS", chunk)
    found, report = merged(make_base(tmp_path / "base", shards=shards), make_adapter(tmp_path / "adapter"))
    expected = slow_merge(base_tensors(), adapter_tensors(), SCALE)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.removesuffix(".weight") in MODULES:
            assert not torch.equal(found[name], base_tensors()[name])
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
        else:
            assert same_bits(found[name], base_tensors()[name]), name
    assert report.folds == len(MODULES) and report.tensors == len(expected) and report.lost_norm == 0.0
    deltas = [expected[f"{module}.weight"].double() - base_tensors()[f"{module}.weight"].double() for module in MODULES]
    assert report.delta_norm == pytest.approx(torch.cat([one.flatten() for one in deltas]).norm().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_made_in_float32_and_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """B35: a delta added in bfloat16 loses far more than one rounding of the sum."""
    base = base_tensors(dtype)
    small = {name: one * (0.02 if "lora_B" in name else 1) for name, one in adapter_tensors().items()}
    found, report = merged(make_base(tmp_path / "base", base), make_adapter(tmp_path / "adapter", small))
    exact = slow_merge({name: one.double() for name, one in base.items()}, small, SCALE)
    lost = []
    for module in MODULES:
        name = f"{module}.weight"
        assert found[name].dtype == dtype
        # Half a unit in the last place: no second rounding. A float32 sum may sit on the other side of a tie.
        half_ulp = torch.finfo(dtype).eps / 2 * exact[name].abs()
        assert bool(((found[name].double() - exact[name]).abs() <= half_ulp * 1.001).all())
        lost.append((found[name].double() - exact[name]).flatten())
    assert report.lost_norm == pytest.approx(torch.cat(lost).norm().item(), rel=1e-3) and report.lost_norm > 0


def test_a_wider_dtype_keeps_the_delta(tmp_path: Path) -> None:
    """B35: with --dtype float32 a bfloat16 base loses nothing of the delta, and readers are told the dtype."""
    base = base_tensors(torch.bfloat16)
    found, report = merged(
        make_base(tmp_path / "base", base, shards=2, dtype="bfloat16"), make_adapter(tmp_path / "adapter"), "float32"
    )
    expected = slow_merge(
        {name: one.float() if one.is_floating_point() else one for name, one in base.items()}, adapter_tensors(), SCALE
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    assert report.lost_norm == 0.0
    output = tmp_path / "merged-float32"
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == "float32" and config["text_config"]["dtype"] == "float32"
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values()) == report.write_bytes


def test_a_dtype_that_changes_nothing_leaves_the_same_bytes(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    merged(base, adapter)
    merged(base, adapter, "float32")
    assert fingerprint(tmp_path / "merged-None") == fingerprint(tmp_path / "merged-float32")


def test_rslora_scales_by_the_root_of_the_rank(tmp_path: Path) -> None:
    """B34: alpha / sqrt(r), not alpha / r."""
    found, _ = merged(make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter", use_rslora=True))
    expected = slow_merge(base_tensors(), adapter_tensors(), ALPHA / RANK**0.5)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_float64_base_is_summed_in_float64(tmp_path: Path) -> None:
    base = base_tensors(torch.float64)
    found, _ = merged(make_base(tmp_path / "base", base), make_adapter(tmp_path / "adapter"))
    for name, tensor in slow_merge(base, adapter_tensors(), SCALE).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("extra", [3, 0, -3], ids=["adapter padded", "equal", "base padded"])
def test_a_padded_vocabulary(tmp_path: Path, extra: int) -> None:
    """B42: zero rows of B beyond the vocabulary are trimmed, rows of the base beyond it stay as they are."""
    base, adapter = base_tensors(), adapter_tensors()
    head = f"{PREFIX}lm_head.lora_B.weight"
    plain = slow_merge(base, adapter, SCALE)["lm_head.weight"]
    padding = torch.full((3, HIDDEN), 7.0)
    if extra > 0:
        adapter[head] = torch.cat([adapter[head], torch.zeros(extra, RANK)])
    if extra < 0:
        base["lm_head.weight"] = torch.cat([base["lm_head.weight"], padding])
    found, _ = merged(make_base(tmp_path / "base", base), make_adapter(tmp_path / "adapter", adapter))
    torch.testing.assert_close(found["lm_head.weight"][:VOCABULARY], plain, rtol=1e-6, atol=1e-6)
    assert torch.equal(found["lm_head.weight"][VOCABULARY:], padding if extra < 0 else padding[:0])


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    shapes = {f"model.layers.0.mlp.experts.{n}.up_proj": (INNER_EXPERT, HIDDEN) for n in range(3)}
    base = {**base_tensors(), **{f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}}
    adapter = adapter_tensors({**MODULES, **shapes})
    found, report = merged(make_base(tmp_path / "base", base), make_adapter(tmp_path / "adapter", adapter))
    for name, tensor in slow_merge(base, adapter, SCALE).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    assert report.folds == len(MODULES) + 3


def test_some_layers_may_be_the_target(tmp_path: Path) -> None:
    """Whole paths in target_modules select layers on purpose; the others are not missed."""
    chosen = {f"model.layers.1.{name}": shape for name, shape in LINEARS.items()}
    adapter = adapter_tensors(chosen)
    found, report = merged(
        make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter", adapter, target_modules=list(chosen))
    )
    assert report.folds == len(LINEARS) and LAYERS > 1
    for name, tensor in slow_merge(base_tensors(), adapter, SCALE).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
