"""`lora-plugins export`: for PEFT and for SGLang, from a directory or a checkpoint; whole, checked, the same bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_files import (
    HIDDEN,
    PREFIX,
    RANK,
    TARGETS,
    adapter_tensors,
    base_tensors,
    fingerprint,
    make_adapter,
    make_base,
)
from safetensors.torch import load_file, save_file

from lora_plugins_sdk import LoraError, base_fingerprint, load_plugin, read_adapter, write_adapter
from lora_plugins_sdk.adapter_meta import AdapterOrigin, read_meta
from lora_plugins_sdk.cli.export_adapter import parse_size
from lora_plugins_sdk.offline.export import FORMS, export_files
from lora_plugins_sdk.offline.merge import plan_merge

Run = Callable[..., Any]
# Keys of the first PEFT with safetensors, 0.3.0.
OLDEST = {
    *("base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_alpha"),
    *("lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type"),
}
# What SGLang serves of the small adapter.
SERVED = {
    name: shape
    for n in range(2)
    for name, shape in {
        f"model.layers.{n}.self_attn.q_proj": (HIDDEN, HIDDEN),
        f"model.layers.{n}.mlp.down_proj": (HIDDEN, 10),
    }.items()
}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    base = make_base(tmp_path / "base", **SIZES)
    plain = read_adapter(make_adapter(tmp_path / "plain", adapter_tensors(SERVED)))
    shutil.rmtree(tmp_path / "plain")
    origin = AdapterOrigin(plugin="toy", base_fingerprint=base_fingerprint(base), step=7)
    write_adapter(replace(plain, origin=origin), tmp_path / "run" / "checkpoints" / "step-000007" / "adapter")
    return tmp_path


@pytest.fixture
def source(place: Path) -> Path:
    return place / "run" / "checkpoints" / "step-000007"


def same(directory: Path, tensors: dict[str, torch.Tensor]) -> bool:
    found = read_adapter(directory).tensors
    return found.keys() == tensors.keys() and all(torch.equal(found[name], one) for name, one in tensors.items())


def test_a_checkpoint_becomes_a_peft_directory(place: Path, source: Path) -> None:
    before = fingerprint(place)
    report = export_files(source, place / "out")
    assert same(place / "out", adapter_tensors(SERVED)) and report.tensors == 2 * len(SERVED)
    assert report.files == ("adapter_model.safetensors",) and not report.left_out and not report.engine_arguments
    assert read_adapter(place / "out").origin == read_adapter(source / "adapter").origin
    shutil.rmtree(place / "out")
    assert fingerprint(place) == before


def test_every_peft_reads_the_config(place: Path) -> None:
    """B45: an unknown key makes an older PEFT refuse the adapter."""
    newer = {"lora_bias": False, "eva_config": None, "peft_version": "9.9", "use_dora": False, "task_type": None}
    make_adapter(place / "newer", adapter_tensors(SERVED), **newer)
    export_files(place / "newer", place / "out")
    config = json.loads((place / "out" / "adapter_config.json").read_text())
    assert config.keys() <= OLDEST
    assert (config["r"], config["target_modules"]) == (RANK, sorted(TARGETS))


@pytest.mark.parametrize(
    "config", [{"exclude_modules": ["x"]}, {"layers_to_transform": [0]}, {"target_modules": r".*\.(q|down)_proj"}]
)
def test_other_ways_to_select_become_full_names(place: Path, config: dict[str, Any]) -> None:
    """B45: an older PEFT knows fewer of them."""
    make_adapter(place / "newer", adapter_tensors(SERVED), **config)
    export_files(place / "newer", place / "out")
    written = json.loads((place / "out" / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(SERVED) and written.keys() <= OLDEST


def test_sglangs_form(place: Path, source: Path) -> None:
    """B30: its names, its targets, whole groups; and how to start it."""
    report = export_files(source, place / "out", form="sglang", base=place / "base")
    found = read_adapter(place / "out")
    assert found.config["target_modules"] == ["down_proj", "qkv_proj"]
    assert not found.tensors[f"{PREFIX}model.layers.1.self_attn.v_proj.lora_B.weight"].any()
    name = f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(found.tensors[name], adapter_tensors(SERVED)[name])
    assert report.engine_arguments[:6] == (
        *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", "down_proj", "qkv_proj"),
    )
    meta = read_meta(place / "out")
    assert meta is not None and meta.origin.engine == "sglang" and meta.origin.step == 7


def test_a_hybrid_comes_with_the_keys_that_sglang_alone_reads(place: Path, source: Path) -> None:
    types = ["linear_attention", "full_attention"]
    make_base(place / "hybrid", **SIZES, model_type="qwen3_5_moe_text", layer_types=types)
    adapter = place / "run" / "checkpoints" / "step-000007" / "adapter"
    plain = read_adapter(adapter)
    write_adapter(replace(plain, origin=None), place / "plain")
    report = export_files(place / "plain", place / "out", form="sglang", base=place / "hybrid")
    assert report.engine_arguments[-4:-2] == (
        "--json-model-override-args",
        '{"text_config": {"full_attention_interval": 2}}',
    )


def test_an_engines_form_goes_no_further(place: Path, source: Path) -> None:
    """B29: under other names it would fit nowhere, or somewhere else."""
    export_files(source, place / "out", form="sglang", base=place / "base")
    with pytest.raises(LoraError, match=r"is an export for sglang.*give the PEFT directory"):
        plan_merge(place / "base", place / "out", place / "merged")


def test_an_engines_form_is_compared_with_its_like_alone(place: Path, source: Path, lora_plugins: Run) -> None:
    """Its names are not the base's: `0 of 0 common modules` would say nothing."""
    export_files(source, place / "out", form="sglang", base=place / "base")
    for pair in ((source, place / "out"), (place / "out", source)):
        for base in ((), ("--base", str(place / "base"))):
            done = lora_plugins("diff", *map(str, pair), *base)
            assert done.code == 2 and not done.out and f"{place / 'out'}: is an export for sglang" in done.err
            assert "turn it back: lora-plugins export" in done.err
    export_files(source, place / "twin", form="sglang", base=place / "base")
    assert lora_plugins("diff", str(place / "out"), str(place / "twin")).code == 0


