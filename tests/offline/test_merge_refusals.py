"""What cannot be merged is named with a way out, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_files import (
    HIDDEN,
    INNER,
    MODULES,
    PREFIX,
    RANK,
    VOCABULARY,
    A,
    B,
    W,
    adapter_tensors,
    base_tensors,
    fingerprint,
    make_adapter,
    make_base,
)
from torch import Tensor

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.offline import merge as merge_module
from lora_plugins_sdk.offline.merge import merge, plan_merge

Edit = Callable[[dict[str, Tensor]], Any]
HEAD = f"{PREFIX}lm_head.lora_B.weight"


def refused(
    place: Path,
    *,
    base: Edit = lambda tensors: None,
    adapter: Edit = lambda tensors: None,
    config: dict[str, Any] | None = None,
    hf: dict[str, Any] | None = None,
    dtype: str | None = None,
) -> LoraError:
    """The error of a merge of edited files; nothing may be left of it."""
    held, factors = base_tensors(), adapter_tensors()
    base(held)
    adapter(factors)
    make_base(place / "base", held, **(hf or {}))
    make_adapter(place / "adapter", factors, **(config or {}))
    before = fingerprint(place)
    with pytest.raises(LoraError) as error:
        merge(plan_merge(place / "base", place / "adapter", place / "merged", dtype))
    assert fingerprint(place) == before
    assert all(one.subject and one.reason and one.cure for one in error.value.diagnostics)
    return error.value


def put(name: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("base", "adapter", "message"),
    [
        (lambda t: t.pop(W), None, f"the base has no {W}"),
        (
            lambda t: t.update({W.replace("model.", "other_model."): t.pop(W)}),
            None,
            f"has no {W}; it has other_model.layers.0.mlp.up_proj.weight",
        ),
        (put(W, torch.zeros(INNER, HIDDEN + 1)), None, f"{W}: has shape [10, 9]"),
        (put(W, torch.zeros(HIDDEN, INNER)), None, "transposed"),
        (put(W, torch.zeros(INNER * HIDDEN)), None, f"{W}: has shape [80]"),
        (put(W, torch.zeros(INNER, HIDDEN, dtype=torch.int8)), None, f"{W}: is stored as I8"),
        (put(W, torch.zeros(INNER, HIDDEN).to(torch.float8_e4m3fn)), None, f"{W}: is stored as F8_E4M3"),
        (put(W, torch.full((INNER, HIDDEN), float("nan"))), None, "the base holds NaN"),
        (None, lambda t: t.pop(A), "its partner"),
        (None, lambda t: t.pop(B), "its partner"),
        (None, put(A, torch.zeros(RANK + 1, HIDDEN)), f"{A}: has shape [4, 8]"),
        (None, put(A, torch.zeros(HIDDEN, RANK)), f"{A}: has shape [8, 3]"),
        (None, put(B, torch.zeros(INNER)), f"{B}: has shape [10]"),
        (None, put(B, torch.full((INNER, RANK), float("inf"))), f"{B}: holds NaN or infinite"),
        (None, put(B, torch.zeros(INNER, RANK, dtype=torch.int32)), f"{B}: has dtype torch.int32"),
        (None, put(f"{PREFIX}lm_head.weight", torch.zeros(1)), "lm_head.weight: is in the adapter as a whole weight"),
        (
            None,
            put(f"{PREFIX}model.embed_tokens.base_layer.weight", torch.zeros(VOCABULARY, HIDDEN)),
            "as a whole weight",
        ),
        (
            None,
            lambda t: t.update({f"{PREFIX}lm_head.{one}weight": torch.zeros(1) for one in ("", "base_layer.")}),
            "lm_head.weight: and base_model.model.lm_head.base_layer.weight are both lm_head.weight",
        ),
        (None, put(A.replace("lora_A", "lora_embedding_A"), torch.zeros(1)), "is no factor of a linear"),
        (None, put(B.replace(".weight", ".bias"), torch.zeros(1)), "is no factor of a linear"),
        (None, put(B.replace("lora_B.weight", "lora_magnitude_vector"), torch.zeros(1)), "is no factor of a linear"),
        (None, put(A.removeprefix(PREFIX), torch.zeros(RANK, HIDDEN)), "is no factor of a linear"),
        (None, lambda t: t.clear(), "there are none"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, base: Edit | None, adapter: Edit | None, message: str) -> None:
    found = refused(tmp_path, base=base or (lambda t: None), adapter=adapter or (lambda t: None))
    assert message in str(found)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[W]
        tensors["lm_head.weight"] = torch.zeros(3, 3)

    assert {one.subject for one in refused(tmp_path, base=edit).diagnostics} == {
        "lm_head.weight",
        W.removesuffix(".weight"),
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"some_new_option": {"on": True}}, "some_new_option={'on': True}: is not known here"),
        ({"r": 0}, "rank=0"),
        ({"r": "3"}, "rank='3'"),
        ({"r": True}, "rank=True"),
        ({"r": RANK + 1}, "the config's r=4 asks for"),
        ({"lora_alpha": None}, "alpha=None"),
        ({"lora_alpha": -1}, "alpha=-1"),
        ({"lora_alpha": float("nan")}, "alpha=nan"),
        ({"lora_alpha": 10**400}, "alpha=1000"),
        ({"use_rslora": "false"}, "use_rslora='false': is not true or false"),
    ],
)
def test_configs_of_another_method(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert message in str(refused(tmp_path, config=config))


@pytest.mark.parametrize("hf", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_a_tied_head(tmp_path: Path, hf: dict[str, Any]) -> None:
    """B42: folding into a tied head would change the embedding too, or leave the two apart."""
    (found,) = refused(tmp_path, hf=hf).diagnostics
    assert found.subject == "lm_head" and "tie_word_embeddings" in found.reason


def test_a_tied_head_that_the_base_does_not_hold(tmp_path: Path) -> None:
    """B42: a checkpoint of a tied model has no head of its own."""
    (found,) = refused(tmp_path, base=lambda tensors: tensors.pop("lm_head.weight")).diagnostics
    assert found.subject == "lm_head" and "ties it to the embedding" in found.reason


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (torch.cat([torch.zeros(1, RANK), torch.ones(1, RANK)]), "1 of the 2 rows of lora_B beyond"),
        (torch.zeros(0, RANK), None),
    ],
)
def test_a_vocabulary_that_is_not_mere_padding(tmp_path: Path, rows: Tensor, reason: str | None) -> None:
    """B42: rows with content have no place; without a vocabulary size that explains them, other rows do not fit."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = torch.cat([tensors[HEAD], rows]) if reason else tensors[HEAD][:-1]

    (found,) = refused(tmp_path, adapter=edit).diagnostics
    assert (reason or "the adapter's product is [10, 8]") in found.reason
    assert VOCABULARY == 11


