"""Experts: stored fused or one by one, adapted one by one or packed, by themselves or within a multimodal model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from offline_files import ALPHA, PREFIX, RANK, fingerprint, make_adapter, make_base, weights
from torch import Tensor

from lora_plugins_sdk import LoraError
from lora_plugins_sdk.offline import shard
from lora_plugins_sdk.offline.adapter import read_plain_adapter
from lora_plugins_sdk.offline.diff import diff_adapters
from lora_plugins_sdk.offline.inspect import pair_facts
from lora_plugins_sdk.offline.merge import merge, plan_merge

EXPERTS, HIDDEN, INNER, LAYERS = 3, 8, 6, 2
SCALE = ALPHA / RANK
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
TARGETS = [*SHAPES]
Weights = dict[str, Tensor]


def block(layer: int, prefix: str = "model.") -> str:
    return f"{prefix}layers.{layer}.mlp.experts"


def linears(prefix: str = "model.", dtype: torch.dtype = torch.float32) -> Weights:
    """Module of each expert's linear -> weight."""
    torch.manual_seed(1)
    return {
        f"{block(layer, prefix)}.{expert}.{leaf}": torch.randn(shape).to(dtype)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for leaf, shape in SHAPES.items()
    }


def stored(each: Weights, form: str, prefix: str = "model.") -> Weights:
    """The base's tensors, beside a router and a tower's own layers that must not be taken for the model's."""
    base = {f"{prefix}layers.0.mlp.gate.weight": torch.ones(EXPERTS, HIDDEN)}
    base[f"visual.{block(0, '')}.0.gate_proj.weight"] = torch.ones(INNER, HIDDEN)
    if form == "one by one":
        return base | {f"{module}.weight": weight for module, weight in each.items()}
    for layer in range(LAYERS):
        name = block(layer, prefix)
        parts = {leaf: [each[f"{name}.{expert}.{leaf}"] for expert in range(EXPERTS)] for leaf in SHAPES}
        stacked = {leaf: torch.stack(many) for leaf, many in parts.items()}
        if form == "fused":
            base[f"{name}.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], dim=1)
            base[f"{name}.down_proj"] = stacked["down_proj"]
        else:
            base |= {f"{name}.{leaf}": tensor for leaf, tensor in stacked.items()}
    return base


def taken_apart(base: Weights, form: str, prefix: str = "model.") -> Weights:
    """The inverse of `stored`."""
    if form == "one by one":
        return {
            name.removesuffix(".weight"): base[name] for name in base if ".experts." in name and "visual" not in name
        }
    each: Weights = {}
    for layer in range(LAYERS):
        name = block(layer, prefix)
        for expert in range(EXPERTS):
            if form == "fused":
                each[f"{name}.{expert}.gate_proj"] = base[f"{name}.gate_up_proj"][expert, :INNER]
                each[f"{name}.{expert}.up_proj"] = base[f"{name}.gate_up_proj"][expert, INNER:]
            else:
                each[f"{name}.{expert}.gate_proj"] = base[f"{name}.gate_proj"][expert]
                each[f"{name}.{expert}.up_proj"] = base[f"{name}.up_proj"][expert]
            each[f"{name}.{expert}.down_proj"] = base[f"{name}.down_proj"][expert]
    return each


def factors(layout: str, prefix: str = "model.") -> tuple[Weights, dict[str, tuple[Tensor, Tensor]]]:
    """PEFT tensors, and what they mean: module of each expert's linear -> (A, B)."""
    torch.manual_seed(2)
    tensors: Weights = {}
    meant: dict[str, tuple[Tensor, Tensor]] = {}
    for layer in range(LAYERS):
        for leaf, (out, width) in SHAPES.items():
            own_a = layout != "shared outer" or leaf == "down_proj"
            own_b = layout != "shared outer" or leaf != "down_proj"
            a = torch.randn(EXPERTS if own_a else 1, RANK, width)
            b = torch.randn(EXPERTS if own_b else 1, out, RANK)
            for expert in range(EXPERTS):
                module = f"{block(layer, prefix)}.{expert}.{leaf}"
                meant[module] = a[expert if own_a else 0], b[expert if own_b else 0]
                if layout == "one by one":
                    tensors[f"{PREFIX}{module}.lora_A.weight"] = meant[module][0].contiguous()
                    tensors[f"{PREFIX}{module}.lora_B.weight"] = meant[module][1].contiguous()
            if layout != "one by one":
                tensors[f"{PREFIX}{block(layer, prefix)}.{leaf}.lora_A.weight"] = a
                tensors[f"{PREFIX}{block(layer, prefix)}.{leaf}.lora_B.weight"] = b
    return tensors, meant


def folded(tmp_path: Path, base: Weights, adapter: Weights, **config: Any) -> tuple[Weights, Any]:
    make_base(tmp_path / "base", base, shards=2)
    make_adapter(tmp_path / "adapter", adapter, target_modules=TARGETS, **config)
    report = merge(plan_merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"))
    return weights(tmp_path / "merged"), report


def refused(tmp_path: Path, base: Weights, adapter: Weights) -> str:
    make_base(tmp_path / "base", base, shards=2)
    make_adapter(tmp_path / "adapter", adapter, target_modules=TARGETS)
    before = fingerprint(tmp_path)
    with pytest.raises(LoraError) as error:
        plan_merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert fingerprint(tmp_path) == before
    return str(error.value)


@pytest.mark.parametrize("layout", ["one by one", "packed", "shared outer"])
@pytest.mark.parametrize("form", ["one by one", "fused", "stacked"])
@pytest.mark.parametrize("chunk", [1, 20, 2**18], ids=["row by row", "across experts", "whole"])
def test_every_expert_gets_its_own_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, layout: str, chunk: int
) -> None:
    """B31, B32: each row against a plain sum for each expert; all deltas are counted."""
    monkeypatch.setattr(shard, "_CHUNK_ELEMENTS", chunk)
    each, (tensors, meant) = linears(), factors(layout)
    base = stored(each, form)
    found, report = folded(tmp_path, base, tensors)
    assert report.folds == len(meant) == LAYERS * EXPERTS * 3
    assert report.changed == len(base) - 2 and report.tensors == len(base)
    assert {name for name in base if torch.equal(found[name], base[name])} == {
        "model.layers.0.mlp.gate.weight",
        f"visual.{block(0, '')}.0.gate_proj.weight",
    }
    for module, weight in taken_apart(found, form).items():
        a, b = meant[module]
        expected = (each[module].double() + SCALE * b.double() @ a.double()).float()
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["one by one", "fused"])
@pytest.mark.parametrize(
    ("base_prefix", "adapter_prefix"),
    [
        ("model.language_model.", "model."),
        ("model.language_model.", "model.language_model."),
        ("model.", "model.language_model."),
        ("language_model.model.", "model."),
    ],
)
def test_the_language_model_of_a_multimodal_base(
    tmp_path: Path, form: str, base_prefix: str, adapter_prefix: str
) -> None:
    each, (tensors, meant) = linears(base_prefix), factors("shared outer", adapter_prefix)
    found, report = folded(tmp_path, stored(each, form, base_prefix), tensors)
    assert report.folds == len(meant)
    for module, weight in taken_apart(found, form, base_prefix).items():
        a, b = meant[module.replace(base_prefix, adapter_prefix)]
        torch.testing.assert_close(weight, each[module] + SCALE * b @ a, rtol=1e-5, atol=1e-5)