def test_inspect_says_once_what_an_engines_form_is(place: Path, source: Path, lora_plugins: Run) -> None:
    architecture = load_plugin(architecture="qwen3").architecture
    (place / "base" / "config.json").write_text(json.dumps({**architecture.tiny_config, **SIZES}))
    adapter = replace(read_adapter(source / "adapter"), origin=None)
    export_files(write_adapter(adapter, place / "plain"), place / "out", form="sglang", base=place / "base")
    for base, code in (((), 0), (("--base", str(place / "base")), 1)):
        done = lora_plugins("inspect", str(place / "out"), *base)
        assert done.code == code and done.out.count("is an export for sglang") == 1
        assert "turn it back: lora-plugins export" in done.out and "trained further" not in done.out


def test_an_engines_form_can_be_turned_back(place: Path, source: Path) -> None:
    export_files(source, place / "out", form="sglang", base=place / "base")
    report = export_files(place / "out", place / "again", base=place / "base")
    assert same(place / "again", adapter_tensors(SERVED)) and report.left_out
    assert all("are zeros" in reason for reason in report.left_out.values())
    back, first = read_adapter(place / "again"), read_adapter(source / "adapter")
    assert back.origin == first.origin and back.config["target_modules"] == ["down_proj", "q_proj"]
    plan_merge(place / "base", place / "again", place / "merged")
    export_files(place / "out", place / "twice", form="sglang", base=place / "base")
    assert same(place / "twice", dict(read_adapter(place / "out").tensors))
    with pytest.raises(LoraError, match=r"--base: is needed"):
        export_files(place / "out", place / "other")


def test_the_base_is_where_the_config_says_or_asked_for(place: Path) -> None:
    make_adapter(place / "named", adapter_tensors(SERVED), base_model_name_or_path=str(place / "base"))
    export_files(place / "named", place / "out", form="sglang")
    make_adapter(place / "unnamed", adapter_tensors(SERVED), base_model_name_or_path="org/name")
    with pytest.raises(LoraError, match=r"--base: is needed.*'org/name' is no directory here"):
        export_files(place / "unnamed", place / "other", form="sglang")