def test_layers_that_were_lost(tmp_path: Path) -> None:
    """B22: an export of one pipeline stage has half of the layers that its config targets."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    lost = {module for module in MODULES if "layers.1." in module}
    found = refused(tmp_path, adapter=edit)
    assert {one.subject for one in found.diagnostics} == lost
    assert all("has no factors, while other layers have" in one.reason for one in found.diagnostics)


@pytest.mark.parametrize(
    ("base", "dtype", "message"),
    [
        (put("model.norm.weight", torch.full((HIDDEN,), 1e6)), "float16", "model.norm.weight: holds values too large"),
        (put(W, torch.full((INNER, HIDDEN), 1e6)), "float16", "the sum is too large"),
        (put("model.scale", torch.zeros(2).to(torch.float8_e5m2)), "bfloat16", "model.scale: is stored as F8_E5M2"),
        (lambda tensors: None, "int8", "dtype 'int8': is unknown"),
    ],
)
def test_dtypes_that_do_not_hold_the_values(tmp_path: Path, base: Edit, dtype: str, message: str) -> None:
    assert message in str(refused(tmp_path, base=base, dtype=dtype))


def test_infinities_of_the_base_may_be_meant(tmp_path: Path) -> None:
    """A mask of -inf is cast as it is; only values that become infinite are refused."""
    tensors = {**base_tensors(), "model.mask": torch.tensor([0.0, -torch.inf])}
    plan = plan_merge(
        make_base(tmp_path / "base", tensors), make_adapter(tmp_path / "adapter"), tmp_path / "merged", "float16"
    )
    assert merge(plan).folds == len(MODULES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_base_that_is_not_finite_in_half_precision(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[W] = tensors[W].to(dtype)
        tensors[W][-1, -1] = value

    assert "the base holds NaN or infinite values" in str(refused(tmp_path, base=edit))


def test_large_values_are_not_taken_for_infinite_ones(tmp_path: Path) -> None:
    """The square of their rounding error has no float32; they have."""
    base = base_tensors(torch.bfloat16)
    base[W] = torch.full((INNER, HIDDEN), 3e38).bfloat16()
    plan = plan_merge(make_base(tmp_path / "base", base), make_adapter(tmp_path / "adapter"), tmp_path / "merged")
    assert 0 < merge(plan).lost_norm < float("inf")


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_an_output_that_exists(tmp_path: Path, kind: str) -> None:
    base, adapter, output = make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter"), tmp_path / "merged"
    if kind == "directory":
        output.mkdir()
    elif kind == "file":
        output.write_text("mine")
    else:
        output.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LoraError, match="merged: exists already"):
        plan_merge(base, adapter, output)


def test_places_for_the_output(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    before = fingerprint(tmp_path)
    with pytest.raises(LoraError, match=r"its parent .*absent: no such directory -> .*make this one first"):
        plan_merge(base, adapter, tmp_path / "absent" / "merged")
    with pytest.raises(LoraError, match=r"its parent .*config\.json: is not a directory"):
        plan_merge(base, adapter, base / "config.json" / "merged")
    with pytest.raises(LoraError, match="lies in the base directory"):
        plan_merge(base, adapter, base / "merged")
    assert fingerprint(tmp_path) == before


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(merge_module.shutil, "disk_usage", lambda path: usage)
    assert "the disk has 1000 free" in str(refused(tmp_path))


def test_a_base_that_changes_meanwhile(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    plan = plan_merge(base, adapter, tmp_path / "merged")
    make_base(base, {**base_tensors(), "model.norm.weight": torch.zeros(HIDDEN + 1)})
    with pytest.raises(LoraError, match="changed since it was checked"):
        merge(plan)
    assert sorted(os.listdir(tmp_path)) == ["adapter", "base"]


@pytest.mark.parametrize("what", ["base", "adapter", "output"])
@pytest.mark.parametrize("name", ["absent/merged", "x" * 300, "file", "file/below"])
def test_directories_that_are_none(tmp_path: Path, what: str, name: str) -> None:
    places = {"base": make_base(tmp_path / "base"), "adapter": make_adapter(tmp_path / "adapter")}
    places["output"] = tmp_path / "merged"
    (tmp_path / "file").write_text("a file")
    places[what] = tmp_path / name
    before = fingerprint(tmp_path)
    with pytest.raises(LoraError, match=name):
        merge(plan_merge(places["base"], places["adapter"], places["output"]))
    assert fingerprint(tmp_path) == before


def test_a_base_without_a_config(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    (base / "config.json").unlink()
    with pytest.raises(LoraError, match=r"config\.json: cannot be read"):
        plan_merge(base, adapter, tmp_path / "merged")


def test_a_dtype_in_the_config_is_no_weight(tmp_path: Path) -> None:
    """Only the keys that name the weights' dtype are rewritten."""
    base = make_base(tmp_path / "base", torch_dtype="float32", other="float32", quantization_note={"dtype": "float32"})
    merge(plan_merge(base, make_adapter(tmp_path / "adapter"), tmp_path / "merged", "bfloat16"))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    assert config["other"] == config["quantization_note"]["dtype"] == "float32"


def test_a_fold_that_was_not_made_discards_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B31, B36: what was wired is counted; one that was skipped is an error and not a weaker adapter."""
    plain = merge_module.write_shard

    def skipping(source: Any, target: Path, folds: dict[str, Any], **more: Any) -> Any:
        return plain(source, target, {name: fold for name, fold in folds.items() if name != W}, **more)

    monkeypatch.setattr(merge_module, "write_shard", skipping)
    assert "1 of 7 factor pairs: were not folded: model.layers.0.mlp.up_proj" in str(refused(tmp_path))