def test_two_language_models_are_not_guessed_between(tmp_path: Path) -> None:
    base = stored(linears("model.language_model."), "fused", "model.language_model.")
    base |= stored(linears("language_model.model."), "fused", "language_model.model.")
    assert "the base has no model.layers.0.mlp.experts.0.down_proj.weight" in refused(
        tmp_path, base, factors("packed")[0]
    )


def test_two_names_for_one_weight(tmp_path: Path) -> None:
    tensors = factors("packed")[0] | factors("packed", "model.language_model.")[0]
    assert "are both model.layers.0.mlp.experts.0.down_proj of this base" in refused(
        tmp_path, stored(linears(), "fused"), tensors
    )


def test_sums_of_fused_experts_are_rounded_once(tmp_path: Path) -> None:
    """B35."""
    each, (tensors, meant) = linears(dtype=torch.bfloat16), factors("packed")
    found, report = folded(tmp_path, stored(each, "fused"), tensors)
    lost = []
    for module, weight in taken_apart(found, "fused").items():
        a, b = meant[module]
        exact = each[module].double() + SCALE * b.double() @ a.double()
        assert bool(
            ((weight.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps / 2 * exact.abs() * 1.001).all()
        )
        lost.append((weight.double() - exact).flatten())
    assert report.lost_norm == pytest.approx(torch.cat(lost).norm().item(), rel=1e-3)


@pytest.mark.parametrize("inner", [INNER, HIDDEN // 2], ids=["by shape", "gate_up square"])
def test_experts_stored_the_other_way_round(tmp_path: Path, inner: int) -> None:
    """B33: `[experts, in, out]`; where gate_up is square the shape of down tells."""
    base, tensors = {}, {}
    for layer in range(LAYERS):
        base[f"{block(layer)}.gate_up_proj"] = torch.zeros(EXPERTS, HIDDEN, 2 * inner)
        base[f"{block(layer)}.down_proj"] = torch.zeros(EXPERTS, inner, HIDDEN)
        tensors[f"{PREFIX}{block(layer)}.gate_proj.lora_A.weight"] = torch.randn(1, RANK, HIDDEN)
        tensors[f"{PREFIX}{block(layer)}.gate_proj.lora_B.weight"] = torch.randn(EXPERTS, inner, RANK)
    said = refused(tmp_path, base, tensors)
    assert "if both were [experts, out, in]" in said
    assert ("transposed" in said) == (inner != HIDDEN // 2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda a, b: (a.transpose(1, 2), b), "asks for [3, in], after the experts"),
        (lambda a, b: (a[:2], b), "has lora_A of 2 experts and lora_B of 3"),
        (lambda a, b: (a[0], b), "one is packed over the experts, one is not"),
        (lambda a, b: (a[:2], b[:2]), "experts.2.gate_proj: is a target of the adapter's config and has no factors"),
        (lambda a, b: (a[:1], b[:1]), "experts.1.gate_proj: is a target of the adapter's config and has no factors"),
        (lambda a, b: (torch.cat([a, a]), torch.cat([b, b])), "experts.5.gate_proj.weight; it stores these experts as"),
        (lambda a, b: (a, b[:, :-1]), "the adapter's product is [5, 8]"),
    ],
)
@pytest.mark.parametrize("form", ["fused", "one by one"])
def test_packed_factors_that_do_not_fit(tmp_path: Path, edit: Any, message: str, form: str) -> None:
    """B33: orientation and number of experts are checked, nothing is spread or cut to fit."""
    tensors, _ = factors("packed")
    a, b = (f"{PREFIX}{block(0)}.gate_proj.lora_{factor}.weight" for factor in "AB")
    tensors[a], tensors[b] = (one.contiguous() for one in edit(tensors[a], tensors[b]))
    if form == "one by one" and "it stores these" in message:
        message = "the base has no model.layers.0.mlp.experts.5.gate_proj.weight"
    assert message in refused(tmp_path, stored(linears(), form), tensors)


def test_an_expert_twice(tmp_path: Path) -> None:
    tensors = factors("packed")[0]
    name = f"{PREFIX}{block(1)}.2.up_proj.lora_"
    tensors |= {f"{name}A.weight": torch.ones(RANK, HIDDEN), f"{name}B.weight": torch.ones(INNER, RANK)}
    assert f"has factors by itself and within {block(1)}.up_proj" in refused(
        tmp_path, stored(linears(), "fused"), tensors
    )


def test_packed_factors_of_something_else(tmp_path: Path) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{name}A.weight": torch.ones(1, RANK, HIDDEN), f"{name}B.weight": torch.ones(1, HIDDEN, RANK)}
    assert "is no experts' module" in refused(tmp_path, stored(linears(), "fused"), tensors)


def test_the_layouts_are_the_same_to_inspect_and_diff(tmp_path: Path) -> None:
    one = read_plain_adapter(make_adapter(tmp_path / "one", factors("one by one")[0]))
    packed = read_plain_adapter(make_adapter(tmp_path / "packed", factors("packed")[0]))
    assert pair_facts(one) == pair_facts(packed) and len(pair_facts(one)) == LAYERS * EXPERTS * 3
    assert not diff_adapters(one, packed).differs()
    assert diff_adapters(
        one, read_plain_adapter(make_adapter(tmp_path / "outer", factors("shared outer")[0]))
    ).differs()


def test_a_shape_that_lies_about_experts(tmp_path: Path) -> None:
    """No list is made of more experts than a model has."""
    base = stored(linears(), "fused") | {f"{block(0)}.down_proj": torch.zeros(2**16 + 1, 1, 1, dtype=torch.bfloat16)}
    assert "down_proj" in refused(tmp_path, base, factors("packed")[0])