def test_what_sglang_cannot_serve(place: Path) -> None:
    weights = place / "base" / "model.safetensors"
    save_file(load_file(weights) | {"model.layers.0.mlp.gate.weight": torch.zeros(4, HIDDEN)}, weights)
    make_adapter(place / "router", adapter_tensors({"model.layers.0.mlp.gate": (4, HIDDEN)}))
    with pytest.raises(LoraError, match=r"model\.layers\.0\.mlp\.gate: SGLang serves no LoRA there"):
        export_files(place / "router", place / "out", form="sglang", base=place / "base")
    assert not (place / "out").exists()


def test_another_base_is_refused(place: Path, source: Path) -> None:
    other = make_base(place / "other", vocab_size=12, **SIZES)
    for use in (
        lambda: export_files(source, place / "out", form="sglang", base=other),
        lambda: plan_merge(other, source, place / "merged"),
    ):
        with pytest.raises(LoraError, match=r"was trained on another base than .*remove adapter_meta\.json"):
            use()
    (source / "adapter" / "adapter_meta.json").unlink()
    export_files(source, place / "out", form="sglang", base=other)


@pytest.mark.parametrize("form", FORMS)
def test_factors_that_fit_no_weight_of_the_base(place: Path, form: str) -> None:
    """SGLang would end at the first request that uses them."""
    made_for = {"model.layers.1.mlp.down_proj": (HIDDEN + 4, 10), "model.layers.7.self_attn.o_proj": (HIDDEN, HIDDEN)}
    make_adapter(place / "wider", adapter_tensors(made_for))
    with pytest.raises(LoraError) as caught:
        export_files(place / "wider", place / "out", form=form, base=place / "base")
    assert "down_proj.weight: has shape" in str(caught.value) and "layers.7.self_attn.o_proj: " in str(caught.value)
    assert not (place / "out").exists()


def test_a_quantised_base_serves_what_cannot_be_merged_into_it(place: Path, lora_plugins: Run) -> None:
    """AWQ's form: no `weight` at all, and shapes of packed numbers."""
    base = place / "base"
    config = json.loads((base / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "awq", "bits": 4}
    }
    (base / "config.json").write_text(json.dumps(config))
    packed = {
        name.replace("proj.weight", "proj.qweight"): tensor[:1].int() if "proj" in name else tensor
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(packed, base / "model.safetensors")
    make_adapter(place / "plain", adapter_tensors(SERVED))
    with pytest.raises(LoraError, match=r"the base has no model\.layers\.0"):
        plan_merge(base, place / "plain", place / "merged")
    for form in FORMS:
        done = lora_plugins(
            *("export", str(place / "plain"), "--output", str(place / form), "--for", form, "--base", str(base))
        )
        assert done.code == 0, done.err
        assert "note: the factors were not compared with the base's weights" in done.out and "is quantised" in done.out


def test_a_base_without_weights_is_not_compared(place: Path) -> None:
    (place / "base" / "model.safetensors").unlink()
    make_adapter(place / "plain", adapter_tensors(SERVED))
    report = export_files(place / "plain", place / "out", form="sglang", base=place / "base")
    assert report.not_compared is not None and "holds no *.safetensors" in report.not_compared
    assert export_files(place / "plain", place / "peft").not_compared is None
    with pytest.raises(LoraError, match=r"--base .*config\.json: is not a directory -> give the HF directory"):
        export_files(place / "plain", place / "other", base=place / "base" / "config.json")


@pytest.mark.parametrize("form", FORMS)
def test_a_tied_head_is_as_large_as_the_embedding(place: Path, form: str) -> None:
    """PEFT and SGLang both add to the head alone, and such a base stores no head."""
    tensors = base_tensors()
    rows = len(tensors.pop("lm_head.weight"))
    base = make_base(place / "tied", tensors, tie_word_embeddings=True, **SIZES)
    make_adapter(place / "head", adapter_tensors({"lm_head": (rows, HIDDEN)}))
    assert len(export_files(place / "head", place / "out", form=form, base=base).files) == 1
    make_adapter(place / "wider", adapter_tensors({"lm_head": (rows + 2, HIDDEN)}))
    with pytest.raises(LoraError, match=r"2 of the 2 rows of lora_B beyond the base's 11 are not zero"):
        export_files(place / "wider", place / "other", form=form, base=base)


def test_whole_weights_are_left_out_when_they_are_the_bases_own(place: Path) -> None:
    own = load_file(place / "base" / "model.safetensors")["model.embed_tokens.weight"]
    name = f"{PREFIX}model.embed_tokens.weight"
    make_adapter(place / "with", {**adapter_tensors(SERVED), name: own})
    with pytest.raises(LoraError, match=r"embed_tokens\.weight: is in the adapter as a whole weight.*--base"):
        export_files(place / "with", place / "out")
    report = export_files(place / "with", place / "out", base=place / "base")
    assert report.left_out == {name: "the base's own weight"} and same(place / "out", adapter_tensors(SERVED))
    make_adapter(place / "trained", {**adapter_tensors(SERVED), name: own + 1})
    with pytest.raises(LoraError, match="not as the base has it"):
        export_files(place / "trained", place / "other", base=place / "base")


@pytest.mark.parametrize("form", ["peft", "sglang"])
def test_the_same_adapter_gives_the_same_bytes(place: Path, source: Path, form: str) -> None:
    for name in ("one", "two"):
        export_files(source, place / name, form=form, base=place / "base", max_shard_bytes=200)
    assert fingerprint(place / "one") == fingerprint(place / "two") and len(os.listdir(place / "one")) > 4
    # Through shards and back: the bytes of a direct export.
    if form == "peft":
        export_files(place / "one", place / "whole")
        export_files(source, place / "direct")
        assert fingerprint(place / "whole") == fingerprint(place / "direct")


def test_places_that_cannot_be_written(place: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that exists, a parent that does not, and a disk that refuses leave nothing."""
    (place / "taken").mkdir()
    before = fingerprint(place)
    for output in (place / "taken", place / "absent" / "out", place / "base" / "config.json" / "out"):
        with pytest.raises(LoraError):
            export_files(source, output)
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(LoraError, match=r"out: cannot be written \(No space left on device\)"):
        export_files(source, place / "out")
    assert fingerprint(place) == before


def _no_space(handle: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("text", "size"), [("2GB", 2 * 10**9), ("64 MiB", 2**26), ("1000", 1000), ("5kb", 5000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "2TB", "GB", "1.5GB", "9" * 40])
def test_no_sizes(text: str) -> None:
    with pytest.raises(LoraError, match="is no size"):
        parse_size(text)


def test_the_command(place: Path, source: Path, lora_plugins: Run) -> None:
    done = lora_plugins("export", str(source), "--output", str(place / "out"), "--max-shard-size", "200")
    assert done.code == 0, done.err
    assert "8 tensors in" in done.out and "files" in done.out and len(os.listdir(place / "out")) > 4
    base = ("--base", str(place / "base"))
    done = lora_plugins("export", str(source), "--output", str(place / "sgl"), "--for", "sglang", *base)
    assert done.code == 0 and "serve it with: --enable-lora --max-lora-rank 3" in done.out, done.err
    done = lora_plugins("export", str(place), "--output", str(place / "none"))
    assert done.code == 2 and "has no adapter_config.json" in done.err and not (place / "none").exists()


def test_inspect_shows_where_it_comes_from(place: Path, source: Path, lora_plugins: Run) -> None:
    record = json.loads(lora_plugins("inspect", str(source), "--json").out)
    assert (record["plugin"], record["step"], record["engine"]) == ("toy", 7, None)
    assert record["base_fingerprint"] == base_fingerprint(place / "base") and "torch" in record["versions"]
    assert re.search(r"versions +lora-plugins-sdk \S+, torch ", lora_plugins("inspect", str(source)).out)
    other = make_base(place / "other", vocab_size=12, **SIZES)
    done = lora_plugins("inspect", str(source), "--base", str(other))
    assert done.code == 1 and "was trained on another base" in done.out
    weights = source / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    done = lora_plugins("inspect", str(source))
    assert done.code == 2 and "differs from what was exported" in done.err


def test_peft_loads_an_export(place: Path, source: Path) -> None:
    """Read by PEFT itself, with the meta file beside the tensors."""
    from peft import LoraConfig, PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    export_files(source, place / "out")
    config = PeftConfig.from_pretrained(str(place / "out"))
    assert isinstance(config, LoraConfig) and config.r == RANK
    found = load_peft_weights(str(place / "out"), device="cpu")
    assert all(torch.equal(found[name], one) for name, one in adapter_tensors(SERVED).items())
